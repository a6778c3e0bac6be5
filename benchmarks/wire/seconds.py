"""Rows about the time of a step."""

from __future__ import annotations

from benchmarks.wire.bench import (
    BENCHMARK,
    COMPARED,
    FLAT,
    HOME,
    HPZ_RATE_BITS_PER_S,
    RATE_BITS_PER_S,
    Bench,
    Setup,
    seconds_of,
    wire_bytes,
)
from laconic.compare.case import STRATEGIES
from laconic.lab import format_rate
from tests.support.record import Row

HPZ_PEERS = ("fsdp2-hpz", "deepspeed-hpz", "zero++")
"""The strategies that keep a copy of the weights on each node's devices, until backward or for good."""


@BENCHMARK.row("time-2x2")
def time_2x2(bench: Bench) -> Row:
    return _against_baselines(bench, HOME)


@BENCHMARK.row("time-4x1")
def time_4x1(bench: Bench) -> Row:
    return _against_baselines(bench, FLAT)


def _against_baselines(bench: Bench, setup: Setup) -> Row:
    times = bench.times(COMPARED, "full", RATE_BITS_PER_S, setup)
    ratios = {name: times["host"] / time for name, time in times.items()}
    host_bytes, fsdp2_bytes = (
        wire_bytes(bench.result(name, "full", RATE_BITS_PER_S, setup=setup)) for name in ("host", "fsdp2")
    )
    floor_s, fsdp2_s = (8 * each / RATE_BITS_PER_S for each in (host_bytes, fsdp2_bytes))
    return Row(
        claim=f"step time, full training on {setup} at {format_rate(RATE_BITS_PER_S)}, against FSDP2's ring / HSDP",
        measured=f"{ratios['fsdp2']:.3f}x / {ratios['hsdp']:.3f}x",
        note=(
            f"{seconds_of(times)}, medians of {bench.repeats} alternating runs each; DDP {ratios['ddp']:.3f}x. The "
            f"bytes are {host_bytes / fsdp2_bytes:.3f}x FSDP2's, which take {fsdp2_s / times['fsdp2']:.1%} of its "
            f"step, as its gathers run ahead. The wire alone takes {floor_s:.3f} s for laconic's bytes, "
            f"{floor_s / times['fsdp2']:.3f}x and {floor_s / times['hsdp']:.3f}x. HSDP moves as few bytes as a cache. "
            f"On CPU its reductions wait; with NCCL they overlap, and the two should be level."
        ),
        runs=times.runs,
    )


@BENCHMARK.row("lora-hpz")
def lora_hpz(bench: Bench) -> Row:
    """Compare LoRA with what keeps a copy of the weights on each node's devices: until backward, or for good."""
    rate = HPZ_RATE_BITS_PER_S
    times = bench.times((*HPZ_PEERS, "host"), "lora", rate)
    ratios = [times[name] / times["host"] for name in HPZ_PEERS]
    megabytes = {name: wire_bytes(bench.result(name, "lora", rate)) / 1e6 for name in times}
    each = "; ".join(
        f"{STRATEGIES[name].label} {time:.3f} s, {megabytes[name]:.2f} MB on the wire" for name, time in times.items()
    )
    return Row(
        claim=f"step time, LoRA, at {format_rate(rate)}, against FSDP2 hpZ / DeepSpeed hpZ / ZeRO++'s algorithm",
        measured=" / ".join(f"1/{ratio:.1f}" for ratio in ratios),
        note=(
            f"{each}; medians of {bench.repeats} alternating runs each. FSDP2 hpZ gathers all weights along one ring "
            "in every forward, ZeRO++ in 8 bits on two levels. DeepSpeed keeps frozen weights on the node since "
            "0.13.2, as a cache of laconic's does."
        ),
        runs=times.runs,
    )


@BENCHMARK.row("unshaped")
def unshaped(bench: Bench) -> Row:
    own = ("host", "none", "device")
    times = bench.times(("fsdp2", *own, "fsdp2-gloo", "hsdp", "ddp"))
    ratios = {name: time / times["fsdp2"] for name, time in times.items()}
    return Row(
        claim="step time on an unshaped wire, full training, every strategy, against FSDP2 with a true ring",
        measured=", ".join(f"{name} {ratios[name]:.3f}x" for name in own),
        note=(
            f"{seconds_of(times)}, medians of {bench.repeats} alternating runs each. Against FSDP2: with Gloo's own "
            f"collectives {ratios['fsdp2-gloo']:.3f}x, HSDP {ratios['hsdp']:.3f}x, DDP {ratios['ddp']:.3f}x. On CPU "
            "FSDP2 and HSDP wait for their reductions."
        ),
        runs=times.runs,
    )
