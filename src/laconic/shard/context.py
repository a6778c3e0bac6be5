"""The state that all units of one root module share: the order of execution, transfers, and memory.

[Note: Prefetching]
A forward under a root records the order in which its units run. The next forward begins the gathers of the units that
came after this one last time; backward takes the same order in reverse. The next unit's gather across nodes begins when
this unit's has arrived, and this unit's gather inside the node runs beside it. A second unit's gather keeps the wire
busy in between, if its node shard arrives in the cache's own memory, so that it takes no memory early.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.shard.bucket import Bucket
from laconic.shard.cache import CachedShard, choose_device_shards, free_slab, make_slab
from laconic.shard.difference import Copies
from laconic.shard.gather import UnitGather
from laconic.shard.inspection import Inspection
from laconic.shard.lanes import Lanes
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Cache
from laconic.shard.program import Program
from laconic.shard.reduce import ReductionQueue

PREFETCH = 2
"""The number of units whose gathers across nodes begin early: [Note: Prefetching]."""


class Context:
    """The order of execution, the lanes, the reductions, the ledger and the host cache of one root module."""

    def __init__(self, cluster: Cluster, lanes: Lanes) -> None:
        self.cluster = cluster
        self.ledger = Ledger()
        self.lanes = lanes
        self.reductions = ReductionQueue()
        self.inspection = Inspection(cluster)
        self.program = Program(cluster)
        self.is_in_backward = False
        """True from the first gradient of a backward until it is finished or abandoned."""
        self.is_last_backward = True
        """False if the next backward need not wait for its last reduction."""
        self.post_optim_event: Any = None
        """An event for which the next forward waits before it gathers."""
        self.adds_to_grad = False
        """True if the running backward adds to `.grad` of some parameter."""
        self.creates_graph = False
        """True if the last backward ran with `create_graph=True`, so that another one may need the same weights."""
        self.probe: Callable[[Bucket, Tensor], None] | None = None
        """Takes the gradients of each bucket, (L * N * C,), in place of their reduction: see shard/audit.py."""
        self._copies: dict[Cluster, Copies] = {}
        self._is_recording = False
        self._last_forward: list[UnitGather] = []
        self._forward: list[UnitGather] = []  # the present forward so far
        self._left: list[UnitGather] = []  # finished forwards of this step; backward visits them in reverse

    def place_caches(self, units: Sequence[tuple[Cache, Sequence[Bucket]]]) -> None:
        """Give cache memory to the buckets that cache, unless there is one node. Units come in the order of forward."""
        hosted: list[list[CachedShard]] = []
        for policy, buckets in units:
            if policy.where != "none":
                caches = [bucket.add_cache(self.lanes) for bucket in buckets if bucket.cluster.num_nodes > 1]
                if policy.where == "host":
                    hosted.append(caches)
        budget_bytes = max((policy.device_budget_bytes for policy, _ in units), default=0)
        sizes_bytes = [sum(cached.nbytes for cached in unit) for unit in hosted]
        on_device = choose_device_shards(sizes_bytes, budget_bytes)
        in_slab = [cached for index, unit in enumerate(hosted) if index not in on_device for cached in unit]
        if in_slab:
            sizes_bytes = [cached.nbytes for cached in in_slab]
            device = self.cluster.device
            slab = make_slab(sum(sizes_bytes), device, num_local=self.cluster.num_local)
            self.ledger.host_bytes += slab.nbytes
            if device.type != "cpu":
                weakref.finalize(self, free_slab, slab, device).atexit = False  # keeps the slab until then
            for cached, part in zip(in_slab, slab.split(sizes_bytes), strict=True):
                cached.move_to_slab(part)

    def copies_of(self, cluster: Cluster) -> Copies:
        """The copies of the weights that the nodes of `cluster` have: [Note: Exact crossings] in difference.py."""
        return self._copies.setdefault(cluster, Copies(cluster))

    @property
    def has_run(self) -> bool:
        """True once a unit has run in a forward of the root."""
        return bool(self._last_forward or self._forward)

    def begin_forward(self, *, keep_order: bool) -> None:
        """Begin a forward of the root: record its order from now on. With `keep_order`, earlier forwards' stays, too.

        Several forwards may come before one backward. A forward that backward recomputes belongs to the present step.
        """
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        self.program.settle()
        self._is_recording = True
        self._forward = []
        self.inspection.begin_forward()
        if torch.is_grad_enabled() and not keep_order and not _compat.in_backward():
            self._left = []

    def end_forward(self) -> None:
        """End a forward of the root: the recorded order serves the next one."""
        self._is_recording = False
        self._last_forward, self._forward = self._forward, []

    def enter_forward(self, gather: UnitGather, prefetch: Sequence[UnitGather] | None) -> None:
        """Begin the gather of a unit whose forward begins, and those of `prefetch`; None takes the recorded order."""
        gather.begin()
        following: Sequence[UnitGather] = []
        if self._is_recording:
            self._forward.append(gather)
            position = len(self._forward)
            if self._last_forward[position - 1 : position] == [gather]:
                following = _worth_beginning(self._last_forward[position : position + PREFETCH])
        _begin_all(gather, following if prefetch is None else prefetch)

    def leave_forward(self, gather: UnitGather) -> None:
        """Record that a unit's forward has ended."""
        if torch.is_grad_enabled():
            self._left.append(gather)

    def enter_backward(self, gather: UnitGather, prefetch: Sequence[UnitGather] | None) -> None:
        """Begin the gather of a unit whose backward begins, and those of `prefetch`; None takes the recorded order."""
        gather.begin()
        if prefetch is None:
            position = next((i for i in reversed(range(len(self._left))) if self._left[i] is gather), 0)
            prefetch = _worth_beginning(self._left[max(0, position - PREFETCH) : position][::-1])
            del self._left[position:]
        _begin_all(gather, prefetch)

    def begin_backward(self, *, creates_graph: bool, adds_to_grad: bool) -> None:
        """Begin a backward at its first gradient."""
        self.is_in_backward = True
        self.creates_graph, self.adds_to_grad = creates_graph, adds_to_grad

    def end_backward(self) -> None:
        """End a backward that is finished or abandoned."""
        self._left = []
        self.is_in_backward = False


def _begin_all(gather: UnitGather, following: Iterable[UnitGather]) -> None:
    gather.start_local()
    for other in following:
        other.begin()


def _worth_beginning(following: list[UnitGather]) -> list[UnitGather]:
    return [gather for distance, gather in enumerate(following) if distance == 0 or gather.begins_without_memory]
