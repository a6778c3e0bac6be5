"""How a unit's weights come together: across the nodes, then inside the node.

[Note: The same order on every rank]
Process groups match transfers by their order, so every rank must issue the same ones in the same order on each group.
All of them are therefore issued at fixed points of the program, never when something turns out to have arrived: a
gather across nodes when it begins, the one inside the node when the weights are wanted (under NCCL, whose waiting does
not block, at once).
"""

from __future__ import annotations

from enum import Enum, auto

from laconic.comm.collectives import Communicator, Pending
from laconic.shard.bucket import Bucket
from laconic.shard.lanes import Lanes, Mark, wait_for


class GatherState(Enum):
    """Where a gather stands."""

    IDLE = auto()
    """Nothing is gathered and nothing is under way."""
    NODE = auto()
    """The slice is on its way across the wire, or rests here already."""
    LOCAL = auto()
    """The slice is here, the bucket is coming together inside the node."""
    FULL = auto()
    """The parameters may be used."""


class BucketGather:
    """One bucket's way from shard, or resting slice, to full."""

    def __init__(self, bucket: Bucket, node: Communicator, local: Communicator, lanes: Lanes) -> None:
        self.bucket, self._node, self._local, self._lanes = bucket, node, local, lanes
        self._pending: Pending | None = None
        self._version = 0
        self._arrived: Mark = None
        self._lands = False
        self._releases: list[Mark] = []

    @property
    def is_stale(self) -> bool:
        """True if the parameters have changed since the gather began."""
        return self._version != self.bucket.version

    @property
    def needs_staging(self) -> bool:
        """True if the slice comes together in the full buffer, which beginning then allocates."""
        return self.bucket.resting is None or not self.bucket.resting.is_direct

    def start_node(self) -> None:
        """Issue the gather across nodes, unless the slice rests here in the right version."""
        bucket, resting = self.bucket, self.bucket.resting
        self._version = bucket.version
        self._lands = resting is None or not resting.holds(self._version)
        if not self._lands:
            assert resting is not None
            self._slice, self._arrived = resting.fetch(None if resting.is_direct else bucket.slice_of_full())
            return
        if resting is None:
            landing = bucket.slice_of_full()
        else:
            landing = resting.landing(None if resting.is_direct else bucket.slice_of_full())
        with self._lanes.gather.running():
            own = bucket.own_part(landing)
            if own.data_ptr() != bucket.shard.data_ptr():
                own.copy_(bucket.shard, non_blocking=True)
            self._pending = self._node.all_gather(landing, own)
        self._slice = landing

    def start_local(self) -> None:
        """Finish the slice and issue the gather inside the node."""
        full = self.bucket.allocate_full()
        with self._lanes.gather.running(self._arrived):
            _wait(self._pending)
            self._pending = self._local.all_gather(full, self._slice)

    def finish(self) -> Mark:
        """Finish the gather; returns the mark behind which the full buffer may be used."""
        with self._lanes.gather.running():
            _wait(self._pending)
        self._pending = self._arrived = None
        mark = self._lanes.gather.mark()
        if self.bucket.resting is not None and self._lands:  # now, so that the copy runs beside what compute does next
            self._releases.append(self.bucket.resting.keep(self._slice, self._version))
        del self._slice
        return mark

    def release(self) -> None:
        """Give the full buffer back, once copies from it are done."""
        marks = [mark for mark in self._releases if mark is not None]
        for mark in marks:
            wait_for(mark)
        self._releases.clear()
        self.bucket.free_full()
        if self.bucket.is_frozen and not self.is_stale and self.bucket.drop_shard() and marks:
            marks[-1].synchronize()  # once in a run: from now on the host reads the parameter where the copy puts it


class UnitGather:
    """A unit's buckets, gathered together."""

    def __init__(self, buckets: list[Bucket], node: Communicator, local: Communicator, lanes: Lanes) -> None:
        self._gathers = [BucketGather(bucket, node, local, lanes) for bucket in buckets]
        self._is_stream_ordered = node.is_stream_ordered and local.is_stream_ordered
        self._marks: list[Mark] = []
        self.stage = GatherState.IDLE

    @property
    def begins_for_free(self) -> bool:
        """True if beginning allocates nothing that would not be held anyway."""
        return not self._is_stream_ordered and not any(gather.needs_staging for gather in self._gathers)

    def begin(self) -> None:
        """Start, if nothing is under way: a fixed point of the program ([Note: The same order on every rank]).

        Buckets whose parameters have changed since their gather began are gathered anew.
        """
        if self.stage is not GatherState.IDLE and any(gather.is_stale for gather in self._gathers):
            self.release()
        if self.stage is GatherState.IDLE:
            for gather in self._gathers:
                gather.start_node()
            self.stage = GatherState.NODE
            if self._is_stream_ordered:
                self.start_local()
                self._marks = [gather.finish() for gather in self._gathers]

    def start_local(self) -> None:
        """Start the gather inside the node, waiting for the slice if need be."""
        if self.stage is GatherState.NODE:
            for gather in self._gathers:
                gather.start_local()
            self.stage = GatherState.LOCAL

    def finish(self) -> None:
        """Return with the full buffers ready for compute."""
        self.begin()
        self._complete()

    def _complete(self) -> None:
        if self.stage is GatherState.FULL:
            return
        self.start_local()
        for mark in self._marks or [gather.finish() for gather in self._gathers]:
            wait_for(mark)
        self._marks = []
        self.stage = GatherState.FULL

    def release(self) -> None:
        """Give the full buffers back; a gather under way is finished first."""
        if self.stage is GatherState.IDLE:
            return
        self._complete()
        for gather in self._gathers:
            gather.release()
        self.stage = GatherState.IDLE


def _wait(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()
