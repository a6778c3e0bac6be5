"""Gathering a unit's weights: first across the nodes, then inside the node.

[Note: The same order on every rank]
A process group matches transfers by their order, so every rank must issue the same transfers in the same order on each
group. The engine therefore issues them at fixed points of the program and never looks at which transfer has arrived. It
issues a gather across nodes when that gather begins, and the gather inside the node when the weights are used. Under
NCCL, where waiting does not block the thread, it issues both at once, or the second when the unit before begins or,
after lossless differences, ends.

[Note: Lengths come with messages]
Lossless differences say in their messages how long they are, so the host must wait for them before it can issue what
follows. If it did so when the gather begins, it could not issue the computation that hides the gather. So that unit's
second stage begins when the forward of the unit before has been issued, and the host waits while the device computes.
The memory of the whole weights is taken at the beginning, and the second stage starts after an event of that time, so
it waits for no computation since. Besides lengths the host reads whether the messages before fitted, which the device
has long known. Of parts of more than 2**24 values it reads the lengths of pieces, too, as it codes them.

[Note: Late copies]
A unit that stays gathered until backward, as the root does, need not be in the cache before. Its copy to host memory,
the largest of all where it has the embedding, would stand on the lane before that of the first layer, whose weights may
go only after theirs. On an H200 compute waited 2.5 ms of a step for that. So such copies begin when the root's forward
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from laconic.comm.collectives import Communicator
from laconic.comm.moves import NOTHING, Pending
from laconic.ragged.tensor import delay_edits, withdraw
from laconic.shard.bucket import Bucket
from laconic.shard.buffer import GATHER, Buffer
from laconic.shard.crossing import CopiesOf, crossing_of
from laconic.shard.extension import Observer
from laconic.shard.lanes import Event, Lane, Lanes, compute_event, wait_for
from laconic.shard.placement import BucketUse
from laconic.shard.policies import Prefetch
from laconic.shard.states import AT_REST, COMPLETE, GATHER_STATES, GatherState, Transitions

_NEVER = -1
"""The version of parameters that were never gathered, or whose gather was cut short."""


class HostReads:
    """The reads of weights that rest in host memory, on the lane that gathers them."""

    def __init__(self, lane: Lane, *, is_offloaded: bool) -> None:
        """Without `is_offloaded` no weights rest there."""
        self._lane = lane if is_offloaded else None
        self._delayed: Event = None

    def last(self) -> Event:
        """An event after all reads so far; None if there are none."""
        return None if self._lane is None else self._lane.record_event()

    def delay_edits(self) -> None:
        """Let the next edit wait for the reads so far: [Note: Edits wait for reads] in ragged/tensor.py."""
        self.let_edit()
        self._delayed = self.last()
        if self._delayed is not None:
            delay_edits(self._delayed.synchronize)

    def let_edit(self) -> None:
        """Let edits come at once: the host has waited for the reads."""
        if self._delayed is not None:
            withdraw(self._delayed.synchronize)
            self._delayed = None


_IDLE, _NODE, _LOCAL, _FULL, _SHOWN, _WHOLE = GatherState


@dataclass(slots=True)
class _UnderWay:
    """The gather of one bucket from its beginning until the unit is released."""

    node_shard: Tensor
    comes_from_cache: bool
    early: Buffer | None
    """The memory of a node shard that came early, before the full buffer: [Note: Prefetching] in itinerary.py."""
    is_crossing: bool = False
    """True while the gather across nodes is under way."""
    pending: Pending = NOTHING
    """The gather inside the node."""
    begun: Event = None
    """An event after which the second stage may begin, if it begins late: [Note: Lengths come with messages]."""
    loaded: Event = None
    """An event after which the node shard has come from the cache."""
    arrived: Event = None
    """An event after which the node shard has come from the other nodes."""
    is_to_store: bool = False
    """True while `store` has yet to copy the node shard, complete at `arrived`, to the cache."""
    stored: Event = None
    """An event after which the cache has the node shard."""


_NOT_BEGUN = _UnderWay(torch.empty(0), comes_from_cache=True, early=None)
"""While the unit rests."""


class BucketGather:
    """The gather of one bucket: from this rank's shard, or from a cached node shard, to the full buffer."""

    def __init__(self, bucket: Bucket, lanes: Lanes, copies_of: CopiesOf) -> None:
        self.bucket, self._lanes = bucket, lanes
        node, self._local = (Communicator(bucket.cluster, leg.level, bucket.unit_name) for leg in GATHER)
        self.crossing = crossing_of(bucket, node, copies_of)
        self.has_local_peers = self._local.size > 1
        self.is_stream_ordered = node.is_stream_ordered and self._local.is_stream_ordered
        """True if waiting for a transfer never blocks the thread."""
        self.version = _NEVER
        """That of the parameters whose gather has begun."""
        self.now = _NOT_BEGUN
        """The gather that has begun."""
        self.num_crossings = 0
        """The gathers that began with this rank's shard, not with the cache."""

    def use(self) -> BucketUse:
        """The bytes of the bucket, where shards are unequal those of the rank that needs most: alike on all ranks.

        Collective as `Form.dtype` is.
        """
        bucket, itemsize = self.bucket, self.bucket.form.dtype.itemsize
        is_frozen = bucket.stored.is_frozen
        gradient_itemsize, waiting_itemsize = (
            0 if is_frozen else dtype.itemsize for dtype in (bucket.reduce_dtype, bucket.waiting_dtype)
        )
        most_sums = bucket.geometry.most_node_numel
        smallest = min(map(bucket.layout.size, range(bucket.layout.num_shards)))
        return BucketUse(
            whole_bytes=bucket.form.geometry.whole_numel * itemsize,
            node_bytes=bucket.form.most_node_bytes(),
            crossing_bytes=self.crossing.most_bytes,
            gradient_bytes=bucket.layout.numel * gradient_itemsize,
            node_gradient_bytes=most_sums * gradient_itemsize,
            waiting_bytes=(bucket.layout.numel - most_sums) * waiting_itemsize,
            dropped_bytes=smallest * bucket.dtype.itemsize if bucket.may_drop_shard else 0,
        )

    def start_node(self, *, is_early: bool) -> None:
        """Issue the gather across nodes, unless the cache has the node shard of this version.

        With `is_early` the node shard waits for the gather inside the node without the full buffer.

        Raises:
            RuntimeError: the parameters are on the meta device.
        """
        bucket, kept, early = self.bucket, self.bucket.node_shard, None
        if bucket.stored.shard.is_meta:
            raise RuntimeError(
                f"{', '.join(slot.name for slot in bucket.layout.slots)} are on the meta device; call model.to_empty("
                "device=...) and initialise them, or load a state dict, before the first forward"
            )
        bucket.find_hooks()
        self.version = bucket.stored.epoch + bucket.stored.shard._version  # often, so without a call
        if kept.is_direct:
            node_shard = kept.buffer()
        elif is_early:
            early = self.now.early or Buffer(bucket.form.empty_node_shard(), bucket.ledger)  # that of one that raised
            node_shard = early.memory
        else:
            node_shard = bucket.full.node_shard()
        now = self.now = _UnderWay(node_shard, kept.version == self.version, early)
        if now.comes_from_cache or (self.crossing.sends_differences and self.crossing.prepare()):
            now.loaded = kept.load_into(node_shard, self._lanes)
        if now.comes_from_cache:
            return
        kept.version = None
        self.num_crossings += 1
        self._lanes.gather_node.run_job(self.crossing.start, node_shard, after=(now.loaded,))
        now.is_crossing = True

    def make_room(self) -> None:
        """Take the memory in which the second stage gathers, which begins later: [Note: Lengths come with messages]."""
        if self.now.begun is None:
            self.bucket.full.allocate()
            self.now.begun = compute_event(self.bucket.cluster.device)

    def start_local(self) -> None:
        """Wait for the node shard and issue the gather inside the node."""
        now, lane = self.now, self._lanes.gather_local
        full, begun = self.bucket.full.allocate(), now.begun
        if now.is_crossing:
            # if an exception cuts it short, the gather stays stale and is begun anew
            version, self.version, now.is_crossing = self.version, _NEVER, False
            now.arrived = self._lanes.gather_node.event_after(self.crossing.finish, now.node_shard)
            self.version = version
        numels = self.bucket.form.geometry.numels_on["local"]
        job = partial(self._local.all_gather, full, now.node_shard, numels=numels)
        if begun is None:
            now.pending = lane.run_job(job, after=(now.loaded, now.arrived))
        else:
            now.pending = lane.go_on_with(job, after=(begun, now.loaded, now.arrived))

    def finish(self, *, stores: bool = True) -> Event:
        """Finish the gather. Returns the event after which the full buffer may be used.

        Without `stores`, `store` copies the node shard to the cache later.
        """
        now = self.now
        event, now.pending = self._lanes.gather_local.event_after(now.pending.wait), NOTHING
        if now.early is not None:  # its memory goes before that of the full buffer, which has a copy now
            now.node_shard, now.arrived = self.bucket.full.node_shard(), event
        now.is_to_store = self.bucket.node_shard.is_kept and not now.comes_from_cache
        if stores and now.is_to_store:  # now, so that the copy runs beside the next computation
            self.store()
        return event

    def store(self) -> None:
        """Copy the node shard to the cache, unless it came from there."""
        now = self.now
        if now.is_to_store:
            now.is_to_store = False
            now.stored = self.bucket.node_shard.store(now.node_shard, self.version, now.arrived, self._lanes)

    def release(self) -> None:
        """Free the full buffer after the copy from it to the cache is done."""
        if self.now.is_to_store:
            self.store()
        stored, self.now = self.now.stored, _NOT_BEGUN
        if stored is not None:
            wait_for(stored)
        bucket = self.bucket
        if not bucket.node_shard.is_whole:
            bucket.full.free()
        is_resting = bucket.node_shard.is_kept and not bucket.stored.is_dropped and True not in bucket.full.trained
        if is_resting and self.version == bucket.stored.version and bucket.drop_shard() and stored is not None:
            stored.synchronize()  # once in a run: from now on the host reads the parameter in the cache


