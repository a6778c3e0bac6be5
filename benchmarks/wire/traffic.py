"""Rows about the bytes on the wire, and about the losses."""

from __future__ import annotations

from benchmarks.record import Row, ratio_row
from benchmarks.wire.bench import FLOAT32_BYTES, LORA_RATE_BITS_PER_S, NODES, Bench, wire_bytes
from laconic.compare import Result


def wire_full(bench: Bench) -> Row:
    host, fsdp2 = wire_bytes(bench.result("host")), wire_bytes(bench.result("fsdp2"))
    return ratio_row(
        key="wire-full",
        claim="wire bytes per step, full training, fp32, cache=host, against FSDP2",
        ratio=host / fsdp2,
        limit=0.35,
        note=f"{host / 1e6:.2f} MB against {fsdp2 / 1e6:.2f} MB per node and step; the formula says 0.333.",
    )


def wire_lora(bench: Bench) -> Row:
    host, fsdp2 = (bench.result(name, "lora", LORA_RATE_BITS_PER_S) for name in ("host", "fsdp2"))
    ratio = wire_bytes(host) / wire_bytes(fsdp2)
    trainable = host.num_trainable / host.num_parameters
    return Row(
        key="wire-lora",
        claim="wire bytes per step, LoRA with <= 1 % trainable, from step 2 on, against FSDP2",
        required="<= 1 %",
        measured=f"{ratio:.2%}",
        is_met=ratio <= 0.01 and trainable <= 0.01,
        note=f"{trainable:.2%} trainable; {wire_bytes(host) / 1e6:.3f} MB against {wire_bytes(fsdp2) / 1e6:.2f} MB.",
    )


def counted(bench: Bench) -> Row:
    runs = [bench.result(name) for name in ("none", "host", "device")]
    lora = bench.result("host", "lora", LORA_RATE_BITS_PER_S)
    each = "; ".join(
        f"{run.job} {run.strategy}: interface {wire_bytes(run) / 1e6:.3f} MB, counted {_count_error(run):+.2%}, "
        f"formula {_formula_error(run):+.2%}"
        for run in (*runs, lora)
    )
    by_count = max(abs(_count_error(run)) for run in runs)
    by_formula = max(abs(_formula_error(run)) for run in runs)
    return Row(
        key="counted",
        claim="counted bytes against the interface counters, and against the formula",
        required="within 2 %",
        measured=f"{by_count:.2%} and {by_formula:.2%} at worst, full training",
        is_met=max(by_count, by_formula) <= 0.02,
        note=(
            f"{each}. The interface also counts headers, acknowledgements and handshakes of the backend, some 400 "
            "bytes a message. That is little compared with the megabytes of a unit, but a few per cent of the "
            "kilobytes of a unit's adapters."
        ),
    )


def _count_error(run: Result) -> float:
    """The difference of laconic's count from the interface's count, as a fraction of the interface's count."""
    assert run.counted_bytes is not None  # laconic's strategies count
    return run.counted_bytes / wire_bytes(run) - 1


def _formula_error(run: Result) -> float:
    return formula_bytes(run) / wire_bytes(run) - 1


def formula_bytes(run: Result) -> float:
    """Return the predicted bytes: (N - 1) / N of the weights per gather across nodes, and of the gradients once."""
    gathers = 2 if run.strategy == "none" else 1
    frozen = run.num_parameters - run.num_trainable if run.strategy == "none" else 0
    elements = run.num_trainable * (gathers + 1) + frozen * gathers
    return (NODES - 1) / NODES * elements * FLOAT32_BYTES


def losses(bench: Bench) -> Row:
    host, fsdp2 = bench.result("host").losses, bench.result("fsdp2").losses
    worst = max(abs(a / b - 1) for a, b in zip(host, fsdp2, strict=True))
    return Row(
        key="losses",
        claim=f"losses over {bench.loss_steps} steps",
        required="equal to FSDP2's within 1e-4 relative, fp32",
        measured=f"within {worst:.1e}",
        is_met=worst <= 1e-4,
        note=f"the loss falls from {fsdp2[0]:.3f} to {fsdp2[-1]:.3f}.",
    )
