"""The observer of the engine: it looks for mistakes and damage in the training of one root, at each event.

[Note: Checks]
In a step that is checked, every rank takes the checksum of what it sends, and of what it has got from every other rank.
For weights these are its own shard, and all shards of the full buffer just before forward or backward uses it. So the
check covers both levels of the gather, the cache, and all copies in between. For gradients they are the parts of a sum,
as they were sent and as they came. At the end of the backward each rank tells every other the checksums of what it sent
to it, in one message, and compares. A step ends with an error on all ranks, or what they have is what was sent.

Weights in few bits are compared after they are decoded: with what their owner has decoded, which is what it computes
with. Not seen are the sums of gradients that the backend adds up itself (NCCL's reduce-scatter and all-reduce) but for
islands, whose results must be equal, and damage in the optimizer's states, which exist once.

[Note: Damage in a cache]
A node shard may rest in a cache for the whole run, if it is frozen. With `on_damage="regather"` it gets a checksum when
it is stored, and in a step that is checked each use begins with a look at it. The ranks agree in one small message, and
gather the bucket again if it is damaged on any of them. The base of a difference rests from step to step. Before the
first difference of such a step the nodes compare their copies, and cross exactly where they differ. A frozen shard may
have no memory but the cache's (see `StoredWeights.drop`); then its owner has nothing to send, and all ranks raise.

[Note: Edits without notice]
A cached node shard is valid while the version of its parameters stays the same. `to_local().data` and kernels that
write through a pointer change weights without a new version. So with `unnoticed_edits` the engine remembers the
checksum of each parameter's elements with their version, and compares at each use of a gathered unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import start_flags, swap_rows
from laconic.comm.moves import SumTransfer
from laconic.comm.traffic import Level
from laconic.guard.checksum import checksum_of, checksums, digest_of
from laconic.guard.comparison import IssuedProgram, compare, compare_broadcast, describe_units, num_parts
from laconic.guard.reporting import CorruptionError, by_cluster, names_in, raise_together, shard_at, some
from laconic.guard.traps import (
    Strays,
    check_modules,
    note_first_weights,
    refuse_ties,
    refuse_unequal_weights,
    take_values,
    take_values_and_warn,
    warn_of_overwritten_values,
)
from laconic.shard.bucket import Bucket, ManagedParameter
from laconic.shard.extension import Observer
from laconic.shard.gather import UnitGather
from laconic.shard.policies import Checks
from laconic.shard.unit import Root, Unit


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedTransfer:
    """The checksums of one transfer between the ranks of a cluster."""

    cluster: Cluster
    bucket: Bucket
    what: str
    sent: Tensor
    """Of what this rank sent to each rank, (R,); 0 for those to which it sent nothing."""
    got: Tensor
    """Of what this rank has got from each rank, (R,); 0 for those from which it got nothing."""
    across_islands: bool = False
    """R counts the islands, whose results must be equal. Otherwise it counts the ranks of this island."""


class Guard(Observer):
    """Looks for mistakes and damage in the training of one root: see `Observer` for the events."""

    def __init__(self, root: Root) -> None:
        """Check the buckets of a root as the policies of their units say."""
        self._root, self._cluster, self._units, self._buckets = root, root.cluster, root.units, root.buckets
        off = Checks(interval=0)
        self._policies = {bucket: unit.checks or off for unit in root.units for bucket in unit.buckets}
        self.inspects = any(each.interval or each.unnoticed_edits for each in self._policies.values())
        self._step = 0
        self._has_ended = False
        self._records: list[CheckedTransfer] = []
        self._sent: dict[SumTransfer, Tensor] = {}
        """The checksums of what was sent for a sum that has not arrived, (P,)."""
        self._stored: dict[Bucket, tuple[int, Tensor]] = {}
        """The number of a crossing, and the checksums of the node shard's parts, (N,), that it left in the cache."""
        self._known: dict[Bucket, tuple[int, Tensor]] = {}
        """The number of a crossing, and the checksums of the parameters then: [Note: Edits without notice]."""
        self._program = IssuedProgram(root.cluster)
        self._strays: Strays | None = None
        self._trained: list[list[bool]] = []
        """Of each bucket, the parameters that were trained when it was gathered last."""

    def is_due(self, bucket: Bucket) -> bool:
        """True in a step in which a bucket is checked."""
        checks = self._policies[bucket]
        return checks.interval > 0 and self._step % checks.interval == 0

    def mistrusts_copies(self, bucket: Bucket) -> bool:
        """True in a step that looks for damage in the bucket's cache, and mends it."""
        return self._policies[bucket].on_damage == "regather" and self.is_due(bucket)

    # -- the beginning -------------------------------------------------------------------------------------------------

    @classmethod
    def sharding(cls, module: nn.Module) -> None:
        """See `Observer`.

        Raises:
            ValueError: see `check_modules`.
        """
        check_modules(module)

    @classmethod
    def broadcasting(cls, module: nn.Module, managed: Sequence[ManagedParameter]) -> None:
        """See `Observer`.

        Raises:
            RanksDifferError: ranks give other parameters.
        """
        compare_broadcast(module, managed)
        warn_of_overwritten_values(managed)

    @classmethod
    def cut(cls, bucket: Bucket, whole: Sequence[Tensor]) -> None:
        """See `Observer`."""
        note_first_weights(bucket, whole)

    @classmethod
    def loaded(cls, buckets: Sequence[Bucket]) -> None:
        """Take the values that `load_state_dict(assign=True)` has put in place of sharded parameters.

        Raises:
            RuntimeError: see `take_values`.
        """
        for bucket in buckets:
            take_values(bucket)

    def leading(self) -> None:
        """Look for all mistakes that the first forward can show. Collective over the mesh.

        Raises:
            RuntimeError: see `refuse_ties` and `take_values_and_warn`.
            RanksDifferError: a setting differs between ranks, or the weights that they began with.
        """
        refuse_ties(self._buckets)
        for bucket in self._buckets:
            take_values_and_warn(bucket)
        cluster = self._cluster
        compare(
            cluster.all_flag_group, f"the first forward of {type(self._root.top.modules[0]).__name__}",
            describe_units(self._units), island=cluster.island_rank, parts=num_parts(self._units),
        )  # fmt: skip
        self._strays = Strays(self._root.top.modules, [unit.origin for unit in self._units], self._buckets)
        refuse_unequal_weights(self._buckets)

    def sharing(self, buffers: Mapping[str, str]) -> None:
        """See `Observer`. Collective over the mesh.

        Raises:
            RanksDifferError: ranks have other buffers.
        """
        name = type(self._root.top.modules[0]).__name__
        described = {"the model": {f"the buffer {name}": text for name, text in buffers.items()}}
        compare(self._cluster.all_flag_group, f"the exchange of the buffers of {name}", described)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward of the root: it is in the same step until a step ends."""
        if self._strays is not None:
            self._strays.look_again()
        self._program.settle()
        self._step += self._has_ended
        self._has_ended = False

    def gather_begun(self, gather: UnitGather) -> None:
        """See `Observer`."""
        self._program.note(f"the gather of {gather.buckets[0].unit_name}")

    def reducing(self, unit: Unit, *, across_nodes: bool) -> None:
        """See `Observer`."""
        self._program.note(f"the reduction of {unit.progress.name}{'' if across_nodes else ' inside the node'}")

    def all_issued(self) -> None:
        """See `Observer`."""
        self._note_frozen()
        self._program.start_comparison(diverges=any([bucket.replicas_diverge for bucket in self._buckets]))  # noqa: C419  a generator takes a call for each

    def _note_frozen(self) -> None:
        """Let the ranks compare what was frozen, or trains again, since the last backward."""
        trained, before = [bucket.full.trained for bucket in self._buckets], self._trained
        self._trained = trained
        if trained == before:
            return
        for bucket, now, then in zip(self._buckets, trained, before, strict=False):
            for slot, trains, trained_then in zip(bucket.layout.slots, now, then, strict=False):
                if trains != trained_then:
                    self._program.note(f"{bucket.unit_name}: {slot.name} {'trains' if trains else 'is frozen'}")

    def settled(self, *, ends_step: bool, is_last: bool) -> None:
        """End the step if the next forward begins another, and compare unless transfers may be under way.

        Raises:
            RanksDifferError: ranks have issued different things.
            CorruptionError: see `_conclude`.
        """
        if not self._root.top.gather.is_stream_ordered:  # transfers let the host wait anyway
            self._program.settle()
        self._has_ended = self._has_ended or ends_step
        if is_last:
            self._conclude()

    def abandoned(self) -> None:
        """Drop the records of a forward or backward that raised."""
        self._records.clear()
        self._sent.clear()
        self._program.forget()

    # -- weights -------------------------------------------------------------------------------------------------------

    def gathered(self, gather: UnitGather) -> None:
        """Look at a unit's full buffers, which compute is about to use. Collective with `unnoticed_edits`.

        Raises:
            CorruptionError: weights were changed without notice.
        """
        for bucket, crossing in gather.crossings():
            if self._policies[bucket].unnoticed_edits:
                self._refuse_unnoticed_edits(bucket, crossing)
        for bucket in gather.buckets:
            if self.is_due(bucket):
                self._note_weights(bucket)

    def arrived(self, gather: UnitGather) -> None:
        """Take the checksums of node shards that have just been stored: [Note: Damage in a cache]."""
        for bucket, crossing in gather.crossings():
            checks = self._policies[bucket]
            is_time = self.is_due(bucket) or (bucket.stored.is_frozen and checks.interval > 0)
            is_known = self._stored.get(bucket, (None,))[0] == crossing
            is_stored = bucket.node_shard.version == bucket.stored.version
            if is_stored and not is_known and is_time and checks.on_damage == "regather":
                parts = bucket.form.peers_of(bucket.full.node_shard())
                self._stored[bucket] = crossing, _checksums_of(parts)

    def before_gather(self, gather: UnitGather) -> list[Bucket]:
        """The buckets whose cached node shards are damaged on some rank, with a warning. Collective if it is time.

        Raises:
            CorruptionError: a damaged shard has no other memory than the cache's.
        """
        stored = {
            bucket: self._stored[bucket][1]
            for bucket, crossing in gather.crossings()
            if self.mistrusts_copies(bucket) and bucket.node_shard.version == bucket.stored.version
            and self._stored.get(bucket, (None,))[0] == crossing
        }  # fmt: skip
        damaged = []
        for cluster, members in by_cluster(stored).items():
            flags = torch.tensor([_damage_of(bucket, stored[bucket]) for bucket in members], dtype=torch.uint8)
            worst = start_flags(cluster, flags).wait().tolist()
            lost = [names_in(each, cluster.shard_index) for each, flag in zip(members, worst, strict=True) if flag > 1]
            if lost:
                raise CorruptionError(
                    f"frozen weights of {lost[0]} were damaged in the cache, where their only copy was; go on from the "
                    "last checkpoint"
                )
            damaged += [bucket for bucket, flag in zip(members, worst, strict=True) if flag]
        if damaged:
            names = some([f"{bucket.layout.slots[0].name} of {bucket.unit_name}" for bucket in damaged])
            warnings.warn(
                f"the cached weights of {names} were damaged on some rank, and are gathered again; if this comes back, "
                "test the memory of the machines",
                stacklevel=2,
            )
        return damaged

    def different_copies(self, cluster: Cluster, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Compare the cached node shards of buckets of one cluster between the nodes, bit by bit. Collective."""
        digests = [digest_of([each.node_shard.kept()]) for each in buckets]
        by_place: dict[int, list[list[int | None]]] = {}
        for place, theirs in RankGroup(cluster.flag_group).gather([cluster.local_rank, digests]):
            by_place.setdefault(place, []).append(theirs)
        return [
            each
            for index, each in enumerate(buckets)
            if any(len({theirs[index] for theirs in nodes}) > 1 for nodes in by_place.values())
        ]

    def _refuse_unnoticed_edits(self, bucket: Bucket, crossing: int) -> None:
        """Compare the parameters with those of the same crossing. Collective over the bucket's ranks."""
        indices = range(len(bucket.sharded))
        now = torch.stack([checksum_of(bucket.stored.part(bucket.shard, index)) for index in indices])
        before_crossing, before = self._known.get(bucket, (None, now))
        self._known[bucket] = crossing, now
        if before_crossing != crossing:
            return
        flags = start_flags(bucket.cluster, (now != before).cpu().to(torch.uint8)).wait().tolist()
        edited = [bucket.layout.slots[index].name for index in indices if flags[index]]
        if edited:
            raise CorruptionError(
                f"{some(edited)} of {bucket.unit_name} changed without notice after it was gathered; ranks would "
                "compute with the old values: call invalidate() of the sharded module after the change, on every rank, "
                "or change the parameter itself under torch.no_grad()"
            )

    def _note_weights(self, bucket: Bucket) -> None:
        """Take the checksums of a full buffer that compute is about to use."""
        cluster = bucket.cluster
        if cluster.size == 1:
            return
        whole = bucket.full.allocate()
        shards = bucket.form.shards_of(whole)
        if bucket.form.has_own_bits or bucket.form.is_packed:
            got = _checksums_of(shards)
        else:
            got = torch.stack([_checksum_of_extents(bucket, shard, part) for shard, part in enumerate(shards)])
        own = got[cluster.shard_index]
        if bucket.form.has_own_bits:
            own = checksum_of(bucket.shard.to(whole.device, whole.dtype))
        by_rank = got.view(cluster.num_local, cluster.num_nodes).T.flatten()  # rank (n, l) owns shard l * N + n
        self._note(bucket, "weights", own.expand(cluster.size), by_rank)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def sum_begun(self, bucket: Bucket, level: Level, transfer: SumTransfer) -> None:
        """Take the checksums of what this rank sends for a sum of gradients, in a step that is checked."""
        if self.is_due(bucket):
            self._sent[transfer] = _checksums_of(transfer.sent())

    def sum_arrived(self, bucket: Bucket, level: Level, transfer: SumTransfer) -> None:
        """Take the checksums of what came for a sum of gradients, unless only the backend has seen it. It waits."""
        sent = self._sent.pop(transfer, None)
        if sent is None:
            return
        came = transfer.received()
        if came is None:
            return
        cluster = bucket.cluster
        place, _ = cluster.place_on(level)
        record = torch.zeros(2, cluster.size, dtype=torch.int64, device=sent.device)
        for index, (rank, part) in enumerate(zip(_ranks_on(cluster, level), came, strict=True)):
            if index != place:
                record[0, rank], record[1, rank] = sent[index], checksum_of(part)
        self._note(bucket, "gradients", *record)

    def replicas_summed(self, bucket: Bucket, shard: Tensor) -> None:
        """Take the checksum of a sum over the islands, (C,), which all of them must have alike."""
        if not self.is_due(bucket):
            return
        own = _checksum_of_extents(bucket, bucket.cluster.shard_index, shard).expand(bucket.cluster.num_islands)
        self._note(bucket, "gradients", own, own, across_islands=True)

    def _note(self, bucket: Bucket, what: str, sent: Tensor, got: Tensor, *, across_islands: bool = False) -> None:
        self._records.append(
            CheckedTransfer(
                cluster=bucket.cluster, bucket=bucket, what=what, sent=sent, got=got, across_islands=across_islands
            )
        )

    def _conclude(self) -> None:
        """Compare the records of all ranks, and drop them. Collective over the mesh if there are any.

        Raises:
            CorruptionError: a rank has other bits than were sent to it, on all ranks alike. Who catches it and repeats
                the step gathers the weights anew.
        """
        records, self._records = self._records, []
        if not records:
            return
        damage = []
        for theirs in by_cluster(records).values():
            for across_islands in (False, True):
                damage += _compare([each for each in theirs if each.across_islands == across_islands])
        diverges = any(record.bucket.replicas_diverge for record in records)
        try:
            raise_together(self._cluster, damage, across_islands=not diverges)
        except CorruptionError:
            for bucket in dict.fromkeys(record.bucket for record in records):
                if not bucket.stored.is_dropped:  # else the damage may be in the only copy, and must not spread
                    bucket.stored.note_change()
            raise