class UnitGather:
    """The gather of all buckets of a unit."""

    def __init__(
        self, buckets: list[Bucket], lanes: Lanes, copies_of: CopiesOf, observer: Observer, prefetch: Prefetch
    ) -> None:
        self.buckets, self._observer = buckets, observer
        self.prefetch = prefetch
        """Which gathers begin with this one."""
        self._gathers = [BucketGather(bucket, lanes, copies_of) for bucket in buckets]
        self.settle_place()
        self._moving: list[BucketGather] = []
        """The gathers that the present one consists of: those of buckets that are not whole already."""
        self._events: list[Event] = []
        self._to = Transitions(buckets[0].unit_name if buckets else "a unit without parameters", GATHER_STATES)
        self.state = _IDLE
        self.stays = False
        """True if the weights stay after forward: [Note: Late copies]."""

    def crossings(self) -> Iterator[tuple[Bucket, int]]:
        """The buckets, each with the number of its gathers so far that began with this rank's shard."""
        return ((gather.bucket, gather.num_crossings) for gather in self._gathers)

    @cached_property
    def whole_bytes(self) -> int:
        """The bytes of the full buffers."""
        return sum(bucket.form.geometry.whole_numel * bucket.form.dtype.itemsize for bucket in self.buckets)

    @cached_property
    def node_bytes(self) -> int:
        """The bytes of the node shards, of the largest of all ranks if they are unequal."""
        return sum(bucket.form.most_node_bytes() for bucket in self.buckets)

    def settle_place(self) -> None:
        """Find out what follows from where the weights rest. To be called when that has changed."""
        shards = [bucket.node_shard for bucket in self.buckets]
        self.is_stream_ordered = all(gather.is_stream_ordered for gather in self._gathers)
        self.stays_whole = len(shards) > 0 and all(shard.is_whole for shard in shards)
        """True if the full buffers stay between uses."""
        self.may_stay_whole = any(shard.is_whole for shard in shards)
        self.begins_without_memory = all(shard.is_direct for shard in shards)
        """True if node shards arrive in the cache's own memory."""
        takes_time = all(
            bucket.cluster.num_local > 1 and (bucket.cluster.num_nodes > 1 or bucket.stored.is_offloaded)
            for bucket in self.buckets
        )
        self.can_begin_early = takes_time if self.is_stream_ordered else self.begins_without_memory
        """True if the first stage takes time, and no memory for whole weights: [Note: Prefetching] in itinerary.py. On
        Gloo, which would copy this rank's part once more, only if its place is the cache's."""
        self.may_be_late = any(gather.crossing.may_make_host_wait for gather in self._gathers)

    def begin(self, *, is_early: bool = False) -> None:
        """Begin a gather if none has begun or parameters changed since: [Note: The same order on every rank].

        With `is_early` only its first stage, if `can_begin_early`: [Note: Prefetching] in itinerary.py.
        """
        if self.state is not _IDLE:
            for gather in self._gathers:  # at each use, so without calls
                stored = gather.bucket.stored
                if gather.version != stored.epoch + stored.shard._version:
                    self._renew()
                    break
        if self.state is _IDLE:
            if self._observer.inspects:
                self._drop_damaged()
            self._moving = self._stale() if self.may_stay_whole else self._gathers
            for gather in self._moving:
                gather.start_node(is_early=is_early)
            for gather in self._moving:
                if gather.has_local_peers or gather.now.is_crossing:  # not all is cached
                    self._observer.gather_begun(self)
                    break
            self.state = self._to[self.state, _NODE]
        if self.state is _NODE and self.is_stream_ordered and not is_early:
            if self.is_late:
                for gather in self._moving:
                    gather.make_room()
            else:
                self.go_on()

    def _stale(self) -> list[BucketGather]:
        """The gathers of buckets whose full buffers do not have the weights of the present version already."""
        stale = []
        for gather in self._gathers:  # at each use, so without calls
            kept, stored = gather.bucket.node_shard, gather.bucket.stored
            if not kept.is_whole or kept.version != stored.epoch + stored.shard._version:
                stale.append(gather)
        return stale

    @property
    def is_late(self) -> bool:
        """True if the second stage is not to begin with the first: [Note: Lengths come with messages]."""
        is_begun = self.may_be_late and self.state is _NODE
        return is_begun and any(each.now.is_crossing and each.crossing.makes_host_wait for each in self._moving)

    def start_local(self) -> None:
        """Begin the gather inside the node, once the node shards have arrived."""
        for gather in self._moving:
            gather.start_local()
        self.state = self._to[self.state, _LOCAL]

    def go_on(self) -> None:
        """Begin the second stage, where waiting for it never blocks the thread."""
        if self.state is _NODE:
            self.start_local()
        if not self._events:
            stores = not (self.stays and torch.is_grad_enabled())
            self._events = [gather.finish(stores=stores) for gather in self._moving]

    def _renew(self) -> None:
        """Release what is stale, and gather again: where the full buffers stay, into them."""
        self.release()
        if self.state is _WHOLE:
            self.state = self._to[self.state, _IDLE]
        for gather in self._gathers:
            bucket = gather.bucket
            if bucket.form.converts and bucket.node_shard.is_whole and gather.version != bucket.stored.version:
                bucket.form.free()

    def store(self) -> None:
        """Copy to the cache what has waited: [Note: Late copies]."""
        if self.stays and self.state in COMPLETE:
            for gather in self._gathers:
                gather.store()

    def show(self) -> None:
        """Gather, and show the gathered parameters in the modules: compute may use them on return.

        Raises:
            RuntimeError: a module's sharded parameter was replaced; the replacement would be lost now.
            Exception: the observer has found damage.
        """
        self.begin()
        self.show_begun()

    def show_begun(self) -> None:
        """As `show`; the gather has begun from the present parameters."""
        if self.state not in COMPLETE:
            self._complete()
        if self._observer.inspects:
            self._observer.gathered(self)
        for bucket in self.buckets:
            if self.state is _SHOWN:
                bucket.full.reconcile()
            else:
                bucket.full.show()
        self.state = self._to[self.state, _SHOWN]

    def _complete(self) -> None:
        self.go_on()
        for event in self._events:
            if event is not None:
                wait_for(event)
        for gather in self._moving:
            if gather.now.early is not None:  # the gather inside the node has read it
                gather.now.early.free()
                gather.now.early = None
        if self._observer.inspects:
            self._observer.arrived(self)
        for gather in self._moving:
            if gather.bucket.form.converts:
                gather.bucket.full.decode()
        self._events = []
        self.state = self._to[self.state, _FULL]

    def release(self) -> None:
        """Show the sharded parameters, and free the full buffers that do not stay. Finish a gather under way first.

        Raises:
            RuntimeError: a gathered parameter was edited in place; the edit would be lost.
        """
        if self.state in AT_REST:
            return
        if self.state not in COMPLETE:
            self._complete()
        was_shown = self.state is _SHOWN
        self.state = self._to[self.state, _WHOLE if self.stays_whole else _IDLE]
        try:
            for bucket in self.buckets if was_shown else ():
                bucket.full.hide()
        finally:
            for gather in self._gathers:
                gather.release()

    def _drop_damaged(self) -> None:
        """Empty the caches that are damaged, so that the next gather crosses again, with exact weights."""
        for bucket in self._observer.before_gather(self):
            bucket.node_shard.version = None
            self._gathers[self.buckets.index(bucket)].crossing.forget()

    def forget_copies(self) -> None:
        """Count all copies as lost: [Note: Exact crossings] in shard/crossing.py."""
        for gather in self._gathers:
            gather.crossing.forget()

    def settle_copies(self) -> None:
        """Let the weights of copies that lag cross exactly next time. A gather under way is finished first.

        Raises:
            ValueError: messages of lossless differences did not fit the copies.
        """
        if self.state is _LOCAL:
            self._complete()
        for gather in self._gathers:
            gather.crossing.settle()

    def rest_nowhere(self) -> None:
        """Free what stays between uses, and let nothing stay from now on."""
        self.release()
        if self.state is _WHOLE:
            self.state = self._to[self.state, _IDLE]
        for bucket in self.buckets:
            bucket.rest_nowhere()
        self.forget_copies()

    def uses(self) -> tuple[BucketUse, ...]:
        """The bytes of each bucket: see `BucketUse`."""
        return tuple(map(BucketGather.use, self._gathers))
