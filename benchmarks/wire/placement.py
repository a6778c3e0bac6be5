"""Whole weights on each rank (`cache="rank"`) beside DDP, and beside what the wire alone takes."""

from __future__ import annotations

from benchmarks.wire.bench import BENCHMARK, FLAT, HOME, RATE_BITS_PER_S, Bench, Job, Setup, seconds_of, wire_bytes
from laconic.lab import format_rate
from tests.support.record import Row

_PEERS = ("ddp", "fsdp2")
_ALL = ("rank", *_PEERS)
_EIGHT = Setup(nodes=8, local=1)
_WHY: dict[Job, str] = {
    "full": "DDP reduces once, at the end, where each unit reduces on two levels, and ranks wait for each other each "
    "time.",
    "lora": "Small adapters are whole on each rank, as under DDP, and one sum of gradients is all that moves. It takes "
    "three trips in a row, in each of which ranks wait for their turn on a processor; CPU time is within 5 % of DDP's.",
}


@BENCHMARK.row("rank-shaped", section="placement")
def rank_shaped(bench: Bench) -> Row:
    """Full training where the wire is the bound."""
    return _on_a_wire(bench, HOME, FLAT)


@BENCHMARK.row("rank-8x1", section="placement")
def rank_8x1(bench: Bench) -> Row:
    """The same on eight nodes of one rank each."""
    return _on_a_wire(bench, _EIGHT)


def _on_a_wire(bench: Bench, *setups: Setup) -> Row:
    measured, each, runs = [], [], {}
    for setup in setups:
        times = bench.times(_ALL, "full", RATE_BITS_PER_S, setup)
        wire_s = 8 * wire_bytes(bench.result("rank", "full", RATE_BITS_PER_S, setup=setup)) / RATE_BITS_PER_S
        by_ddp, by_wire = times["rank"] / times["ddp"], times["rank"] / wire_s
        runs |= {f"{name} on {setup}": seconds for name, seconds in times.runs.items()}
        measured.append(f"{setup}: {by_ddp:.3f}x, {by_wire:.3f}x")
        each.append(f"{setup}: {seconds_of(times)}, the wire alone {wire_s:.3f} s")
    return Row(
        claim=f"step time, whole weights on each rank, {' and '.join(map(str, setups))} at "
        f"{format_rate(RATE_BITS_PER_S)}, against DDP; the wire alone",
        measured="; ".join(measured),
        note=f"full training; {'; '.join(each)}; medians of {bench.repeats} alternating runs each.",
        runs=runs,
    )


@BENCHMARK.row("rank-unshaped", section="placement")
def rank_unshaped(bench: Bench) -> Row:
    """Full training where processors are the bound."""
    return _against(bench, "full", None)


@BENCHMARK.row("rank-lora", section="placement")
def rank_lora(bench: Bench) -> Row:
    """LoRA, whose frozen weights never move."""
    return _against(bench, "lora", RATE_BITS_PER_S)


def _against(bench: Bench, job: Job, rate: float | None) -> Row:
    times = bench.times(_ALL, job, rate)
    ratios = [times["rank"] / times[name] for name in _PEERS]
    wire = "an unshaped wire" if rate is None else format_rate(rate)
    return Row(
        claim=f"step time, whole weights on each rank, {'LoRA' if job == 'lora' else 'full training'}, {wire}, "
        "against DDP / FSDP2",
        measured=" / ".join(f"{ratio:.3f}x" for ratio in ratios),
        note=(
            f"{HOME}; {seconds_of(times)}; medians of {bench.repeats} alternating runs each. Four ranks share two "
            f"processors. {_WHY[job]}"
        ),
        runs=times.runs,
    )
