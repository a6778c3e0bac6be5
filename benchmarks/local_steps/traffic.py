"""Rows about the bytes on the wire."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.local_steps.bench import BENCHMARK, NUM_ISLANDS, SMALL_STEP, TOP_K, Bench, wire_bytes
from benchmarks.local_steps.islands import Job
from laconic.codec import codec_named
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
