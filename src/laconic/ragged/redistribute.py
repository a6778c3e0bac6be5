"""From one cut of a tensor to another: between ragged layouts, to one rank, to all; packed, asynchronous.

Which elements go where is arithmetic on the two layouts, so nothing but elements crosses the wire. Of many tensors, one
message goes from each rank to each other that needs something of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.traffic import Level, Purpose
from laconic.layout.bucket import BucketLayout, Extent, Slot
from laconic.ragged.tensor import RaggedSpec, RaggedTensor


def whole_on(spec: RaggedSpec, shard: int) -> RaggedSpec:
    """The same tensor, all of it in shard `shard` (`Cluster.shard_index` of its owner), nothing elsewhere."""
    slot = spec.layout.slots[spec.index]
    size = max(1, slot.numel)
    whole = Slot(name=slot.name, shape=slot.shape, block=size, offset=shard * size)
    layout = BucketLayout(slots=(whole,), num_shards=spec.layout.num_shards, shard_numel=size)
    return RaggedSpec(cluster=spec.cluster, layout=layout, index=0, outer=spec.outer)


def moved_elements(spec: RaggedSpec, target: RaggedSpec | None) -> int:
    """Elements that cross between ranks when a tensor goes from `spec` to `target`, summed over the ranks."""
    return sum(
        part.numel
        for receiver in range(spec.layout.num_shards)
        for sender, part in _incoming(spec, target, receiver)
        if sender != receiver
    )


def redistribute(
    tensors: Sequence[RaggedTensor], targets: Sequence[RaggedSpec | None], purpose: Purpose = "optimizer"
) -> Redistribution:
    """Begin to cut `tensors` anew as `targets` say; None asks for the whole tensor on every rank.

    Collective over the island: the same tensors and targets, in the same order, on every rank. The tensors must stay as
    they are until `Redistribution.wait`.
    Cost: every element that a rank needs and does not have enters it once; memory for the results, and for packed
    messages of several tensors.

    Raises:
        ValueError: a target is of another shape or another cluster.
    """
    return TransferPlan([tensor.spec for tensor in tensors], targets, purpose).start(tensors)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of one tensor's elements that goes to, or comes from, one peer."""

    tensor: int
    extent: Extent


class TransferPlan:
    """Who sends whom which elements, worked out once for exchanges that are repeated every step."""

    def __init__(
        self, sources: Sequence[RaggedSpec], targets: Sequence[RaggedSpec | None], purpose: Purpose = "optimizer"
    ) -> None:
        """See `redistribute`."""
        self.sources, self.targets, self.purpose = list(sources), list(targets), purpose
        self.sends: dict[int, list[_Run]] = {}
        """By receiving shard."""
        self.receives: dict[int, list[_Run]] = {}
        """By sending shard; what this rank keeps is under its own."""
        for index, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            _check(source, target, self.cluster)
            me = self.cluster.shard_index
            for sender, part in _incoming(source, target, me):
                self.receives.setdefault(sender, []).append(_Run(index, part))
            for receiver, part in _outgoing(source, target, me):
                if receiver != me:
                    self.sends.setdefault(receiver, []).append(_Run(index, part))

    @property
    def cluster(self) -> Cluster:
        """Where all of the tensors live; there must be one tensor at least."""
        return self.sources[0].cluster

    def start(self, tensors: Sequence[RaggedTensor]) -> Redistribution:
        """Send these tensors, which are cut as `sources` say, on their way."""
        return Redistribution(self, tensors)


