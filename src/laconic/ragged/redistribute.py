"""Redistribution: send tensors from one cut to another, packed and asynchronous.

A cut is a ragged layout, or the whole tensor on one rank. Every rank computes from the two cuts which elements go
where, so only elements cross the wire. A rank sends at most one message per dtype to each other rank, however many
tensors there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.journal import issue
from laconic.comm.moves import Pending
from laconic.comm.traffic import IslandLevel, Purpose
from laconic.layout.bucket import BucketLayout, Extent
from laconic.ragged.spec import RaggedSpec


def whole_on(spec: RaggedSpec, shard: int) -> RaggedSpec:
    """The spec of the same tensor when the owner of `shard` holds all of it and the other ranks hold nothing."""
    slot, num_shards = spec.slot, spec.layout.num_shards
    layout = BucketLayout.whole_in(shard, name=slot.name, shape=slot.shape, num_shards=num_shards)
    return RaggedSpec(cluster=spec.cluster, layout=layout, index=0, dtensor=spec.dtensor)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run [start, stop) of this rank's flat part of one tensor."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def view(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[self.tensor][self.start : self.stop]


_RunsByPeer = dict[int, list[_Run]]


class TransferPlan:
    """The elements that this rank sends and receives when tensors change their cut. A plan serves many transfers."""

    def __init__(
        self, sources: Sequence[RaggedSpec], targets: Sequence[RaggedSpec], purpose: Purpose = "optimizer"
    ) -> None:
        """Plan from present cuts, all over one cluster and at least one, to new ones.

        The traffic is counted under `purpose`.

        Raises:
            ValueError: a target has another shape or another cluster than its source.
        """
        self.purpose: Purpose = purpose
        self.cluster = sources[0].cluster
        # Runs of this rank's old parts by the shard that receives them, and of its new parts by the shard that sends
        # them. Either shard may be this rank's own.
        self.sends: _RunsByPeer = {}
        self.receives: _RunsByPeer = {}
        self.new_sizes: list[int | None] = []  # the elements of each new part; None where the old part stays
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if any(spec.cluster is not self.cluster for spec in (source, target)):
                raise ValueError(f"{source.slot.name} is cut over another mesh; redistribute mesh by mesh")
            if target.shape != source.shape:
                raise ValueError(f"a tensor of shape {source.shape} cannot be cut as one of shape {target.shape}")
            self.new_sizes.append(None if source.held == target.held else target.held.numel)
            for runs, own, other in ((self.sends, source, target), (self.receives, target, source)):
                part = own.held
                for peer in other.layout.holders(other.index):
                    shared = _overlap(part, other.held_by(peer))
                    if shared.numel:
                        run = _Run(index, shared.start - part.start, shared.stop - part.start)
                        runs.setdefault(peer, []).append(run)

    def start(self, parts: Sequence[Tensor]) -> Redistribution:
        """Begin to send `parts`, this rank's flat part of each tensor in its present cut. Collective over the island.

        The parts have any dtypes, and must not change until `Redistribution.wait` returns.

        Cost: each element that a rank needs and does not have enters the rank once. Memory for the new parts, and for
        messages that hold elements of several tensors.
        """
        return Redistribution(self, parts)


class Redistribution:
    """Tensors under way to another cut."""

    def __init__(self, plan: TransferPlan, parts: Sequence[Tensor]) -> None:
        """See `TransferPlan.start`."""
        self._parts = parts
        self._new_parts = [
            part if size is None else part.new_empty(size) for part, size in zip(parts, plan.new_sizes, strict=True)
        ]
        self._pending: list[Pending] = []
        self._arrivals: list[tuple[Tensor, list[_Run]]] = []  # messages, and the runs of new parts that they bring
        self._departures: list[Tensor] = []  # messages that the backend may not have read yet
        own = plan.cluster.shard_index
        for old, new in zip(plan.sends.get(own, []), plan.receives.get(own, []), strict=True):
            _copy(old.view(parts), new.view(self._new_parts))
        if plan.cluster.size > 1:
            for dtype in sorted({part.dtype for part in parts}, key=str):  # the same order on all ranks
                self._exchange(plan, plan.cluster, dtype)

    def wait(self) -> list[Tensor]:
        """Wait until all elements have arrived; return this rank's flat parts in the new cut.

        A part that stays the same is the tensor that was given.
        """
        for pending in self._pending:
            pending.wait()
        for message, runs in self._arrivals:
            pieces = message.split([run.numel for run in runs]) if runs else ()
            for piece, run in zip(pieces, runs, strict=True):
                _copy(piece, run.view(self._new_parts))
        self._pending, self._arrivals, self._departures = [], [], []
        return self._new_parts

    def _exchange(self, plan: TransferPlan, cluster: Cluster, dtype: torch.dtype) -> None:
        """Send and receive the elements of one dtype."""
        outgoing, incoming = self._to_peers(plan.sends, cluster, dtype), self._to_peers(plan.receives, cluster, dtype)
        messages = {peer: _packed([run.view(self._parts) for run in runs]) for peer, runs in outgoing.items()}
        assert cluster.all_group is not None
        for peer in {**outgoing, **incoming}:
            sent, received = (_numel(runs.get(peer, [])) * dtype.itemsize for runs in (outgoing, incoming))
            cluster.traffic.count(cluster.level_to(peer), plan.purpose, sent_bytes=sent, received_bytes=received)
        is_gloo = cluster.device_type == "cpu" and _compat.backend_of(cluster.all_group, "cpu") == "gloo"
        works = (self._send_each if is_gloo else self._all_to_all)(messages, incoming, cluster, dtype)
        self._pending.append(Pending(works, cluster.traffic, "node" if cluster.num_nodes > 1 else "local"))

    def _to_peers(self, runs: _RunsByPeer, cluster: Cluster, dtype: torch.dtype) -> _RunsByPeer:
        """The runs of tensors of one dtype, without those that stay on this rank."""
        chosen = {peer: [run for run in own if self._parts[run.tensor].dtype == dtype] for peer, own in runs.items()}
        return {peer: own for peer, own in chosen.items() if own and peer != cluster.shard_index}

    def _send_each(
        self, messages: Mapping[int, Tensor], incoming: _RunsByPeer, cluster: Cluster, dtype: torch.dtype
    ) -> list[dist.Work | None]:
        """Receive single runs straight into the new parts: [Note: Collectives on Gloo] in comm/collectives.py."""
        works = []
        for peer, runs in incoming.items():
            first = runs[0].view(self._new_parts)
            message = first if len(runs) == 1 else first.new_empty(_numel(runs))
            self._arrivals.append((message, runs))
            works.append(dist.irecv(message, src=cluster.global_rank(peer), group=cluster.all_group))
        for peer, message in messages.items():
            works.append(dist.isend(message, dst=cluster.global_rank(peer), group=cluster.all_group))
        self._departures += messages.values()
        return works

    def _all_to_all(
        self, messages: Mapping[int, Tensor], incoming: _RunsByPeer, cluster: Cluster, dtype: torch.dtype
    ) -> list[dist.Work | None]:
        peers = sorted(range(cluster.size), key=cluster.global_rank)  # the order of the group's ranks
        nothing = torch.empty(0, dtype=dtype, device=cluster.device)
        pieces = [messages.get(peer, nothing) for peer in peers]
        runs = [incoming.get(peer, []) for peer in peers]
        sizes_in, sizes_out = [_numel(own) for own in runs], [piece.numel() for piece in pieces]
        departure, landing = torch.cat(pieces), nothing.new_empty(sum(sizes_in))
        self._departures.append(departure)
        self._arrivals += zip(landing.split(sizes_in), runs, strict=True)
        group = cluster.all_group
        return [dist.all_to_all_single(landing, departure, sizes_in, sizes_out, group=group, async_op=True)]


def _overlap(a: Extent, b: Extent) -> Extent:
    start = max(a.start, b.start)
    return Extent(start, max(start, min(a.stop, b.stop)))


def _numel(runs: Sequence[_Run]) -> int:
    return sum(run.numel for run in runs)


def _packed(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def gather_whole(spec: RaggedSpec, part: Tensor) -> Tensor:
    """Gather all elements of `spec`'s slot from the ranks' parts. Collective.

    Shapes: this rank's `part` (n,), on any device -> (numel,), on the device of the cluster or of a meta `part`.
    Cost: each element enters a node shard's ranks once across the nodes and each rank once inside the node, without
        padding; counted as "control". Memory for the result.
    """
    cluster = spec.cluster
    device = part.device if part.is_meta else cluster.device
    whole = part.new_empty(spec.slot.numel, device=device)
    held = spec.held
    whole[held.start : held.stop].copy_(part)
    for level, own, runs in _stages(spec):
        group = cluster.gather_groups[level]
        if group is None or part.is_meta:
            continue
        nbytes = [run.numel * part.itemsize for run in runs]
        received = sum(nbytes) - nbytes[own]
        cluster.traffic.count(level, "control", sent_bytes=nbytes[own] * (len(runs) - 1), received_bytes=received)
        senders = [rank for rank, run in enumerate(runs) if run.numel]
        ticket = issue(group, "the whole", spec.slot.name, senders=senders)
        works = [
            dist.broadcast(whole[run.start : run.stop], group=group, group_src=rank, async_op=True)
            for rank, run in enumerate(runs)
            if run.numel
        ]
        Pending(works, cluster.traffic, level, ticket).wait()
    return whole


def _stages(spec: RaggedSpec) -> Iterator[tuple[IslandLevel, int, list[Extent]]]:
    """For each level: this rank's place on it, and the run that each rank of the level has by then.

    First the ranks of one place in their nodes join their extents: a node shard's run. Then the ranks of one node join
    these. Shards, and so the runs of node shards, come in order: [Note: A bucket's order] in shard/bucket.py.
    """
    cluster, num_nodes = spec.cluster, spec.cluster.num_nodes
    extents = [spec.held_by(shard) for shard in range(cluster.size)]
    node_shards = [extents[begin : begin + num_nodes] for begin in range(0, cluster.size, num_nodes)]
    yield "node", cluster.node_rank, node_shards[cluster.local_rank]
    yield "local", cluster.local_rank, [_joined(own) for own in node_shards]


def _joined(extents: list[Extent]) -> Extent:
    held = [extent for extent in extents if extent.numel]
    return Extent(held[0].start, held[-1].stop) if held else Extent(0, 0)
