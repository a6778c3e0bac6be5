"""The outermost unit and all below it: what they share, and where their forwards and backwards begin and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.layout.granularity import check_matched
from laconic.shard import extension
from laconic.shard.bucket import Bucket
from laconic.shard.buffers import Buffers, Owner
from laconic.shard.cache import Slab, choose_device_shards
from laconic.shard.choosing import Chooser
from laconic.shard.crossing import Copies
from laconic.shard.gather import HostReads
from laconic.shard.itinerary import Order
from laconic.shard.ledger import Ledger
from laconic.shard.placement import UnitUse
from laconic.shard.policies import Placement
from laconic.shard.reduce import ReductionQueue
from laconic.shard.states import AT_REST, UnitPhase
from laconic.shard.unit import Unit, units_below


class Root:
    """The outermost unit and all below it: what they share, and where their forwards and backwards begin and end."""

    def __init__(self, top: Unit) -> None:
        """Lead all units below `top`, also those that were unsharded by hand before. Collective over the mesh.

        Raises:
            RuntimeError: a unit below has run before, outside its root.
            ValueError: a granularity pattern matches no parameter of any unit.
            Exception: the observer has found a mistake.
        """
        self.top, self.cluster = top, top.cluster
        self.units = list(dict.fromkeys(unit for module in top.modules for unit in units_below(module)))
        """Outermost first."""
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        check_matched(unit.blocks for unit in self.units)
        self.lanes, self.ledger = top._comm_ctx, Ledger()
        self.order = Order()
        self.reductions = ReductionQueue()
        self.observer = extension.observer_class()(self)
        self.backward: Backward | None = None
        """The backward that runs below this root."""
        self.creates_graph = False
        """True if the last backward ran with `create_graph=True`, so that another one may need the same weights."""
        self.is_last_backward = True
        """False if the next backward need not wait for its last reduction."""
        self.post_optim_event: Any = None
        """An event for which the next forward waits before it gathers."""
        self.probe: Callable[[Bucket, Tensor], None] | None = None
        """Takes the gradients of each bucket, (L * N * C,), in place of their reduction: see guard/audit.py."""
        self._copies: dict[Cluster, Copies] = {}
        names = {child: name for module in top.modules for name, child in module.named_modules()}
        for unit in self.units:
            own_names = ", ".join(filter(None, (names.get(child) for child in unit.modules))) or unit.name
            for bucket in unit.buckets:
                bucket.unit_name = own_names
            unit.join(self)
            unit.rename(own_names)
        self.gradients = [gradients for unit in self.units for gradients in unit.gradients]
        """Of all buckets."""
        is_offloaded = any(bucket.stored.is_offloaded for bucket in self.buckets)
        self.host_reads = HostReads(self.lanes.gather_node, is_offloaded=is_offloaded)
        is_pinned = all(unit.cache.pin_memory for unit in self.units)
        self._slab = Slab(self.cluster, self.ledger, is_pinned=is_pinned)
        try:
            self.observer.leading()
        except BaseException:
            for unit in self.units:
                unit.leave()
            raise
        with torch.inference_mode(False):  # training could not fill a slab of inference tensors
            self._place_caches()
        self._to_place = [unit for unit in self.units if unit.cache.where == "auto"]
        self.chooser = Chooser(self, [unit.cache for unit in self._to_place]) if self._to_place else None
        """Chooses where units rest, once; None if their caches say, and once it has chosen."""
        owners = [Owner(unit.modules, unit.cluster, unit.broadcast_buffers) for unit in self.units]
        self._buffers = Buffers(owners, self._diverges)

    def copies_of(self, cluster: Cluster) -> Copies:
        """The copies of the weights that the nodes of `cluster` have: [Note: Exact crossings] in crossing.py."""
        return self._copies.setdefault(cluster, Copies(cluster, self.observer))

    def _diverges(self, cluster: Cluster) -> bool:
        return any(bucket.replicas_diverge for bucket in self.buckets if bucket.cluster is cluster)

    def set_placements(self, placements: Mapping[str, Placement]) -> None:
        """See `ShardedModule.set_placements`."""
        units = {unit.name: unit for unit in self.units}
        for name, placement in placements.items():
            if name not in units:
                raise ValueError(f"{name!r} is no unit of this root; its units are {', '.join(map(repr, units))}")
            units[name].check_placement(placement)
        self.end_choosing()
        self.place({units[name]: placement for name, placement in placements.items()})

    def place(self, placements: Mapping[Unit, Placement]) -> None:
        """Let units rest elsewhere from now on. No forward or backward runs."""
        with torch.inference_mode(False):  # training could not fill a slab of inference tensors
            for unit in self.units:
                unit.gather.rest_nowhere()
            self._slab.free()
            for unit, placement in placements.items():
                unit.placement = placement
            self._place_caches()

    def end_choosing(self) -> None:
        """Choose nothing any more: units rest where they will for the whole run."""
        self.chooser = None
        self.ledger.forget_passing()

    @property
    def version(self) -> int:
        """A number that every change of weights increases."""
        return sum(bucket.stored.version for bucket in self.buckets)

    def watch_passing(self) -> None:
        """Let the ledger keep what its `passing` needs from now on."""
        self.ledger.watch_passing(partial(_full_bytes, ref(self)))

    def uses_to_place(self) -> list[UnitUse]:
        """The use of each unit that a chooser places, since the counting began."""
        return [unit.use() for unit in self._to_place]

    def place_chosen(self, placements: Sequence[Placement]) -> None:
        """Let the units that a chooser places rest elsewhere."""
        self.place(dict(zip(self._to_place, placements, strict=True)))

    def allocate_chosen(self) -> int:
        """Allocate the device memory in which the weights of these units stay. Returns its bytes."""
        shards = [bucket.node_shard for unit in self._to_place for bucket in unit.buckets]
        return sum(shard.allocate() for shard in shards)

    def _place_caches(self) -> None:
        """Let weights stay where the units' placements say; those of one node as node shards do not."""
        hosted: list[list[Bucket]] = []
        for unit in self.units:
            if unit.placement.weights != "none":
                for bucket in unit.buckets:
                    bucket.find_hooks()
            if unit.placement.weights == "rank":
                for bucket in unit.buckets:
                    bucket.node_shard.stay("rank")
            elif unit.placement.weights != "none":
                crossing = [bucket for bucket in unit.buckets if bucket.cluster.num_nodes > 1]
                for bucket in crossing:
                    bucket.node_shard.until = unit.cache.until
                    bucket.node_shard.stay("device")
                if unit.placement.weights == "host":
                    hosted.append(crossing)
        budget_bytes = max((unit.cache.device_budget_bytes for unit in self.units), default=0)
        sizes_bytes = [sum(bucket.form.most_node_bytes() for bucket in each) for each in hosted]
        on_device = choose_device_shards(sizes_bytes, budget_bytes)
        in_slab = [bucket for index, each in enumerate(hosted) if index not in on_device for bucket in each]
        self._slab.fill([bucket.node_shard for bucket in in_slab])
        self.order.choose_anew()
        for unit in self.units:
            kept = [bucket.node_shard for bucket in unit.buckets]
            unit.keeps_for_a_step = any(each.where == "device" or each.until == "backward" for each in kept)
            unit.gather.settle_place()

    def begin_forward(self) -> None:
        """Begin a forward. A forward that backward recomputes belongs to the present step."""
        if self.backward is not None and not _compat.in_backward():
            self.abandon_iteration()
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        if self.chooser is not None and torch.is_grad_enabled() and not _compat.in_backward():
            self.chooser.begin_forward()
        self.observer.begin_forward()
        keeps = any([unit.awaited.outputs for unit in self.units])  # noqa: C419  a generator takes a call for each
        self.order.begin_forward(keeps=keeps)
        self._buffers.begin_forward(syncs=self.top.requires_gradient_sync, compare=self.observer.sharing)

    def end_forward(self) -> None:
        """End a forward, and the step if no backward follows."""
        for unit in self.units:
            if unit.phase is UnitPhase.FORWARD:  # some of its modules did not run
                unit.end_pass()
        self.order.end_forward()
        for unit in self.units:
            if unit.gather.stays:
                unit.gather.store()
        self._buffers.end_forward()
        self.host_reads.delay_edits()
        if not torch.is_grad_enabled() and not _compat.in_backward():  # no backward will free what was gathered
            for unit in self.units:
                unit.reshard()
                unit.free_node_shards(ends_step=False)
            self.observer.all_issued()
            self.observer.settled(ends_step=True, is_last=True)

    def begin_backward(self) -> Backward:
        """Begin a backward at its first gradient: of an output or, if none gets one, of a parameter."""
        if self.backward is None:
            self.creates_graph = torch.is_grad_enabled()
            self.backward = Backward(adds_to_grad=any(each.adds_to_grad() for each in self.gradients))
            for unit in self.units:
                unit.has_ended = False
            self._take_waiting()
            _compat.after_this_backward(self._finish_backward)
        return self.backward

    def _finish_backward(self) -> None:
        """Finish the backward of all units, in an order that is the same on all ranks."""
        _compat.outside_transforms(self._finish_units)

    def _finish_units(self) -> None:
        for unit in reversed(self.units):
            unit.finish_backward()
        self.observer.all_issued()
        self.host_reads.delay_edits()
        if self.is_last_backward:
            self.reductions.finish(self.host_reads)
        self.reductions.wait_for_ended()
        for unit in self.units:
            for gradients in unit.gradients:
                if gradients.waiting or (not self.is_last_backward and self.reductions.has(gradients)):
                    gradients.show_waiting()
            if unit.gather.state not in AT_REST:
                unit.leave_backward()
        self.order.end_backward()
        self.backward = None
        syncs = self.probe is None and any(unit.requires_gradient_sync for unit in self.units)
        if self.chooser is not None and syncs:
            self.chooser.end_step()
        self.observer.settled(ends_step=syncs, is_last=self.is_last_backward)

    def reduce_waiting(self) -> None:
        """Reduce what earlier backwards have left, as one that syncs would; none runs now: [Note: Pipelines]."""
        self.backward = Backward(adds_to_grad=True)
        self._take_waiting()
        for gradients in self.gradients:
            gradients.collect_left()
        self._finish_units()

    def _take_waiting(self) -> None:
        """Take waiting gradients out of `.grad`, and what was cleared out of the sums: [Note: Cleared gradients]."""
        for gradients in self.gradients:
            if gradients.shown.shown:
                self.reductions.drop(gradients, gradients.take_waiting())

    def abandon_iteration(self) -> None:
        """Drop the incomplete gradients of a forward or backward that raised."""
        self.reductions.abandon()
        self.host_reads.delay_edits()
        self.observer.abandoned()
        for unit in self.units:
            unit.abandon()
        self.order.end_backward()
        self.backward = None


def _full_bytes(reference: ref[Root]) -> dict[bool, int]:
    """The bytes of a root's full buffers, of units around others (True) and of the others.

    Gradients that wait hold the ledger. If the ledger held the root, that would be a cycle that Python never frees.
    """
    found, root = {False: 0, True: 0}, reference()
    for unit in [] if root is None else root.units:
        found[unit.is_around] += sum(bucket.full.nbytes for bucket in unit.buckets)
    return found


@dataclass(kw_only=True)
class Backward:
    """A backward that runs below a root."""

    adds_to_grad: bool
    """True if it adds to `.grad` of some parameter: [Note: Gradients that do not come] in shard/reduce.py."""
