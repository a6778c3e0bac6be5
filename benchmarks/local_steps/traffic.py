"""Rows about the bytes that syncs send."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.local_steps.bench import BENCHMARK, NUM_ISLANDS, TOP_K, Bench
from benchmarks.local_steps.islands import Job
from laconic.codec import codec_named
from tests.support.record import Row

_NUMEL = 2**20
_RING = 2 * (NUM_ISLANDS - 1) / NUM_ISLANDS
"""The share of a vector that a rank sends in DDP's ring; also, of the encoded vector, in the two trips of a mean."""
_EVERY = 100


@BENCHMARK.row("bytes")
def bytes_per_token(bench: Bench) -> Row:
    return _row(
        bench,
        {"every": _EVERY, "codec": "int4"},
        name="int4",
        trips=_RING,
        how=f"DDP's ring sends {_RING:g} of the gradients in fp32; the two trips of an exchange send {_RING:g} of the "
        "pseudo-gradients in codes of 4 bits with one scale a block.",
    )


@BENCHMARK.row("bytes-top-k")
def bytes_of_top_k(bench: Bench) -> Row:
    bits = 8 * codec_named(TOP_K["codec"]).payload_bytes(_NUMEL) / _NUMEL
    return _row(
        bench,
        TOP_K,
        name="top-k in two bits",
        trips=NUM_ISLANDS - 1,
        how=f"an island sends 64 of each 4,096 values, in {bits:.3f} bits a value of all, to {NUM_ISLANDS - 1} others, "
        "in one trip.",
    )


def _row(bench: Bench, options: dict[str, Any], *, name: str, trips: float, how: str) -> Row:
    """The row of islands beside DDP. An island sends its coded vector `trips` times."""
    every = options["every"]
    arithmetic = every * _RING * 4 * _NUMEL / (trips * codec_named(options["codec"]).payload_bytes(_NUMEL))
    # so small a batch that a step waits for the wire, not for two cores that serve four islands
    common: dict[str, Any] = {"shape": bench.shape, "warmup_steps": 5, "rows": 2, "length": 64}
    ddp, local = bench.run_in_lab(
        [Job(name="ddp", kind="ddp", steps=12, **common), Job(name="local", steps=2 * every, **common, **options)]
    )
    ddp_bytes = statistics.mean(ddp.wire_bytes[2:])  # DDP builds its buckets in the first steps
    sent, counted = statistics.mean(local.wire_bytes), statistics.mean(local.sent_bytes)
    return Row(
        claim=f"wire bytes per token against every-step DDP, every={every}, {name}",
        measured=f"1/{ddp_bytes / sent:,.0f}",
        note=(
            f"sent by island 0 at the lab's interface: {sent / 1e3:.2f} kB a step (counted {counted / 1e3:.2f} kB) "
            f"against {ddp_bytes / 1e3:.0f} kB; equal tokens per step. Arithmetic says 1/{arithmetic:,.0f}: {how}"
        ),
    )