class Redistribution:
    """Tensors on their way to another cut."""

    def __init__(self, exchange: TransferPlan, tensors: Sequence[RaggedTensor]) -> None:
        self._exchange, self._tensors = exchange, list(tensors)
        self._results = [self._destination(index) for index in range(len(self._tensors))]
        self._works: list[dist.Work] = []
        self._arriving: list[tuple[list[_Run], Tensor]] = []
        self._keep: list[Tensor] = []  # messages the backend has yet to read
        if self._tensors:
            self._move_own()
            for dtype in sorted({tensor.dtype for tensor in self._tensors}, key=str):  # an order all ranks share
                self._begin(dtype)

    def wait(self) -> list[RaggedTensor | Tensor]:
        """The tensors in their new cut: RaggedTensors, or plain tensors of the global shape (DTensors, if another mesh
        axis cuts them as well) where that was asked."""
        if self._works:
            cluster = self._exchange.cluster
            with cluster.traffic.waiting("node" if cluster.num_nodes > 1 else "local"):
                for work in self._works:
                    work.wait()
        for runs, message in self._arriving:
            begin = 0
            for run in runs:
                _move(message[begin : begin + run.extent.numel], self._into(run))
                begin += run.extent.numel
        self._works, self._arriving, self._keep = [], [], []
        return [self._wrapped(index) for index in range(len(self._tensors))]

    # -- where elements come from and go to ----------------------------------------------------------------------------

    def _destination(self, index: int) -> Tensor:
        """Memory for this rank's part of a result: the tensor's own, where it holds that very part already."""
        source, target = self._exchange.sources[index], self._exchange.targets[index]
        local = self._tensors[index].to_local()
        extent = _extent(target, source, source.cluster.shard_index)
        if target is not None and extent == _extent(source, source, source.cluster.shard_index):
            return local
        return local.new_empty(extent.numel)

    def _move_own(self) -> None:
        for run in self._exchange.receives.get(self._exchange.cluster.shard_index, []):
            _move(self._from(run), self._into(run))

    def _from(self, run: _Run) -> Tensor:
        source = self._exchange.sources[run.tensor]
        begin = _extent(source, source, source.cluster.shard_index).start
        return self._tensors[run.tensor].to_local()[run.extent.start - begin : run.extent.stop - begin]

    def _into(self, run: _Run) -> Tensor:
        source, target = self._exchange.sources[run.tensor], self._exchange.targets[run.tensor]
        begin = _extent(target, source, source.cluster.shard_index).start
        return self._results[run.tensor][run.extent.start - begin : run.extent.stop - begin]

    def _wrapped(self, index: int) -> RaggedTensor | Tensor:
        target, tensor = self._exchange.targets[index], self._tensors[index]
        if target is None:
            spec = tensor.spec
            whole = self._results[index].view(spec.layout.slots[spec.index].shape)
            return whole if spec.outer is None else spec.outer.wrap(whole)
        return tensor if target == tensor.spec else RaggedTensor(self._results[index], target)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _begin(self, dtype: torch.dtype) -> None:
        """Exchange the runs of one dtype: at most one message between two ranks each way."""
        cluster, me = self._exchange.cluster, self._exchange.cluster.shard_index
        outgoing = {peer: self._of(dtype, runs) for peer, runs in self._exchange.sends.items()}
        incoming = {peer: self._of(dtype, runs) for peer, runs in self._exchange.receives.items() if peer != me}
        sent = {peer: self._packed(runs) for peer, runs in outgoing.items() if runs}
        incoming = {peer: runs for peer, runs in incoming.items() if runs}
        for peer, message in sent.items():
            self._count(peer, sent_bytes=message.nbytes, received_bytes=0)
        for peer, runs in incoming.items():
            self._count(peer, sent_bytes=0, received_bytes=_numel(runs) * dtype.itemsize)
        if cluster.size == 1:
            return
        group = cluster.all_group
        assert group is not None
        if _compat.backend_of(group, cluster.device_type) == "gloo" and cluster.device_type == "cpu":
            self._by_sends(dtype, sent, incoming, group)
        else:
            self._by_collective(dtype, sent, incoming, group)

    def _by_sends(
        self, dtype: torch.dtype, sent: dict[int, Tensor], incoming: dict[int, list[_Run]], group: dist.ProcessGroup
    ) -> None:
        cluster = self._exchange.cluster
        for peer, runs in incoming.items():
            if len(runs) == 1:
                message = self._into(runs[0])  # it lands where it belongs
            else:
                message = torch.empty(_numel(runs), dtype=dtype, device=cluster.device)
            self._arriving.append((runs, message))
            self._works.append(_started(dist.irecv(message, src=cluster.global_rank(peer), group=group)))
        for peer, message in sent.items():
            self._works.append(_started(dist.isend(message, dst=cluster.global_rank(peer), group=group)))
        self._keep += sent.values()

    def _by_collective(
        self, dtype: torch.dtype, sent: dict[int, Tensor], incoming: dict[int, list[_Run]], group: dist.ProcessGroup
    ) -> None:
        cluster = self._exchange.cluster
        peers = sorted(range(cluster.size), key=cluster.global_rank)  # the order of the group's ranks
        nothing = torch.empty(0, dtype=dtype, device=cluster.device)
        outgoing = torch.cat([sent.get(peer, nothing) for peer in peers])
        sizes_out = [sent[peer].numel() if peer in sent else 0 for peer in peers]
        sizes_in = [_numel(incoming.get(peer, [])) for peer in peers]
        landing = outgoing.new_empty(sum(sizes_in))
        work = dist.all_to_all_single(landing, outgoing, sizes_in, sizes_out, group=group, async_op=True)
        self._works.append(_started(work))
        self._keep.append(outgoing)
        for peer, message in zip(peers, landing.split(sizes_in), strict=True):
            if peer in incoming:
                self._arriving.append((incoming[peer], message))

    def _of(self, dtype: torch.dtype, runs: list[_Run]) -> list[_Run]:
        return [run for run in runs if self._tensors[run.tensor].dtype == dtype]

    def _packed(self, runs: list[_Run]) -> Tensor:
        pieces = [self._from(run) for run in runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _count(self, peer: int, *, sent_bytes: int, received_bytes: int) -> None:
        cluster = self._exchange.cluster
        level: Level = "local" if cluster.node_of(peer) == cluster.node_rank else "node"
        cluster.traffic.count(level, self._exchange.purpose, sent_bytes=sent_bytes, received_bytes=received_bytes)


def _check(source: RaggedSpec, target: RaggedSpec | None, cluster: Cluster) -> None:
    if source.cluster is not cluster or (target is not None and target.cluster is not cluster):
        raise ValueError(
            f"{source.layout.slots[source.index].name} is cut over another mesh; redistribute mesh by mesh"
        )
    if target is not None and target.shape != source.shape:
        raise ValueError(f"a tensor of shape {source.shape} cannot be cut as one of shape {target.shape}")


def _incoming(source: RaggedSpec, target: RaggedSpec | None, receiver: int) -> Iterator[tuple[int, Extent]]:
    """(sending shard, elements) of all that `receiver` shall hold."""
    wanted = _extent(target, source, receiver)
    for sender in source.layout.holders(source.index):
        part = _overlap(_extent(source, source, sender), wanted)
        if part.numel:
            yield sender, part


def _outgoing(source: RaggedSpec, target: RaggedSpec | None, sender: int) -> Iterator[tuple[int, Extent]]:
    """(receiving shard, elements) of all that `sender` holds."""
    held = _extent(source, source, sender)
    receivers = range(source.layout.num_shards) if target is None else target.layout.holders(target.index)
    for receiver in receivers:
        part = _overlap(held, _extent(target, source, receiver))
        if part.numel:
            yield receiver, part


def _extent(spec: RaggedSpec | None, of: RaggedSpec, shard: int) -> Extent:
    """What `shard` holds under `spec`; under None, which is replicated, the whole of `of`'s tensor."""
    if spec is None:
        return Extent(0, of.layout.slots[of.index].numel)
    return spec.layout.extent(spec.index, shard) or Extent(0, 0)


def _overlap(a: Extent, b: Extent) -> Extent:
    start = max(a.start, b.start)
    return Extent(start, max(start, min(a.stop, b.stop)))


def _numel(runs: Sequence[_Run]) -> int:
    return sum(run.extent.numel for run in runs)


def _move(source: Tensor, into: Tensor) -> None:
    if source.data_ptr() != into.data_ptr():
        into.copy_(source)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
