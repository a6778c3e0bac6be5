"""Rows about the peak memory of four ranks that share one GPU over Gloo."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from benchmarks.gpu.training import BENCHMARK, BF16, LOCAL, NODES, Bench, Sizes, Training, become_rank_0, device_of
from laconic.shard.unit import unit_of
from tests.support.record import Row, ratio_row

_NUM_STEPS = 3
"""The number of warm steps over which the peak is taken."""
KINDS = ("none", "host", "device", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most memory of a step on one rank, in bytes."""

    allocated: int
    """The peak of torch's allocator; without a GPU, the peak of the engine."""
    engine: int
    """The peak of the engine's own account."""
    host: int
    """The host memory of the cache."""
    is_pageable: bool
    """Whether the host slab could not be page-locked."""


def memory_rank(sizes: Sizes, device_type: str, kinds: Sequence[str], is_alone: bool) -> dict[str, Peak | str]:
    """Return the peak memory of warm steps by contestant, or the reason why there is none."""
    if is_alone:
        become_rank_0()
    mesh = laconic.init_mesh(device_type, nodes=NODES, local=LOCAL)
    flat = init_device_mesh(device_type, (dist.get_world_size(),))
    device = device_of(device_type)
    peaks: dict[str, Peak | str] = {}
    for kind in kinds:
        try:
            peaks[kind] = _peak_of(kind, sizes, device, flat if kind == "fsdp2" else mesh)
        except Exception as error:  # of any kind: torch decides how FSDP2 fails over this backend
            if kind != "fsdp2":  # only for FSDP2 a failure is a result
                raise
            peaks[kind] = f"{type(error).__name__}: {error}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return peaks


def _peak_of(kind: str, sizes: Sizes, device: torch.device, mesh: DeviceMesh) -> Peak:
    training = Training(kind, sizes.memory.build(device, torch.float32), sizes.memory, mesh, BF16)
    training.warm_up()
    is_laconic = kind != "fsdp2"
    if is_laconic:
        training.model.reset_peak_memory()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(_NUM_STEPS):
        training.step()
    engine = training.model.memory() if is_laconic else None
    engine_peak = engine.device_peak_bytes if engine else 0
    slab = _slab_of(training.model) if kind == "host" else None
    return Peak(
        allocated=torch.cuda.max_memory_allocated() if device.type == "cuda" else engine_peak,
        engine=engine_peak,
        host=engine.host_bytes if engine else 0,
        is_pageable=slab is not None and device.type == "cuda" and not slab.is_pinned(),
    )


def _slab_of(model: nn.Module) -> Tensor | None:
    """A node shard that stays in the host slab."""
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    node_shards = [bucket.node_shard for unit in units for bucket in unit.buckets]
    return next((shard.buffer() for shard in node_shards if shard.where == "host"), None)


def _peaks(bench: Bench) -> list[dict[str, Any]]:
    return bench.launch(memory_rank, KINDS, False)


@BENCHMARK.row("memory-host")
def memory_host(bench: Bench) -> Row:
    none, host, device = (_largest(bench, kind) for kind in ("none", "host", "device"))
    alone = bench.launch(memory_rank, ("none", "host", "device"), True, num_ranks=1)[0]
    megabytes = "; ".join(
        f"{name} none {getattr(none, field) / 1e6:.1f}, host {getattr(host, field) / 1e6:.1f}, "
        f"device {getattr(device, field) / 1e6:.1f}"
        for name, field in (("MB:", "allocated"), ("as the engine accounts:", "engine"))
    )
    expected_alone = alone["none"].allocated + node_shards_bytes(bench.sizes)
    note = (
        f"{bench.sizes.memory}, fp32 with bf16 compute, {NODES} nodes x {LOCAL} ranks on one device; {megabytes}; host "
        f"slab {host.host / 1e6:.1f} MB per rank{', NOT page-locked' if host.is_pageable else ''}. With one rank "
        "alone, whose transfers take no time and run in stream order as with NCCL, host / none is "
        f"{alone['host'].allocated / alone['none'].allocated:.4f} and device / (none + W / L) "
        f"{alone['device'].allocated / expected_alone:.4f}."
    )
    return _ratio_row(bench, "host", "none", host.allocated / none.allocated, note)


@BENCHMARK.row("memory-device")
def memory_device(bench: Bench) -> Row:
    none, device = _largest(bench, "none"), _largest(bench, "device")
    expected = none.allocated + node_shards_bytes(bench.sizes)
    return _ratio_row(bench, "device", "(none + W / L)", device.allocated / expected)


@BENCHMARK.row("memory-fsdp2")
def memory_fsdp2(bench: Bench) -> Row:
    host = _largest(bench, "host")
    claim = f"{_peak_name(bench)}, cache=host / FSDP2"
    failures = [peak for peaks in _peaks(bench) if isinstance(peak := peaks["fsdp2"], str)]
    if failures or bench.device_type == "cpu":
        reason = f"FSDP2 did not run over Gloo on this device: {failures[0]}" if failures else "no allocator on CPU."
        return Row(claim=claim, measured="-", note=reason)
    fsdp2 = _largest(bench, "fsdp2")
    ratio, note = host.allocated / fsdp2.allocated, f"FSDP2 {fsdp2.allocated / 1e6:.1f} MB"
    return ratio_row(claim=claim, ratio=ratio, note=note)


def _largest(bench: Bench, kind: str) -> Peak:
    return max((peaks[kind] for peaks in _peaks(bench)), key=lambda peak: peak.allocated)


def node_shards_bytes(sizes: Sizes) -> float:
    """Return the bytes W / L of all node shards of a rank, in bf16."""
    with torch.device("meta"):
        model = sizes.memory.build(torch.device("meta"), torch.bfloat16)
    return sum(parameter.nbytes for parameter in model.parameters()) / LOCAL


def _peak_name(bench: Bench) -> str:
    return "torch's peak allocated" if bench.device_type == "cuda" else "the engine's peak"


def _ratio_row(bench: Bench, kind: str, expected: str, ratio: float, note: str = "") -> Row:
    return Row(claim=f"{_peak_name(bench)}, cache={kind} / {expected}", measured=f"{ratio:.4f}", note=note)
