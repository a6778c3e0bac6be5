"""Checks of what a root's ranks send each other, and of what rests in their caches.

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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import start_flags, swap_rows
from laconic.comm.moves import SumTransfer
from laconic.comm.traffic import Level
from laconic.guard.checksum import checksum_of, checksums, digest_of
from laconic.shard.bucket import Bucket
from laconic.shard.extension import Observer
from laconic.shard.gather import UnitGather
from laconic.shard.policies import Checks
from laconic.shard.unit import Root

_SHOWN = 3
"""The names in a message."""


class CorruptionError(RuntimeError):
    """Ranks have other bits than they should: weights or gradients were damaged, or changed unnoticed.

    All ranks of the mesh raise it alike. No optimizer has used the damaged values if the error comes out of a backward.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedTransfer:
    """The checksums of one transfer between the ranks of a cluster."""

    bucket: Bucket
    what: str
    sent: Tensor
    """Of what this rank sent to each rank, (R,); 0 for those to which it sent nothing."""
    got: Tensor
    """Of what this rank has got from each rank, (R,); 0 for those from which it got nothing."""
    across_islands: bool = False
    """R counts the islands, whose results must be equal. Otherwise it counts the ranks of this island."""


class Inspection(Observer):
    """The steps of one root, and what is checked in them: [Note: Checks]. Its methods are the engine's events."""

    def __init__(self, root: Root) -> None:
        """Check the buckets of a root as the policies of their units say."""
        self._cluster = root.cluster
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

    def is_due(self, bucket: Bucket) -> bool:
        """True in a step in which a bucket is checked."""
        checks = self._policies[bucket]
        return checks.interval > 0 and self._step % checks.interval == 0

    def mistrusts_copies(self, bucket: Bucket) -> bool:
        """True in a step that looks for damage in the bucket's cache, and mends it."""
        return self._policies[bucket].on_damage == "regather" and self.is_due(bucket)

    def begin_forward(self) -> None:
        """Begin a forward of the root: it is in the same step until a step ends."""
        self._step += self._has_ended
        self._has_ended = False

    def settled(self, *, ends_step: bool, is_last: bool) -> None:
        """End the step if the next forward begins another, and compare unless transfers may be under way.

        Raises:
            CorruptionError: see `_conclude`.
        """
        self._has_ended = self._has_ended or ends_step
        if is_last:
            self._conclude()

    def abandoned(self) -> None:
        """Drop the records of a forward or backward that raised."""
        self._records.clear()
        self._sent.clear()

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
        for cluster in dict.fromkeys(bucket.cluster for bucket in stored):
            members = [bucket for bucket in stored if bucket.cluster is cluster]
            flags = torch.tensor([_damage_of(bucket, stored[bucket]) for bucket in members], dtype=torch.uint8)
            worst = start_flags(cluster, flags).wait().tolist()
            lost = [_names(each, cluster.shard_index) for each, flag in zip(members, worst, strict=True) if flag > 1]
            if lost:
                raise CorruptionError(
                    f"frozen weights of {lost[0]} were damaged in the cache, where their only copy was; go on from the "
                    "last checkpoint"
                )
            damaged += [bucket for bucket, flag in zip(members, worst, strict=True) if flag]
        if damaged:
            names = _joined([f"{bucket.layout.slots[0].name} of {bucket.unit_name}" for bucket in damaged])
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
                f"{_joined(edited)} of {bucket.unit_name} changed without notice after it was gathered; ranks would "
                "compute with the old values: call invalidate() of the sharded module after the change, on every rank, "
                "or change the parameter itself under torch.no_grad()"
            )

    def _note_weights(self, bucket: Bucket) -> None:
        """Take the checksums of a full buffer that compute is about to use."""
        cluster = bucket.cluster
        if cluster.size == 1:
            return
        whole = bucket.full.allocate()
        full = bucket.form.shards_of(whole)
        if bucket.full.has_own_bits:
            got = _checksums_of(full)
            own = checksum_of(bucket.shard.to(whole.device, whole.dtype))
        elif bucket.form.is_packed:
            got = _checksums_of(full)
            own = got[cluster.shard_index]
        else:
            got = torch.stack([_checksum_of_extents(bucket, shard, part) for shard, part in enumerate(full)])
            own = got[cluster.shard_index]
        by_rank = got.view(cluster.num_local, cluster.num_nodes).T.flatten()  # rank (n, l) owns shard l * N + n
        self._records.append(CheckedTransfer(bucket=bucket, what="weights", sent=own.expand(cluster.size), got=by_rank))

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
        self._records.append(CheckedTransfer(bucket=bucket, what="gradients", sent=record[0], got=record[1]))

    def replicas_summed(self, bucket: Bucket, shard: Tensor) -> None:
        """Take the checksum of a sum over the islands, (C,), which all of them must have alike."""
        if not self.is_due(bucket):
            return
        own = _checksum_of_extents(bucket, bucket.cluster.shard_index, shard).expand(bucket.cluster.num_islands)
        self._records.append(CheckedTransfer(bucket=bucket, what="gradients", sent=own, got=own, across_islands=True))

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
        for cluster in dict.fromkeys(record.bucket.cluster for record in records):
            for across_islands in (False, True):
                kind = cluster, across_islands
                damage += _compare([each for each in records if (each.bucket.cluster, each.across_islands) == kind])
        diverges = any(record.bucket.replicas_diverge for record in records)
        try:
            _raise_together(self._cluster, damage, across_islands=not diverges)
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
    cluster, across_islands = records[0].bucket.cluster, records[0].across_islands
    sent = torch.stack([record.sent for record in records]).cpu()
    got = torch.stack([record.got for record in records]).cpu()
    wanted = swap_rows(cluster, sent.T.contiguous(), across_islands=across_islands).T
    return [_describe(records[index], place) for index, place in (wanted != got).nonzero().tolist()]


