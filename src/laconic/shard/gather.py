"""Gathering a unit's weights: first across the nodes, then inside the node.

[Note: The same order on every rank]
A process group matches transfers by their order, so every rank must issue the same transfers in the same order on each
group. The engine therefore issues them at fixed points of the program and never looks at which transfer has arrived. It
issues a gather across nodes when that gather begins, and the gather inside the node when the weights are used. Under
NCCL, where waiting does not block the thread, it issues both at once.
"""

from enum import Enum, auto

from laconic.comm.collectives import Communicator, Pending
from laconic.shard.bucket import Bucket
from laconic.shard.crossing import CodedValues, ExactWeights, WeightCrossing
from laconic.shard.difference import CodedDifferences, CopiesOf
from laconic.shard.inspection import UnitChecks
from laconic.shard.lanes import Event, Lanes, wait_for
from laconic.shard.program import Program


class GatherState(Enum):
    """The progress of a unit's gather."""

    IDLE = auto()
    NODE = auto()
    """The gather across nodes has begun, or the node shard is in the cache already."""
    LOCAL = auto()
    """The gather inside the node has begun."""
    FULL = auto()


class BucketGather:
    """The gather of one bucket: from this rank's shard, or from a cached node shard, to the full buffer."""

    def __init__(self, bucket: Bucket, lanes: Lanes, copies_of: CopiesOf, checks: UnitChecks) -> None:
        self.bucket, self._lanes = bucket, lanes
        self._node = Communicator(bucket.cluster, "node", bucket)
        self._local = Communicator(bucket.cluster, "local", bucket)
        self._crossing = _crossing_of(bucket, self._node, copies_of, checks)
        self._is_crossing = False
        self._pending: Pending | None = None
        self._version: int | None = None
        self._loaded: Event = None
        self._arrived: Event = None
        self._comes_from_cache = False
        self._stored: Event = None
        self._shard_read: Event = None
        """The event after which the host may write to a shard that rests in host memory."""
        self.num_crossings = 0
        """The gathers that began with this rank's shard, not with the cache."""

    @property
    def is_stream_ordered(self) -> bool:
        """True if waiting for a transfer never blocks the thread."""
        return self._node.is_stream_ordered and self._local.is_stream_ordered

    @property
    def needs_others(self) -> bool:
        """True if a gather that has begun needs other ranks: not all of it is in the cache."""
        return self._is_crossing or self._local.size > 1

    @property
    def is_stale(self) -> bool:
        """True if the parameters have changed since the gather began."""
        return self._version != self.bucket.version

    def start_node(self) -> None:
        """Issue the gather across nodes, unless the cache has the node shard of this version.

        Raises:
            RuntimeError: the parameters are on the meta device.
        """
        bucket, cached = self.bucket, self.bucket.cached
        if bucket.shard.is_meta:
            raise RuntimeError(
                f"{', '.join(slot.name for slot in bucket.layout.slots)} are on the meta device; call model.to_empty("
                "device=...) and initialise them, or load a state dict, before the first forward"
            )
        bucket.find_hooks()
        self._version = bucket.version
        self._comes_from_cache = cached is not None and cached.holds(self._version)
        direct = cached.buffer() if cached is not None and cached.is_direct else None
        self._node_shard = bucket.node_shard_of_full() if direct is None else direct
        if cached is not None and (self._comes_from_cache or self._crossing.prepare()):
            self._loaded = cached.load_into(self._node_shard)
        if self._comes_from_cache:
            return
        if cached is not None:
            cached.invalidate()
        self.num_crossings += 1
        with self._lanes.gather_node.running(self._loaded):
            self._crossing.start(self._node_shard)
            self._is_crossing = True

    def start_local(self) -> None:
        """Wait for the node shard and issue the gather inside the node."""
        full = self.bucket.allocate_full()
        if self._is_crossing:
            self._finish_crossing()
        with self._lanes.gather_local.running(self._loaded, self._arrived):
            self._pending = self._local.all_gather(full, self._node_shard)

    def _finish_crossing(self) -> None:
        """Finish the gather across nodes. If an exception cuts it short, the gather stays stale and is begun anew."""
        version, self._version, self._is_crossing = self._version, None, False
        with self._lanes.gather_node.going_on():
            self._crossing.finish(self._node_shard)
        self._version = version
        self._arrived = self._lanes.gather_node.record_event()
        self._shard_read = self._arrived if self.bucket.is_offloaded else None

    def finish(self) -> Event:
        """Finish the gather. Returns the event after which the full buffer may be used."""
        with self._lanes.gather_local.going_on():
            if self._pending is not None:
                self._pending.wait()
        self._pending = self._loaded = None
        event = self._lanes.gather_local.record_event()
        cached = self.bucket.cached
        if cached is not None and not self._comes_from_cache:  # now, so that the copy runs beside the next computation
            self._stored = cached.store(self._node_shard, self._version, self._arrived)
        self._arrived = None
        del self._node_shard
        return event

    def forget(self) -> None:
        """Let the weights cross exactly next time."""
        self._crossing.forget()

    def let_host_edit(self) -> None:
        """Wait on the host until a shard in host memory has been read: no stream orders the host's edits behind it."""
        if self._shard_read is not None:
            self._shard_read.synchronize()
            self._shard_read = None

    def release(self) -> None:
        """Free the full buffer after the copy from it to the cache is done."""
        self.let_host_edit()
        stored, self._stored = self._stored, None
        wait_for(stored)
        self.bucket.free_full()
        if self.bucket.is_frozen and not self.is_stale and self.bucket.drop_shard() and stored is not None:
            stored.synchronize()  # once in a run: from now on the host reads the parameter in the cache


