"""The time that transfers along one level of a cluster take, measured while all ranks have one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator
from laconic.comm.groups import is_rehearsed
from laconic.comm.traffic import IslandLevel

_SMALL_BYTES = 64
_LARGE_BYTES, _LARGE_ON_STREAM_BYTES = 1 << 18, 1 << 23
"""A quarter of a MiB takes 40 ms at 50 Mbit/s. NCCL needs more until its rate shows."""
_REPETITIONS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The time that transfers of one kind take while all ranks have one."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    """Bytes per second that each rank receives."""

    def seconds(self, nbytes: int) -> float:
        """The seconds of a transfer of `nbytes`."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


AS_IN_A_RACK: dict[str, Speed] = {
    "node": Speed(latency_s=30e-6, bytes_per_s=3e9),
    "local": Speed(latency_s=20e-6, bytes_per_s=1e11),
    "copy": Speed(latency_s=10e-6, bytes_per_s=2e10),
}
"""Speeds of 25 Gbit/s for each rank, NVLink and PCIe: those of a rehearsal, which has no clock while it runs."""


def measure_gathers(cluster: Cluster, level: IslandLevel) -> Speed:
    """Measure all-gathers along a level. Collective over the level's ranks; a level of one rank takes no time.

    Cost: some transfers of a quarter of a MiB from each rank to each other on Gloo, of 8 MiB on NCCL.
    """
    ranks = Communicator(cluster, level)
    if ranks.size == 1:
        return Speed()
    if is_rehearsed():
        return AS_IN_A_RACK[level]

    def gather(numel: int) -> Callable[[], None]:
        whole = torch.zeros(ranks.size * numel, dtype=torch.uint8, device=cluster.device)
        piece = torch.zeros(numel, dtype=torch.uint8, device=cluster.device)
        return lambda: ranks.all_gather(whole, piece, "control").wait()

    large_bytes = _LARGE_ON_STREAM_BYTES if ranks.is_stream_ordered else _LARGE_BYTES
    return _speed(gather, cluster.device, large_bytes, factor=ranks.size - 1)


def measure_copies(device: torch.device) -> Speed:
    """Measure copies from page-locked host memory to an accelerator."""
    if is_rehearsed():
        return AS_IN_A_RACK["copy"]

    def copy(numel: int) -> Callable[[], object]:
        there = torch.empty(numel, dtype=torch.uint8, device=device)
        here = torch.zeros(numel, dtype=torch.uint8).pin_memory()
        return lambda: there.copy_(here, non_blocking=True)

    return _speed(copy, device, _LARGE_ON_STREAM_BYTES, factor=1)


def _speed(make: Callable[[int], Callable[[], object]], device: torch.device, large_bytes: int, factor: int) -> Speed:
    """The speed of a transfer that brings a rank `factor` times as many bytes as `make` is given."""
    small_s, large_s = (_least_s(make(nbytes), device) for nbytes in (_SMALL_BYTES, large_bytes))
    more_s = max(large_s - small_s, large_s / 10)  # on a busy machine a small one may take longer
    return Speed(latency_s=min(small_s, large_s), bytes_per_s=factor * (large_bytes - _SMALL_BYTES) / more_s)


def _least_s(transfer: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest of some transfers; the first one is not counted."""
    least = float("inf")
    for repetition in range(1 + _REPETITIONS):
        _finish(device)
        start = time.perf_counter()
        transfer()
        _finish(device)
        if repetition:
            least = min(least, time.perf_counter() - start)
    return least


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
