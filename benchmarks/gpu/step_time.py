"""Rows about the step time of one rank on NCCL, against plain PyTorch and FSDP2."""

from __future__ import annotations

import statistics

import torch
from torch.distributed.device_mesh import init_device_mesh

import laconic
from benchmarks.gpu.training import (
    BLOCKS,
    STEPS_PER_BLOCK,
    WARMUP_STEPS,
    Bench,
    Sizes,
    Training,
    device_of,
    seconds_per_step,
)
from tests.support.record import Row, ratio_row


def step_rank(sizes: Sizes, device_type: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds per step of every block, and the first losses, by contestant."""
    mesh = laconic.init_mesh(device_type)
    device = device_of(device_type)
    kinds = ("plain", "fsdp2", "none")
    meshes = {"fsdp2": init_device_mesh(device_type, (1,)), "none": mesh}
    trainings = {
        kind: Training(kind, sizes.step.build(device, torch.bfloat16), sizes.step, meshes.get(kind)) for kind in kinds
    }
    losses = {kind: trainings[kind].warm_up() for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(BLOCKS):
        for turn in range(len(kinds)):  # every contestant is first equally often
            kind = kinds[(block + turn) % len(kinds)]
            times[kind].append(seconds_per_step(trainings[kind], device))
    return {kind: (times[kind], losses[kind]) for kind in kinds}


def step_plain(bench: Bench) -> Row:
    sizes, measured = bench.sizes, bench.step_times
    each = ", ".join(
        f"{kind} {statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
        for kind, (times, _) in measured.items()
    )
    worst = max(abs(a - b) / abs(b) for a, b in zip(measured["none"][1], measured["plain"][1], strict=True))
    note = (
        f"{sizes.step}, bf16, fused AdamW; medians of {BLOCKS} interleaved blocks of {STEPS_PER_BLOCK} "
        f"steps: {each}. The first {WARMUP_STEPS} losses differ from plain PyTorch's by {worst:.1e} at most."
    )
    return _row(bench, "plain", "plain PyTorch", 1.03, note)


def step_fsdp2(bench: Bench) -> Row:
    return _row(bench, "fsdp2", "FSDP2", 1.0)


def _row(bench: Bench, kind: str, name: str, limit: float, note: str = "") -> Row:
    laconic_s, other_s = (statistics.median(bench.step_times[each][0]) for each in ("none", kind))
    claim = f"step time, one rank, laconic / {name}"
    return ratio_row(key=f"step-{kind}", claim=claim, ratio=laconic_s / other_s, limit=limit, note=note)
