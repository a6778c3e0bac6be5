"""Rows about the bytes that syncs send, and about the seconds that they take."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.local_steps.bench import (
    BENCHMARK,
    NUM_ISLANDS,
    OUTER_MOMENTUM,
    RATE_BITS_PER_S,
    SMALL_STEP,
    STREAMED,
    TOP_K,
    Bench,
    wire_bytes,
)
from benchmarks.local_steps.islands import Answer, Job, Shape
from laconic.codec import codec_named
from laconic.lab import format_rate
from tests.support.record import Row

_NUMEL = 2**20
_RING = 2 * (NUM_ISLANDS - 1) / NUM_ISLANDS
"""The share of a vector that a rank sends in DDP's ring; also, of the encoded vector, in the two trips of a mean."""


@BENCHMARK.row("bytes")
def bytes_per_token(bench: Bench) -> Row:
    every = 100
    ddp, sent, counted = _bytes_of_a_step(bench, {"every": every, "codec": "int4"})
    arithmetic = every * 4 * _NUMEL / codec_named("int4").payload_bytes(_NUMEL)
    return Row(
        claim=f"wire bytes per token against every-step DDP, every={every}, int4",
        required="<= 1/400",
        measured=f"1/{ddp / sent:.0f}",
        is_met=sent <= ddp / 400,
        note=(
            f"{_measured(ddp, sent, counted)} Arithmetic says 1/{arithmetic:.0f}: DDP's ring sends "
            f"{_RING:g} of the gradients in fp32; the two trips of an exchange send {_RING:g} of the pseudo-gradients "
            "in codes of 4 bits with one scale a block."
        ),
    )


@BENCHMARK.row("bytes-top-k")
def bytes_of_top_k(bench: Bench) -> Row:
    every = TOP_K["every"]
    ddp, sent, counted = _bytes_of_a_step(bench, TOP_K)
    payload = codec_named(TOP_K["codec"]).payload_bytes(_NUMEL)
    arithmetic = every * _RING * 4 * _NUMEL / ((NUM_ISLANDS - 1) * payload)
    return Row(
        claim=f"wire bytes per token against every-step DDP, every={every}, top-k in two bits",
        required="<= 1/2,000",
        measured=f"1/{ddp / sent:,.0f}",
        is_met=sent <= ddp / 2000,
        note=(
            f"{_measured(ddp, sent, counted)} Arithmetic says 1/{arithmetic:,.0f}: an island sends "
            f"64 of each 4,096 values, in {8 * payload / _NUMEL:.3f} bits a value of all, to {NUM_ISLANDS - 1} others, "
            "in one trip."
        ),
    )


def _measured(ddp: float, sent: float, counted: float) -> str:
    """Describe the bytes that `_bytes_of_a_step` has found."""
    return (
        f"sent by island 0 at the lab's interface: {sent / 1e3:.2f} kB a step (counted {counted / 1e3:.2f} kB) "
        f"against {ddp / 1e3:.0f} kB; equal tokens per step."
    )