class UnitGather:
    """The gather of all buckets of a unit."""

    def __init__(
        self, buckets: list[Bucket], lanes: Lanes, copies_of: CopiesOf, checks: UnitChecks, program: Program
    ) -> None:
        self._buckets, self._checks, self._program = buckets, checks, program
        self._gathers = [BucketGather(bucket, lanes, copies_of, checks) for bucket in buckets]
        self.is_stream_ordered = all(gather.is_stream_ordered for gather in self._gathers)
        self._events: list[Event] = []
        self.state = GatherState.IDLE

    @property
    def begins_without_memory(self) -> bool:
        """True if `begin` allocates no memory that would otherwise be free."""
        caches = [bucket.cached for bucket in self._buckets]
        return not self.is_stream_ordered and all(cached is not None and cached.is_direct for cached in caches)

    def begin(self) -> None:
        """Begin a gather if none has begun or parameters changed since: [Note: The same order on every rank]."""
        if self.state is not GatherState.IDLE and any(gather.is_stale for gather in self._gathers):
            self.release()
        if self.state is GatherState.IDLE:
            self._drop_damaged()
            for gather in self._gathers:
                gather.start_node()
            if any(gather.needs_others for gather in self._gathers):
                self._program.note(f"the gather of {self._buckets[0].unit_name}")
            self.state = GatherState.NODE
            if self.is_stream_ordered:
                self.start_local()
                self._events = [gather.finish() for gather in self._gathers]

    def start_local(self) -> None:
        """Begin the gather inside the node, once the node shards have arrived."""
        if self.state is GatherState.NODE:
            for gather in self._gathers:
                gather.start_local()
            self.state = GatherState.LOCAL

    def finish(self) -> None:
        """Gather: on return, compute may use the full buffers.

        Raises:
            CorruptionError: weights were changed without notice, or damaged: see shard/inspection.py.
        """
        self.begin()
        self._complete()
        self._checks.look_at_gathered([gather.num_crossings for gather in self._gathers])

    def _complete(self) -> None:
        if self.state is GatherState.FULL:
            return
        self.start_local()
        for event in self._events or [gather.finish() for gather in self._gathers]:
            wait_for(event)
        self._checks.note_stored()
        for bucket in self._buckets:
            bucket.decode()
        self._events = []
        self.state = GatherState.FULL

    def release(self) -> None:
        """Free the full buffers. A gather that has begun is finished first."""
        if self.state is GatherState.IDLE:
            return
        self._complete()
        for gather in self._gathers:
            gather.release()
        self.state = GatherState.IDLE

    def let_host_edit(self) -> None:
        """Wait on the host until the weights that rest in host memory have been read by a gather that is complete."""
        for gather in self._gathers:
            gather.let_host_edit()

    def _drop_damaged(self) -> None:
        """Empty the caches that are damaged, so that the next gather crosses again, with exact weights."""
        for bucket in self._checks.find_damaged():
            assert bucket.cached is not None
            bucket.cached.invalidate()
            self._gathers[self._buckets.index(bucket)].forget()

    def forget_copies(self) -> None:
        """Let the weights cross exactly next time: [Note: Exact crossings] in shard/difference.py."""
        for gather in self._gathers:
            gather.forget()


def _crossing_of(bucket: Bucket, node: Communicator, copies_of: CopiesOf, checks: UnitChecks) -> WeightCrossing:
    """The way in which a bucket's weights cross between nodes."""
    if bucket.wire.sends_differences:
        return CodedDifferences(bucket, node, copies_of(bucket.cluster), lambda: checks.heals)
    return ExactWeights(bucket, node) if bucket.wire.weights == "exact" else CodedValues(bucket, node)