def _ranks_on(cluster: Cluster, level: Level) -> range:
    """The ranks of the island that differ from this one on `level` only, in their order."""
    if level == "local":
        first = cluster.node_rank * cluster.num_local
        return range(first, first + cluster.num_local)
    return range(cluster.local_rank, cluster.size, cluster.num_local)


def _checksums_of(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The checksum of each part, (P,): rows, or tensors of other lengths."""
    return checksums(parts) if isinstance(parts, Tensor) else torch.stack([checksum_of(part) for part in parts])


def _checksum_of_extents(bucket: Bucket, shard: int, part: Tensor) -> Tensor:
    """The checksum of a shard without its padding, which coded crossings leave as it was. `part` has the shape (C,)."""
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for index in range(len(bucket.layout.slots)):
        extent, begin = bucket.layout.extent(index, shard), bucket.layout.offset_in_shard(index, shard)
        if extent is not None:
            total += (2 * index + 1) * checksum_of(part[begin : begin + extent.numel])
    return total


def _compare(records: Sequence[CheckedTransfer]) -> list[str]:
    """Compare records of one cluster and kind. Collective over its ranks. Returns what this rank has found."""
    if not records:
        return []
    cluster, across_islands = records[0].cluster, records[0].across_islands
    sent = torch.stack([record.sent for record in records]).cpu()
    got = torch.stack([record.got for record in records]).cpu()
    wanted = swap_rows(cluster, sent.T.contiguous(), across_islands=across_islands).T
    return [_describe(records[index], place) for index, place in (wanted != got).nonzero().tolist()]


def _describe(record: CheckedTransfer, place: int) -> str:
    """Say that this rank has other bits than the rank at `place` of the record."""
    bucket, cluster = record.bucket, record.cluster
    own = cluster.global_rank(cluster.shard_index)
    names = names_in(bucket, cluster.shard_index)
    if record.across_islands:
        return f"the summed gradients of {names} on rank {own} differ from island {place}"
    shard = shard_at(cluster, place)
    other = cluster.global_rank(shard)
    if record.what == "gradients":
        return f"gradients of {names} came to rank {own} with other bits than rank {other} has sent"
    names = names_in(bucket, shard)
    if other == own:
        return f"the gathered weights of {names} are not those in rank {own}'s shard"
    return f"rank {own} has other weights of {names} than rank {other}, their owner"


def _damage_of(bucket: Bucket, stored: Tensor) -> int:
    """0 for a cached node shard without damage, 2 if this rank's own shard is damaged and rests there only, else 1.

    `stored` has the checksums that the parts had when they were stored, (N,).
    """
    parts = bucket.form.peers_of(bucket.node_shard.kept())
    are_damaged = (_checksums_of(parts).cpu() != stored.cpu()).tolist()
    return 2 if bucket.stored.is_dropped and are_damaged[bucket.cluster.node_rank] else int(any(are_damaged))
