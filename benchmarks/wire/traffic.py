"""Rows about the bytes of each level."""

from __future__ import annotations

from benchmarks.wire.bench import (
    BENCHMARK,
    COMPARED,
    LORA_RATE_BITS_PER_S,
    RATE_BITS_PER_S,
    Bench,
    formula_bytes,
    wire_bytes,
)
from laconic.compare.result import Result
from tests.support.record import Row


@BENCHMARK.row("wire-full")
def wire_full(bench: Bench) -> Row:
    host, fsdp2, hsdp, gloo = (bench.result(name) for name in ("host", "fsdp2", "hsdp", "fsdp2-gloo"))
    by_ring, by_hsdp, by_gloo = (wire_bytes(host) / wire_bytes(run) for run in (fsdp2, hsdp, gloo))
    return Row(
        claim="wire bytes per step, full training, fp32, cache=host, against FSDP2 with a true ring / HSDP",
        measured=f"{by_ring:.3f}x / {by_hsdp:.3f}x",
        note=(
            f"{wire_bytes(host) / 1e6:.2f} MB against {wire_bytes(fsdp2) / 1e6:.2f} and {wire_bytes(hsdp) / 1e6:.2f} "
            "MB per node and step. HSDP moves as few bytes, and holds the states once per node instead of once in all. "
            f"Gloo's own reduce-scatter is an all-reduce: with it FSDP2 moves {wire_bytes(gloo) / 1e6:.2f} MB, and the "
            f"ratio is {by_gloo:.3f}x."
        ),
    )


@BENCHMARK.row("wire-lora")
def wire_lora(bench: Bench) -> Row:
    host, fsdp2 = (bench.result(name, "lora", LORA_RATE_BITS_PER_S) for name in ("host", "fsdp2"))
    ratio = wire_bytes(host) / wire_bytes(fsdp2)
    trainable = host.num_trainable / host.num_parameters
    return Row(
        claim="wire bytes per step, LoRA with <= 1 % trainable, from step 2 on, against FSDP2",
        measured=f"{ratio:.2%}",
        note=f"{trainable:.2%} trainable; {wire_bytes(host) / 1e6:.3f} MB against {wire_bytes(fsdp2) / 1e6:.2f} MB.",
    )


@BENCHMARK.row("counted")
def counted(bench: Bench) -> Row:
    runs = [bench.result(name) for name in ("none", "host", "device")]
    lora = bench.result("host", "lora", LORA_RATE_BITS_PER_S)
    each = "; ".join(
        f"{run.job} {run.strategy}: interface {wire_bytes(run) / 1e6:.3f} MB, counted {_count_error(run):+.2%}, "
        f"formula {node_error(run):+.2%}"
        for run in (*runs, lora)
    )
    by_count = max(abs(_count_error(run)) for run in runs)
    by_formula = max(abs(node_error(run)) for run in runs)
    return Row(
        claim="counted bytes against the interface counters, and against the formula",
        measured=f"{by_count:.2%} and {by_formula:.2%} at worst, full training",
        note=(
            f"{each}. The interface also counts headers, acknowledgements and handshakes of the backend, some 400 "
            "bytes a message. That is little compared with the megabytes of a unit, but a few per cent of the "
            "kilobytes of a unit's adapters."
        ),
    )


@BENCHMARK.row("levels")
def levels(bench: Bench) -> Row:
    runs = [
        bench.result(name, rate_bits_per_s=RATE_BITS_PER_S, setup=setup)
        for setup in bench.clusters
        for name in COMPARED
    ]
    by_node = max(runs, key=lambda run: abs(node_error(run)))
    by_local = max((run for run in runs if run.num_local > 1), key=lambda run: abs(_local_error(run)))
    return Row(
        claim="bytes of each level by the formula against the interfaces, every strategy and cluster: wire / in nodes",
        measured=f"{node_error(by_node):+.2%} / {_local_error(by_local):+.2%} at worst",
        note=(
            f"{', '.join(map(str, bench.clusters))} (nodes x ranks); {', '.join(COMPARED)}. Worst on the wire: "
            f"{_case(by_node)}; in nodes: {_case(by_local)}. Ranks of a node talk over its loopback interface."
        ),
    )


def _case(run: Result) -> str:
    return f"{run.strategy} on {run.num_nodes} x {run.num_local}"


def node_error(run: Result) -> float:
    """The difference of the formula from the wire's counters, as a fraction of the latter."""
    return formula_bytes(run).node / wire_bytes(run) - 1


def _local_error(run: Result) -> float:
    assert run.local_bytes is not None  # the lab has a wire
    return formula_bytes(run).local / run.local_bytes - 1


def _count_error(run: Result) -> float:
    """The difference of laconic's count from the interface's count, as a fraction of the interface's count."""
    assert run.counted_bytes is not None  # laconic's strategies count
    return run.counted_bytes / wire_bytes(run) - 1
