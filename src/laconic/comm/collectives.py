"""Two-level gather and reduce: one small class per level, every byte counted.

[Note: Collectives on Gloo]
Gloo's reduce-scatter is an all-reduce in disguise, with twice the bytes, and its all-gather goes through a buffer of
its own as large as the result. On CPU tensors both are therefore built from sends and receives, which read and write
the tensors themselves: no copy, no buffer beyond the parts of a sum, and the fewest bytes possible. Gloo cannot tell
whether a receive has arrived without waiting for it; nothing here polls. On CUDA tensors Gloo has no sends: there a
reduction is an all-to-all and a local sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.traffic import Purpose, Traffic

LevelName = Literal["node", "local"]


class Pending:
    """A transfer under way. `wait` orders the caller behind it: the thread, or with NCCL the current stream."""

    def __init__(self, works: Sequence[dist.Work | None], level: Communicator) -> None:
        self._works = works
        self._level = level

    def wait(self) -> None:
        """Return once the data may be used."""
        with self._level.traffic.waiting(self._level.name):
            for work in self._works:
                if work is not None:
                    work.wait()


class Communicator:
    """One axis of the cluster as a place to send along: `size` ranks, of which this is number `rank`."""

    def __init__(self, cluster: Cluster, name: LevelName) -> None:
        self.name: LevelName = name
        self.size = cluster.num_nodes if name == "node" else cluster.num_local
        self.rank = cluster.node_rank if name == "node" else cluster.local_rank
        self.traffic: Traffic = cluster.traffic
        self._gather_group = cluster.gather_groups[name]
        self._reduce_group = cluster.reduce_groups[name]
        group = self._gather_group
        backend = _compat.backend_of(group, cluster.device_type) if group is not None else None
        self._sends = backend == "gloo" and cluster.device_type == "cpu"
        self._scatters_truly = backend != "gloo"
        self.is_stream_ordered = cluster.device_type == "cuda" and backend != "gloo"
        """True if waiting never blocks the thread: transfers can be chained as soon as they are issued."""

    @property
    def peers(self) -> list[int]:
        """The other ranks of this level."""
        return [peer for peer in range(self.size) if peer != self.rank]

    def count(self, purpose: Purpose, nbytes: int) -> None:
        """Note that as much leaves this rank as enters it."""
        self.traffic.count(self.name, purpose, sent_bytes=nbytes, received_bytes=nbytes)

    def all_gather(self, whole: Tensor, piece: Tensor, purpose: Purpose = "weights") -> Pending | None:
        """Fill `whole` with every rank's `piece`, in rank order. None where this level has one rank.

        Shapes: R ranks; piece (C,) -> whole (R * C,), flat, contiguous, one dtype. `piece` may be this rank's part of
        `whole` already; then nothing is copied.
        Cost: (R - 1) * C * itemsize bytes out of and into this rank.
        Reference: tests/reference/gather.py.
        """
        parts = whole.view(self.size, -1)
        if self._gather_group is not None and not self._sends:
            self.count(purpose, (self.size - 1) * piece.nbytes)
            return Pending([_compat.all_gather_flat(whole, piece, self._gather_group)], self)
        own = parts[self.rank]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        if self._gather_group is None:
            return None
        self.count(purpose, (self.size - 1) * piece.nbytes)
        works = [dist.irecv(parts[peer], group=self._gather_group, group_src=peer) for peer in self.peers]
        works += [dist.isend(piece, group=self._gather_group, group_dst=peer) for peer in self.peers]
        return Pending(works, self)

    def start_reduce_scatter(self, whole: Tensor, purpose: Purpose = "gradients") -> ReduceScatter:
        """Begin summing `whole` over the ranks, of which this rank will keep its own part.

        Shapes: R ranks; whole (R * C,), flat and contiguous -> the sum of all ranks' part `rank`, (C,), by
        `ReduceScatter.finish`. `whole` must stay as it is until then.
        Cost: (R - 1) * C * itemsize bytes out of and into this rank, and as much memory until finished.
        Reference: tests/reference/gather.py.
        """
        if self._reduce_group is None:
            return _Alone(whole)
        self.count(purpose, (self.size - 1) * whole.nbytes // self.size)
        if self._sends:
            return _BySends(self, self._reduce_group, whole)
        return _ByCollective(self, self._reduce_group, whole, scatters_truly=self._scatters_truly)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a small tensor in place, now. Counted as a ring moves it: 2 (R - 1) / R of its bytes each way."""
        if self._reduce_group is not None:
            self.count("control", 2 * (self.size - 1) * tensor.nbytes // self.size)
            with self.traffic.waiting(self.name):
                dist.all_reduce(tensor, op=op, group=self._reduce_group)
        return tensor


class ReduceScatter:
    """A sum on its way, and the memory it holds besides its input."""

    nbytes: int = 0

    def finish(self) -> Tensor:
        """This rank's part of the sum, (C,), in memory of its own. The order of the sum is rank 0, 1, ...
        everywhere."""
        raise NotImplementedError


class _Alone(ReduceScatter):
    """One rank: the sum is the input."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def finish(self) -> Tensor:
        return self._whole


class _BySends(ReduceScatter):
    """Every rank sends every other its part, and adds what it is sent: [Note: Collectives on Gloo]."""

    def __init__(self, level: Communicator, group: dist.ProcessGroup, whole: Tensor) -> None:
        parts = whole.view(level.size, -1)
        self._parts = [parts[rank] if rank == level.rank else torch.empty_like(parts[0]) for rank in range(level.size)]
        self._first = self._parts[1 if level.rank == 0 else 0]  # a received one, which becomes the sum
        self.nbytes = (level.size - 1) * parts[0].nbytes
        works = [dist.irecv(self._parts[peer], group=group, group_src=peer) for peer in level.peers]
        works += [dist.isend(parts[peer], group=group, group_dst=peer) for peer in level.peers]
        self._pending = Pending(works, level)

    def finish(self) -> Tensor:
        self._pending.wait()
        total = torch.add(self._parts[0], self._parts[1], out=self._first)
        for part in self._parts[2:]:
            total.add_(part)
        return total


class _ByCollective(ReduceScatter):
    """The backend's own, if it is a true one; else an all-to-all of parts and a local sum."""

    def __init__(self, level: Communicator, group: dist.ProcessGroup, whole: Tensor, *, scatters_truly: bool) -> None:
        self._whole = whole  # kept until the backend has read it
        self._size = level.size
        self._scatters_truly = scatters_truly
        if scatters_truly:
            self._received = whole.new_empty(whole.numel() // level.size)
            work = _compat.reduce_scatter_flat(self._received, whole, group)
        else:
            self._received = torch.empty_like(whole)
            work = dist.all_to_all_single(self._received, whole, group=group, async_op=True)
        self.nbytes = self._received.nbytes
        self._pending = Pending([work], level)

    def finish(self) -> Tensor:
        self._pending.wait()
        if self._scatters_truly:
            return self._received
        parts = self._received.view(self._size, -1)
        total = torch.add(parts[0], parts[1])
        for part in parts[2:]:
            total.add_(part)
        return total


def all_reduce(cluster: Cluster, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a small tensor over the whole island, in place: inside the nodes, then across them."""
    Communicator(cluster, "local").all_reduce(tensor, op)
    return Communicator(cluster, "node").all_reduce(tensor, op)
