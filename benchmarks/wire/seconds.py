"""Rows about the time of a step."""

from __future__ import annotations

from benchmarks.record import Row, ratio_row
from benchmarks.wire.bench import (
    LORA_RATE_BITS_PER_S,
    RATES_BITS_PER_S,
    SLOWEST_RATE_BITS_PER_S,
    Bench,
    wire_bytes,
)
from laconic.compare import Result
from laconic.lab import format_rate

_WIRE_BOUND = 0.9
"""The fraction of FSDP2's step that its bytes must take for the step to count as bound by the wire."""


def time_full(bench: Bench) -> Row:
    ratios, each, bound = {}, [], []
    for rate in RATES_BITS_PER_S[1:]:
        fsdp2, host = (bench.result(name, rate_bits_per_s=rate) for name in ("fsdp2", "host"))
        ratios[rate] = host.step_s / fsdp2.step_s
        if wire_fraction(fsdp2) > _WIRE_BOUND:
            bound.append(rate)
        each.append(
            f"{format_rate(rate)}: {host.step_s:.3f} s against {fsdp2.step_s:.3f} s, {ratios[rate]:.3f}x; FSDP2's "
            f"bytes take {wire_fraction(fsdp2):.1%} of its step"
        )
    rate = bound[0] if bound else min(ratios)
    return Row(
        key="time-full",
        claim="step time, full training, at a rate where FSDP2 spends > 90 % of its step on the wire",
        required="<= 0.37x FSDP2",
        measured=f"{ratios[rate]:.3f}x at {format_rate(rate)}",
        is_met=bool(bound) and ratios[rate] <= 0.37,
        note=f"{'; '.join(each)}.",
    )


def wire_fraction(run: Result) -> float:
    """Return the fraction of a step during which the wire carries the bytes of the step."""
    assert run.rate_bits_per_s is not None
    return wire_bytes(run) * 8 / run.rate_bits_per_s / run.step_s


def time_lora(bench: Bench) -> Row:
    fsdp2, host = (bench.result(name, "lora", SLOWEST_RATE_BITS_PER_S) for name in ("fsdp2", "host"))
    return Row(
        key="time-lora",
        claim="step time, LoRA, at the slowest rate of the sweep",
        required="<= 1/50 of FSDP2",
        measured=f"1/{fsdp2.step_s / host.step_s:.0f} at {format_rate(SLOWEST_RATE_BITS_PER_S)}",
        is_met=host.step_s <= fsdp2.step_s / 50,
        note=f"{host.step_s:.3f} s against {fsdp2.step_s:.2f} s.",
    )


def lora_rate(bench: Bench) -> Row:
    bench.alternate(("host", "lora", None), ("host", "lora", LORA_RATE_BITS_PER_S))
    shaped, unshaped = bench.step_s("host", "lora", LORA_RATE_BITS_PER_S), bench.step_s("host", "lora")
    note = f"{shaped:.3f} s against {unshaped:.3f} s, medians of {bench.repeats} alternating runs each."
    claim = "step time, LoRA, at 100 Mbit/s, against its own step on an unshaped wire"
    return ratio_row(key="lora-rate", claim=claim, ratio=shaped / unshaped, limit=1.15, note=note)


def overlap(bench: Bench) -> Row:
    alone = bench.compute_alone()
    ratios, each = {}, []
    for rate in RATES_BITS_PER_S:
        run = bench.result("host", rate_bits_per_s=rate)
        forward_s, backward_s = (phase_bytes * 8 / rate for phase_bytes in _bytes_by_phase(run))
        bound_s = max(alone["forward_s"], forward_s) + max(alone["backward_s"], backward_s)
        ratios[rate] = run.step_s / bound_s
        each.append(
            f"{format_rate(rate)}: {run.step_s:.3f} s, wire {forward_s:.3f} + {backward_s:.3f} s, {ratios[rate]:.3f}x"
        )
    return Row(
        key="overlap",
        claim="step time against the sum over forward and backward of max(compute alone, wire bytes / rate)",
        required="<= 1.15x",
        measured=", ".join(f"{ratio:.3f}x at {format_rate(rate)}" for rate, ratio in ratios.items()),
        is_met=max(ratios.values()) <= 1.15,
        note=(
            f"full training, cache=host; compute alone {alone['forward_s']:.3f} + {alone['backward_s']:.3f} s, by the "
            f"same 4 processes on the same cores without communication; {'; '.join(each)}."
        ),
    )


def _bytes_by_phase(run: Result) -> tuple[float, float]:
    """The wire's bytes in forward and in backward: with a cache, weights cross in forward alone."""
    weights, gradients = (run.traffic_bytes[f"node/{purpose}"] for purpose in ("weights", "gradients"))
    in_forward = wire_bytes(run) * weights / (weights + gradients)
    return in_forward, wire_bytes(run) - in_forward


def unshaped(bench: Bench) -> Row:
    names = ("fsdp2", "host", "none", "device")
    bench.alternate(*((name, "full", None) for name in names))
    times = {name: bench.step_s(name) for name in names}
    ratios = {name: times[name] / times["fsdp2"] for name in names[1:]}
    each = "; ".join(f"{name} {time:.3f} s" for name, time in times.items())
    return Row(
        key="unshaped",
        claim="step time on an unshaped wire, full training, cache=host / every other strategy",
        required="<= 0.75x / <= 1x FSDP2",
        measured=f"{ratios['host']:.3f}x / none {ratios['none']:.3f}x, device {ratios['device']:.3f}x",
        is_met=ratios["host"] <= 0.75 and max(ratios.values()) <= 1,
        note=f"{each}, medians of {bench.repeats} alternating runs each.",
    )
