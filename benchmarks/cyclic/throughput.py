"""Rows about the speed of real training in the lab: 4 nodes with one rank each, and runs that take turns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Collection

from benchmarks.cyclic.bench import BENCHMARK, TIMEOUT_S, Bench
from laconic.compare.runner import explain_failure
from laconic.lab import Lab, format_rate
from tests.support.record import Row

RATE_BITS_PER_S = 400e6
"""The rate of the lab's links."""
EXPOSED = 1.1
"""The factor by which this wire must slow down DDP's step; otherwise the wire decides nothing, and the row fails."""


@BENCHMARK.row("throughput")
def throughput(bench: Bench) -> Row:
    unshaped_s = _alternate(bench, ["ddp"], None)["ddp"]
    times = _alternate(bench, ["ddp", "fsdp2", "lag2/replicated", "v2/replicated"], RATE_BITS_PER_S)
    exposed = times["ddp"] / unshaped_s
    return _row(
        bench,
        times,
        baseline="ddp",
        states="replicated",
        claim="throughput in the lab where DP's all-reduce is exposed, against DDP",
        note=(
            f" DDP unshaped {unshaped_s:.3f} s: the wire shows by {exposed - 1:.0%} (required: {EXPOSED - 1:.0%}). "
            "fsdp2 has a true ring; it also shards parameters, so DDP is the stronger baseline here, and HSDP on nodes "
            "of one rank is DDP."
        ),
        is_valid=exposed >= EXPOSED,
    )


@BENCHMARK.row("sharded")
def sharded(bench: Bench) -> Row:
    times = _alternate(bench, ["fsdp2", "lag2/sharded", "v2/sharded"], RATE_BITS_PER_S)
    return _row(
        bench,
        times,
        baseline="fsdp2",
        states="sharded",
        claim="throughput in the lab, sharded states, against FSDP2 with a true ring",
        note=" FSDP2's gathers and reductions run beside compute, as on NCCL.",
        is_valid=True,
    )


def _row(
    bench: Bench,
    times: dict[str, float],
    *,
    baseline: str,
    states: str,
    claim: str,
    note: str,
    is_valid: bool,
) -> Row:
    """The row of the rules lag2 and v2 against a baseline; `times` may have further strategies, for the note."""
    baseline_s, lag2_s, v2_s = times[baseline], times[f"lag2/{states}"], times[f"v2/{states}"]
    seconds = ", ".join(f"{strategy} {step_s:.3f} s" for strategy, step_s in times.items())
    return Row(
        claim=claim,
        required=">= 1.0x",
        measured=f"lag2 {baseline_s / lag2_s:.3f}x, v2 {baseline_s / v2_s:.3f}x",
        is_met=baseline_s >= lag2_s and is_valid,
        note=(
            f"{bench.llama} on 4 nodes at {format_rate(RATE_BITS_PER_S)}: {seconds} a step, medians of "
            f"{bench.repeats} alternating runs of {bench.lab_steps} steps.{note}"
        ),
    )


def _alternate(bench: Bench, strategies: Collection[str], rate_bits_per_s: float | None) -> dict[str, float]:
    """Return the seconds per step by strategy: the medians of runs that take turns."""
    job, answer = bench.out / "lab.json", bench.out / "lab-answer.json"
    job.write_text(json.dumps({"llama": dataclasses.asdict(bench.llama), "steps": bench.lab_steps}))
    times: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    with Lab(nodes=4, rate_bits_per_s=rate_bits_per_s) as lab:
        for _, strategy in itertools.product(range(bench.repeats), strategies):
            command = ["-m", "benchmarks.cyclic.lab_rank", strategy, str(job), str(answer)]
            outcome = lab.run(command, local=1, timeout_s=TIMEOUT_S, show=False)
            if outcome.exit_code:
                raise RuntimeError(f"{strategy} failed: {explain_failure(outcome)}")
            found = json.loads(answer.read_text())
            rate = format_rate(rate_bits_per_s)
            print(f"{strategy}, {rate}: {found['step_s']:.3f} s, loss {found['loss']:.4f}", flush=True)
            times[strategy].append(found["step_s"])
    return {strategy: statistics.median(found) for strategy, found in times.items()}
