"""Two-level gather and reduce: one small class per level, every byte counted."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.cluster import Cluster
from laconic.traffic import Purpose, Traffic

LevelName = Literal["node", "local"]


class Pending:
    """A collective under way. `wait` orders the caller behind it: the thread on CPU, the current stream on CUDA."""

    def __init__(self, work: dist.Work, level: Level) -> None:
        self._work = work
        self._level = level

    def wait(self) -> None:
        """Return once the data may be used."""
        with self._level.traffic.waiting(self._level.name):
            self._work.wait()

    def is_done(self) -> bool:
        """True if `wait` would not block this thread; under NCCL it never does, it orders streams."""
        return self._level.is_stream_ordered or self._work.is_completed()


class Level:
    """One axis of the cluster as a place to send along: `size` ranks, of which this is number `rank`."""

    def __init__(self, cluster: Cluster, name: LevelName) -> None:
        self.name: LevelName = name
        self.size = cluster.num_nodes if name == "node" else cluster.num_local
        self.rank = cluster.node_rank if name == "node" else cluster.local_rank
        self.traffic: Traffic = cluster.traffic
        self._gather_group = cluster.gather_groups[name]
        self._reduce_group = cluster.reduce_groups[name]
        self.is_stream_ordered = self._gather_group is not None and dist.get_backend(self._gather_group) == "nccl"
        # Gloo's reduce-scatter is an all-reduce in disguise: twice the bytes (benchmarks/wire.py shows it).
        self._scatters_truly = self._reduce_group is not None and dist.get_backend(self._reduce_group) != "gloo"

    def all_gather(self, whole: Tensor, piece: Tensor, purpose: Purpose = "weights") -> Pending | None:
        """Fill `whole` with every rank's `piece`, in rank order. None where this level has one rank.

        Shapes: R ranks; piece (C,) -> whole (R * C,), flat, contiguous, one dtype. `piece` may be this rank's part of
        `whole` already; then nothing is copied.
        Cost: (R - 1) * C * itemsize bytes out of and into this rank.
        """
        if self._gather_group is None:
            if piece.data_ptr() != whole.data_ptr():
                whole.copy_(piece)
            return None
        moved = (self.size - 1) * piece.nbytes
        self.traffic.count(self.name, purpose, sent_bytes=moved, received_bytes=moved)
        return Pending(_compat.all_gather_flat(whole, piece, self._gather_group), self)

    def start_reduce_scatter(self, whole: Tensor, purpose: Purpose = "gradients") -> ReduceScatter:
        """Begin summing `whole` over the ranks, of which this rank will keep its own part.

        Shapes: R ranks; whole (R * C,), flat and contiguous -> the sum of all ranks' part `rank`, (C,), by
        `ReduceScatter.finish`. Cost: (R - 1) * C * itemsize bytes out of and into this rank; up to one more buffer like
        `whole` until finished.
        """
        return ReduceScatter(self, whole, purpose)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a small tensor in place, now. Counted as a ring moves it: 2 (R - 1) / R of its bytes each way."""
        if self._reduce_group is not None:
            moved = 2 * (self.size - 1) * tensor.nbytes // self.size
            self.traffic.count(self.name, "control", sent_bytes=moved, received_bytes=moved)
            with self.traffic.waiting(self.name):
                dist.all_reduce(tensor, op=op, group=self._reduce_group)
        return tensor


class ReduceScatter:
    """A sum on its way: an all-to-all of parts and a local sum in rank order, or the backend's own if it is a true
    one."""

    def __init__(self, level: Level, whole: Tensor, purpose: Purpose) -> None:
        self._level = level
        self._whole = whole  # kept until the backend has read it
        self._pending: Pending | None = None
        group = level._reduce_group
        if group is None:
            self._received = whole
            return
        moved = (level.size - 1) * whole.nbytes // level.size
        level.traffic.count(level.name, purpose, sent_bytes=moved, received_bytes=moved)
        if level._scatters_truly:
            self._received = whole.new_empty(whole.numel() // level.size)
            work = _compat.reduce_scatter_flat(self._received, whole, group)
        else:
            self._received = torch.empty_like(whole)
            work = dist.all_to_all_single(self._received, whole, group=group, async_op=True)
        self._pending = Pending(work, level)

    @property
    def nbytes(self) -> int:
        """Bytes this transfer holds besides its input."""
        return 0 if self._received is self._whole else self._received.nbytes

    def is_done(self) -> bool:
        """True if `finish` would not block."""
        return self._pending is None or self._pending.is_done()

    def finish(self) -> Tensor:
        """This rank's part of the sum, (C,). The order of the sum is rank 0, 1, ..., whoever computes it."""
        if self._pending is None:
            return self._whole
        self._pending.wait()
        if self._level._scatters_truly:
            return self._received
        parts = self._received.view(self._level.size, -1)
        total = torch.add(parts[0], parts[1])  # a buffer of its own, so that the received parts can go
        for part in parts[2:]:
            total.add_(part)
        return total


def all_reduce(cluster: Cluster, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a small tensor over the whole island, in place: inside the nodes, then across them."""
    Level(cluster, "local").all_reduce(tensor, op)
    return Level(cluster, "node").all_reduce(tensor, op)
