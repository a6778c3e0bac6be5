"""How a unit's weights come together: across the nodes, then inside the node.

[Note: The same order on every rank]
Process groups match collectives by their order, so every rank must issue the same ones in the same order on each group.
Gathers are therefore begun only at fixed points of the program (hooks), which is when the collective across the nodes
is issued; the one inside the node may start whenever the slice turns out to be there, which differs between ranks, but
always first begun, first started (`GatherQueue`).
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from laconic.shard.bucket import Bucket
from laconic.shard.collectives import Level, Pending
from laconic.shard.lanes import Lanes, Mark, wait_for


class Stage(Enum):
    """Where a gather stands."""

    IDLE = auto()
    """Nothing is gathered and nothing is under way."""
    NODE = auto()
    """The slice is on its way across the wire, or from the host."""
    LOCAL = auto()
    """The slice is here, the bucket is coming together inside the node."""
    FULL = auto()
    """The parameters may be used."""


class BucketGather:
    """One bucket's way from chunk, or resting slice, to full."""

    def __init__(self, bucket: Bucket, node: Level, local: Level, lanes: Lanes) -> None:
        self.bucket, self._node, self._local, self._lanes = bucket, node, local, lanes
        self._pending: Pending | None = None
        self._version = 0
        self._fetched = False
        self._releases: list[Mark] = []

    @property
    def is_stale(self) -> bool:
        """True if the parameters have changed since the gather began."""
        return self._version != self.bucket.version

    @property
    def needs_staging(self) -> bool:
        """True if the slice comes together in the full buffer."""
        return self.bucket.resting is None or not self.bucket.resting.is_direct

    def start_node(self) -> None:
        """Issue the gather across nodes, unless the slice rests here in the right version."""
        bucket, resting = self.bucket, self.bucket.resting
        self._version = bucket.version
        self._fetched = resting is not None and resting.holds(self._version)
        if self._fetched:
            return
        if resting is None:
            landing = bucket.slice_of_full()
        else:
            landing = resting.landing(None if resting.is_direct else bucket.slice_of_full())
        with self._lanes.gather.running():
            own = bucket.own_part(landing)
            if own.data_ptr() != bucket.chunk.data_ptr():
                own.copy_(bucket.chunk, non_blocking=True)
            self._pending = self._node.all_gather(landing, own)
        self._slice = landing

    def node_is_done(self) -> bool:
        """True if `start_local` would not block."""
        return self._pending is None or self._pending.is_done()

    def start_local(self) -> None:
        """Finish the slice and issue the gather inside the node."""
        bucket, resting = self.bucket, self.bucket.resting
        full = bucket.allocate_full()
        arrived: Mark = None
        if self._fetched:
            assert resting is not None
            slice_, arrived = resting.fetch(None if resting.is_direct else bucket.slice_of_full())
        else:
            slice_ = self._slice
            del self._slice
        with self._lanes.gather.running(arrived):
            _wait(self._pending)
        if resting is not None and not self._fetched:
            self._releases.append(resting.keep(slice_, self._version))
        with self._lanes.gather.running():
            self._pending = self._local.all_gather(full, slice_)

    def finish(self) -> Mark:
        """Finish the gather; returns the mark behind which the full buffer may be used."""
        with self._lanes.gather.running():
            _wait(self._pending)
        self._pending = None
        return self._lanes.gather.mark()

    def release(self) -> None:
        """Give the full buffer back, once copies from it are done."""
        for mark in self._releases:
            wait_for(mark)
        self._releases.clear()
        self.bucket.free_full()
        if self.bucket.is_frozen and not self.is_stale:
            self.bucket.drop_chunk()


class UnitGather:
    """A unit's buckets, gathered together."""

    def __init__(self, gathers: list[BucketGather], queue: GatherQueue) -> None:
        self._gathers = gathers
        self._queue = queue
        self.stage = Stage.IDLE
        self._marks: list[Mark] = []

    @property
    def needs_staging(self) -> bool:
        """True if the slice of a bucket comes together in the full buffer, which beginning then allocates."""
        return any(gather.needs_staging for gather in self._gathers)

    def begin(self) -> None:
        """Start, if nothing is under way: a fixed point of the program ([Note: The same order on every rank]).

        A full bucket whose parameters have changed since is gathered anew.
        """
        if self.stage is Stage.FULL and any(gather.is_stale for gather in self._gathers):
            self.release()
        if self.stage is Stage.IDLE:
            for gather in self._gathers:
                gather.start_node()
            self.stage = Stage.NODE
            self._queue.add(self)

    def try_start_local(self) -> None:
        """Start the gather inside the node if that would not block."""
        if self.stage is Stage.NODE and all(gather.node_is_done() for gather in self._gathers):
            self.start_local()

    def start_local(self) -> None:
        """Start the gather inside the node, waiting for the slice if need be."""
        if self.stage is Stage.NODE:
            for gather in self._gathers:
                gather.start_local()
            self.stage = Stage.LOCAL

    def finish(self) -> None:
        """Return with the full buffers ready for compute."""
        self.begin()
        if self.stage is not Stage.FULL:
            self._queue.start_local_until(self)
            for gather in self._gathers:
                wait_for(gather.finish())
            self.stage = Stage.FULL

    def release(self) -> None:
        """Give the full buffers back; a gather under way is finished first."""
        if self.stage is Stage.IDLE:
            return
        self.finish()
        for gather in self._gathers:
            gather.release()
        self.stage = Stage.IDLE


class GatherQueue:
    """Gathers that have begun and not started inside the node, first begun, first started."""

    def __init__(self) -> None:
        self._waiting: deque[UnitGather] = deque()
        self._ahead: UnitGather | None = None

    def add(self, gather: UnitGather) -> None:
        """Enter a gather that has just begun."""
        self._waiting.append(gather)

    def advance(self) -> None:
        """Start the first one, if it can without blocking: one unit ahead of compute, which bounds memory."""
        if self._waiting and (self._ahead is None or self._ahead.stage is not Stage.LOCAL):
            first = self._waiting[0]
            first.try_start_local()
            if first.stage is not Stage.NODE:
                self._ahead = self._waiting.popleft()

    def start_local_until(self, gather: UnitGather) -> None:
        """Start everything up to and including `gather`."""
        while gather.stage is Stage.NODE:
            self._waiting.popleft().start_local()


def _wait(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()
