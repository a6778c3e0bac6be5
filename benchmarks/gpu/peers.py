"""Rows about laconic beside FSDP2 with its policies: offload to host memory, and the host's time for a unit.

Transfers between ranks are free here: both engines run as rank 0 of four ranks that are not there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import laconic
from benchmarks.gpu.training import (
    BENCHMARK,
    BF16,
    LOCAL,
    NODES,
    Bench,
    Sizes,
    Training,
    become_rank_0,
    device_of,
    now_s,
)
from benchmarks.llama import Llama
from tests.support.record import Row, ratio_row

BLOCKS, _STEPS = 5, 3
HOST_KINDS: dict[str, dict[str, Any]] = {"none": {}, "host": {}, "4bit": {"wire": "4bit"}}
"""The host's time for a step of each kind, at most, as a multiple of FSDP2's."""


def trainings_of(kinds: dict[str, dict[str, Any]], shape: Llama, device: torch.device) -> dict[str, Training]:
    """Return the training of each contestant, as rank 0 of ranks that are not there, by name: FSDP2 and caches."""
    mesh = laconic.init_mesh(device.type, nodes=NODES, local=LOCAL)
    flat = init_device_mesh(device.type, (NODES * LOCAL,))
    found = {}
    for kind, options in kinds.items():
        on_host = "offload_policy" in options
        model = shape.build(torch.device("cpu") if on_host else device, torch.float32)
        cache = "host" if kind == "4bit" else kind
        found[kind] = Training(cache, model, shape, flat if kind == "fsdp2" else mesh, BF16, **options)
    return found


def alternating(trainings: dict[str, Training], step: Callable[[Training], object]) -> dict[str, list[float]]:
    """Return the seconds of a step of each contestant, block by block, after a block that warms up."""
    times: dict[str, list[float]] = {kind: [] for kind in trainings}
    for block in range(-1, BLOCKS):
        for kind in sorted(trainings, reverse=bool(block % 2)):
            start_s = now_s()
            for _ in range(_STEPS):
                step(trainings[kind])
            if block >= 0:
                times[kind].append((now_s() - start_s) / _STEPS)
    return times


def _forward_and_backward(training: Training) -> None:
    training.backward()
    training.model.zero_grad()


def offload_rank(sizes: Sizes, device_type: str) -> dict[str, list[float]]:
    """Return the seconds of forward and backward under offload, block by block, by contestant."""
    become_rank_0()
    device = device_of(device_type)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
    trainings = trainings_of(dict.fromkeys(("fsdp2", "none"), options), sizes.memory, device)
    return alternating(trainings, _forward_and_backward)


@BENCHMARK.row("offload")
def offload(bench: Bench) -> Row:
    """Forward and backward with shards in host memory, against FSDP2."""
    times = bench.launch(offload_rank, num_ranks=1)[0]
    ours, theirs = (statistics.median(times[kind]) for kind in ("none", "fsdp2"))
    return ratio_row(
        claim="forward and backward under CPU offload, laconic / FSDP2", ratio=ours / theirs,
        note=f"{bench.sizes.memory}, fp32 in host memory, bf16 compute; rank 0 of {NODES * LOCAL}, transfers between "
        f"ranks free; {ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms, medians of {BLOCKS} alternating blocks.",
    )  # fmt: skip


def host_rank(sizes: Sizes, device_type: str) -> dict[str, list[float]]:
    """Return the host's seconds for a step, block by block, by contestant: the device is never behind."""
    become_rank_0()
    return alternating(trainings_of({"fsdp2": {}, **HOST_KINDS}, sizes.host, device_of(device_type)), Training.step)


def _host_row(kind: str) -> None:
    @BENCHMARK.row(f"host-{kind}")
    def host(bench: Bench) -> Row:
        times = bench.launch(host_rank, num_ranks=1)[0]
        ratio = statistics.median(a / b for a, b in zip(times[kind], times["fsdp2"], strict=True))
        each = ", ".join(f"{name} {statistics.median(found) * 1e3:.1f} ms" for name, found in times.items())
        return ratio_row(
            claim=f"a step whose kernels take no time, {kind} / FSDP2", ratio=ratio,
            note=f"{bench.sizes.host}, fp32 with bf16 compute, fused AdamW; rank 0 of {NODES * LOCAL}, transfers "
            f"between ranks free; {each}, medians of {BLOCKS} alternating blocks of {_STEPS} steps.",
        )  # fmt: skip


for _kind in HOST_KINDS:
    _host_row(_kind)