def _bytes_of_a_step(bench: Bench, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return the bytes that island 0 sends in a step of DDP and of islands, and the latter as the code counts them."""
    common = {"shape": bench.shape, "warmup_steps": 5, **SMALL_STEP}
    jobs = [
        Job(name="ddp", kind="ddp", steps=12, **common),
        Job(name="local", steps=2 * options["every"], **{**common, **options}),
    ]
    found = bench.run_in_lab(jobs, None)
    ddp = statistics.mean(wire_bytes(found["ddp"])[2:])  # DDP builds its buckets in the first steps
    return ddp, statistics.mean(wire_bytes(found["local"])), statistics.mean(found["local"].sent_bytes)


@BENCHMARK.row("peak")
def peak(bench: Bench) -> Row:
    common = {"shape": bench.shape, "warmup_steps": 5, "codec": "int4", "every": 40, "steps": 80, **SMALL_STEP}
    jobs = [Job(name="diloco", **common), Job(name="streamed", fragments=8, **common)]  # type: ignore[arg-type]
    found = bench.run_in_lab(jobs, None)
    largest = {name: max(wire_bytes(answer)) for name, answer in found.items()}
    streamed, diloco = largest["streamed"], largest["diloco"]
    return Row(
        claim="peak wire rate of streaming against DiLoCo, 8 fragments",
        required="<= 1/6",
        measured=f"1/{diloco / streamed:.2f}",
        is_met=streamed <= diloco / 6,
        note=(
            f"the most bytes that island 0 sent in one step: {streamed / 1e3:.1f} against "
            f"{diloco / 1e3:.1f} kB. Not 1/8, because one fragment also has the embeddings and the output layer."
        ),
    )


_WIDE = Shape(hidden=384, intermediate=1024, layers=4)
"""The model of the wall-clock row: half the layers of `Shape` and four times its parameters. Large models do not wait
for calls of small kernels, so this model has few large kernels."""
_WIDE_LR = 5e-4
"""The learning rate that was best for data parallel among 2e-3, 1e-3 and 5e-4."""


@BENCHMARK.row("wall-clock")
def wall_clock(bench: Bench) -> Row:
    steps = 30 if bench.quick else 150
    common = {
        "shape": bench.shape if bench.quick else _WIDE, "warm_steps": 3 * steps, "outer_momentum": OUTER_MOMENTUM,
        "lr": _WIDE_LR, "warm_lr": _WIDE_LR, "eval_every": steps // 15, "eval_rows": 64, **SMALL_STEP,
    }  # fmt: skip
    bench.warm_up(Job(name="warm up", steps=0, schedule_steps=4 * steps, **common))  # this does not need the wire
    jobs = [
        Job(name="ddp", kind="ddp", steps=steps * 3 // 5, schedule_steps=4 * steps, **common),
        # The settings of torchft, PyTorch's own DiLoCo: fp32 on the wire, and training waits for every exchange.
        Job(name="diloco", steps=steps, **common),
        Job(name="laconic", steps=steps, codec="int4", **STREAMED, **common),
    ]
    found = bench.run_in_lab(jobs, RATE_BITS_PER_S)
    target = found["ddp"].evaluations[-1][2]
    start = found["ddp"].evaluations[0][2]
    assert bench.quick or target < start, f"nothing was learnt: {start:.4f} before, {target:.4f} after"
    reached = {name: seconds_to(answer, target) for name, answer in found.items()}
    each = "; ".join(f"{name} {seconds:.1f} s, {step} steps" for name, (seconds, step) in reached.items())
    ddp_s, diloco_s, laconic_s = (reached[job.name][0] for job in jobs)
    return Row(
        claim=(
            f"wall-clock to a fixed loss in the lab at {format_rate(RATE_BITS_PER_S)}, "
            "against DDP / an equivalent DiLoCo"
        ),
        required="<= 1/10 / <= 1.0x",
        measured="never" if laconic_s == math.inf else f"1/{ddp_s / laconic_s:.1f} / {laconic_s / diloco_s:.3f}x",
        is_met=laconic_s <= ddp_s / 10 and laconic_s <= diloco_s,
        note=(
            f"seconds of training, without evaluations, until the eval loss, {start:.4f} at first, is {target:.4f}, "
            f"DDP's after three fifths of these steps: {each} (inf: not in {steps}). "
            f"{found['ddp'].num_parameters / 1e6:.2f} M parameters, learning rate {_WIDE_LR}. "
            "laconic streams int4 every 20 steps. DiLoCo sends fp32 every 20 steps and waits for each exchange, like "
            "torchft. "
            f"{SMALL_STEP['rows']} rows of {SMALL_STEP['length']} tokens per island and step, the last {steps} of a "
            f"schedule that begins with {3 * steps} of data parallel."
        ),
        tried=(
            "models of 1.67 M and 1.87 M parameters at 0.002 gave 1/7.6, because four islands on two cores wait for "
            "calls of small kernels; 7.28 M at 0.002, too high for that width, never reached DDP's loss."
        ),
    )


def seconds_to(answer: Answer, loss: float) -> tuple[float, int]:
    """Return the seconds and steps of training until an evaluation is at most `loss`; infinite seconds if none is."""
    for step, seconds, found in answer.evaluations:
        if found <= loss:
            return seconds, step
    return math.inf, answer.evaluations[-1][0]


@BENCHMARK.row("overlap")
def overlap(bench: Bench) -> Row:
    synced = {"every": 100, "fragments": 4, "overlap": 10}
    # One period, in which each fragment is sent and applied. It ends before the last step: an exchange that begins
    # with the last step has no step to hide behind.
    begin, end = 11, 36 if bench.quick else 111
    repeats = 1 if bench.quick else 5
    common = {"shape": bench.shape, "steps": end + 1, "codec": "int4", "warmup_steps": 5}
    jobs = []
    for repeat in range(repeats):
        jobs.append(Job(name=f"synced {repeat}", **common, **synced))  # type: ignore[arg-type]
        jobs.append(Job(name=f"never {repeat}", every=10**9, **common))  # type: ignore[arg-type]
    found = bench.run_in_lab(jobs, RATE_BITS_PER_S)
    means = {
        kind: statistics.median(statistics.mean(found[f"{kind} {r}"].step_s[begin:end]) for r in range(repeats))
        for kind in ("synced", "never")
    }
    reports = [report for answer in found.values() for report in answer.reports]
    takes_s = statistics.mean(report["hidden_s"] + report["exposed_s"] for report in reports)
    exposed_s = statistics.mean(report["exposed_s"] for report in reports)
    ratio = means["synced"] / means["never"]
    return Row(
        claim="seconds per step with overlap, at a rate where a sync takes <= overlap steps, against no sync",
        required="within 3 %",
        measured=f"{ratio - 1:+.2%}",
        is_met=ratio <= 1.03 and takes_s <= synced["overlap"] * means["never"],
        note=(
            f"{format_rate(RATE_BITS_PER_S)}, int4, every=100 in 4 fragments, overlap 10: {means['synced']:.4f} "
            f"against {means['never']:.4f} s a step, medians of {repeats} alternating runs of {end - begin} steps. An "
            f"exchange takes {takes_s * 1e3:.0f} ms, {takes_s / means['never']:.1f} steps; training waits for the last "
            f"{exposed_s * 1e3:.1f} ms of the exchange."
        ),
        tried="runs that end with a sync, whose exchange has no steps to hide behind: +6.32%.",
    )