def _describe(record: CheckedTransfer, place: int) -> str:
    """Say that this rank has other bits than the rank at `place` of the record."""
    bucket, cluster = record.bucket, record.bucket.cluster
    own = cluster.global_rank(cluster.shard_index)
    if record.across_islands:
        return f"the summed gradients of {_names(bucket, cluster.shard_index)} on rank {own} differ from island {place}"
    node, local = divmod(place, cluster.num_local)
    shard = local * cluster.num_nodes + node
    other = cluster.global_rank(shard)
    if record.what == "gradients":
        names = _names(bucket, cluster.shard_index)
        return f"gradients of {names} came to rank {own} with other bits than rank {other} has sent"
    names = _names(bucket, shard)
    if other == own:
        return f"the gathered weights of {names} are not those in rank {own}'s shard"
    return f"rank {own} has other weights of {names} than rank {other}, their owner"


def _names(bucket: Bucket, shard: int) -> str:
    """The parameters that have elements in a shard, and their unit."""
    layout = bucket.layout
    names = [slot.name for index, slot in enumerate(layout.slots) if layout.extent(index, shard) is not None]
    return f"{_joined(names)} of {bucket.unit_name}"


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _raise_together(cluster: Cluster, damage: list[str], *, across_islands: bool) -> None:
    """Raise what any rank has found, on all ranks. Collective over the island, or over all islands."""
    group = cluster.all_flag_group if across_islands else cluster.flag_group
    by_rank = [damage[:_SHOWN]] if group is None else RankGroup(group).gather(damage[:_SHOWN])
    found = [each for theirs in by_rank for each in theirs]
    if found:
        more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
        raise CorruptionError(
            f"{'; '.join(found[:_SHOWN])}{more}. The network, memory or a device has damaged them, or "
            "something changed weights without notice, such as to_local().data; then call invalidate() after the "
            "change, on every rank. Otherwise go on from the last checkpoint, without the machine that is named most"
        )


def _damage_of(bucket: Bucket, stored: Tensor) -> int:
    """0 for a cached node shard without damage, 2 if this rank's own shard is damaged and rests there only, else 1.

    `stored` has the checksums that the parts had when they were stored, (N,).
    """
    parts = bucket.form.peers_of(bucket.node_shard.kept())
    are_damaged = (_checksums_of(parts).cpu() != stored.cpu()).tolist()
    return 2 if bucket.stored.is_dropped and are_damaged[bucket.cluster.node_rank] else int(any(are_damaged))
