"""The program of laconic's engine: what one rank gathers, computes, reduces and keeps in a step.

The methods are named after those of the engine (shard/unit.py, gather.py, reduce.py), and come in its order. See
[Note: One program, three readings] in machine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from laconic.comm.traffic import Level
from laconic.plan.buckets import Shape, Sharding, plan_buckets
from laconic.plan.engine_reduce import BucketState, Reductions
from laconic.plan.machine import Machine, Transfer
from laconic.plan.model_trace import ModelTrace
from laconic.plan.phase import Phase
from laconic.shard.cache import choose_device_shards
from laconic.shard.gather import PREFETCH
from laconic.shard.policies import Cache


class _State(Enum):
    IDLE = auto()
    NODE = auto()
    LOCAL = auto()
    FULL = auto()


@dataclass(eq=False)
class _Unit:
    name: str
    buckets: list[BucketState]
    state: _State = _State.IDLE


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The choices of `fully_shard` and of the step."""

    sharding: Sharding
    cache: Cache = field(default_factory=Cache)
    syncs_always: bool = False
    """True if every micro-batch reduces across nodes, as in ZeRO++."""
    replicas_diverge: bool = False
    """True under local steps: islands do not sum gradients in every step."""


class Engine:
    """The engine on a machine. `step` runs one optimizer step's forward and backward."""

    def __init__(self, machine: Machine, trace: ModelTrace, shape: Shape, options: EngineOptions) -> None:
        self.machine, self.trace, self.shape, self.options = machine, trace, shape, options
        self._is_cpu = machine.device_type == "cpu"
        self._knows_gradients = any(segment.phase.gradient_peaks for segment in trace.segments)
        """False for a formula, which does not say when gradients come."""
        self.units = self._make_units()
        self.reductions = Reductions(machine, shape, sums_replicas=not options.replicas_diverge)
        for bucket in self.buckets:
            machine.hold("parameters", bucket.plan.shard_bytes)
            if bucket.is_in_slab:
                machine.host_bytes += bucket.plan.node_shard_bytes

    @property
    def buckets(self) -> list[BucketState]:
        """All buckets, in the order of units."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    def _make_units(self) -> list[_Unit]:
        planned = [plan_buckets(unit, self.shape, self.options.sharding) for unit in self.trace.units]
        cache, caches = self.options.cache, self.shape.nodes > 1 and self.options.cache.where != "none"
        in_slab: set[int] = set()
        if caches and cache.where == "host":
            order = [len(planned) - 1, *range(len(planned) - 1)]  # the engine counts the root first
            sizes = [sum(bucket.node_shard_bytes for bucket in planned[index]) for index in order]
            on_device = choose_device_shards(sizes, cache.device_budget_bytes)
            in_slab = {unit for place, unit in enumerate(order) if place not in on_device}
        return [
            _Unit(
                spec.name,
                [
                    BucketState(
                        plan, spec.name, is_cached=caches, is_in_slab=index in in_slab,
                        is_direct=caches and (index not in in_slab or self._is_cpu),
                    )
                    for plan in buckets
                ],
            )
            for index, (spec, buckets) in enumerate(zip(self.trace.units, planned, strict=True))
        ]  # fmt: skip

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, micro_batches: int) -> None:
        """Run forward and backward of all micro-batches of a step."""
        for index in range(micro_batches):
            self._run(syncs=index == micro_batches - 1 or self.options.syncs_always)

    def update(self) -> None:
        """Note that the optimizer has changed the weights, and that gradients are gone."""
        for bucket in self.buckets:
            if not bucket.plan.is_frozen:
                bucket.holds_valid = False
                if bucket.has_grad:
                    self.machine.hold("gradients", -bucket.plan.shard_bytes)
                    bucket.has_grad = False

    def _run(self, *, syncs: bool) -> None:
        """One micro-batch."""
        self._ask_for_exact()
        forward, backward = self.trace.forward, self.trace.backward
        order = list(dict.fromkeys(segment.unit for segment in forward))
        ends = {segment.unit: index for index, segment in enumerate(forward)}
        for index, segment in enumerate(forward):
            unit = self.units[segment.unit]
            if unit.state is _State.IDLE or unit.state is not _State.FULL:
                place = order.index(segment.unit)
                self._enter(unit, [self.units[each] for each in order[place + 1 : place + 1 + PREFETCH]])
            self.machine.compute(unit.name, segment.phase)
            if ends[segment.unit] == index:
                self._release(unit)
        left = sorted(order, key=lambda each: ends[each])  # in the order in which forwards ended
        last = {segment.unit: index for index, segment in enumerate(backward)}
        for index, segment in enumerate(backward):
            unit = self.units[segment.unit]
            if unit.state is not _State.FULL:
                place = left.index(segment.unit)
                self._enter(unit, [self.units[each] for each in left[max(0, place - PREFETCH) : place][::-1]])
            is_last = last[segment.unit] == index
            self.machine.compute(unit.name, segment.phase, self._take_gradients(unit, segment.phase, is_last=is_last))
            if is_last and unit is not self.units[-1]:
                self._end_backward(unit, syncs=syncs)
        self._end_backward(self.units[-1], syncs=syncs)  # the root's inputs are tokens, which have no gradients
        self._finish_backward(syncs=syncs)

    def _take_gradients(self, unit: _Unit, phase: Phase, *, is_last: bool) -> list[tuple[float, int]]:
        """Take memory for the gradients of each bucket at the first of them, and at the end if none has come."""
        names = {slot.name: bucket for bucket in unit.buckets for slot in bucket.plan.layout.slots}
        due = [(names[name], peak_bytes) for name, peak_bytes in phase.gradient_peaks if name in names]
        if is_last or not self._knows_gradients:
            due += [(bucket, 0 if self._knows_gradients else phase.peak_bytes) for bucket in unit.buckets]
        found = []
        for bucket, peak_bytes in due:
            is_new = not bucket.plan.is_frozen and not bucket.gradient_held
            bucket.gradient_held |= is_new
            found.append((float(bucket.plan.gradient_bytes) if is_new else 0.0, peak_bytes))
        return found

    def _ask_for_exact(self) -> None:
        """Agree on the crossings of new weights as differences: [Note: Exact crossings] in shard/difference.py."""
        members = [bucket for bucket in self.buckets if bucket.is_cached and bucket.plan.wire.sends_differences]
        if members and not all(bucket.holds_valid for bucket in members):
            self.machine.wait(self.machine.send(self.flags("crossings", 3 * len(members) + 1, across_islands=False)))

    # -- gather --------------------------------------------------------------------------------------------------------

    def _enter(self, unit: _Unit, following: Sequence[_Unit]) -> None:
        """Gather a unit, and begin the gathers of those that follow: [Note: Prefetching] in shard/gather.py."""
        self._begin(unit)
        self._start_local(unit)
        for distance, other in enumerate(following):
            if distance == 0 or (self._is_cpu and all(each.is_cached and each.is_direct for each in other.buckets)):
                self._begin(other)
        self._complete(unit)

    def _begin(self, unit: _Unit) -> None:
        if unit.state is not _State.IDLE:
            return
        for bucket in unit.buckets:
            self._start_node(bucket)
        unit.state = _State.NODE
        if not self._is_cpu:
            self._start_local(unit)

    def _start_node(self, bucket: BucketState) -> None:
        plan, machine = bucket.plan, self.machine
        bucket.comes_from_cache = bucket.is_cached and bucket.holds_valid
        if not bucket.is_direct:
            self._hold_full(bucket)
        elif not bucket.is_in_slab and not bucket.has_memory:
            bucket.has_memory = True
            machine.hold("cache", plan.node_shard_bytes)
        if bucket.comes_from_cache:
            if not bucket.is_direct:
                bucket.loaded = machine.copy(f"load {bucket.name}", plan.node_shard_bytes, to_device=True)
            return
        is_coded = plan.wire.weights != "exact" and (plan.wire.as_values or bucket.has_copy)
        if is_coded and plan.wire.sends_differences and not bucket.is_direct:
            bucket.loaded = machine.copy(f"load {bucket.name}", plan.node_shard_bytes, to_device=True)
        nodes = self.shape.nodes
        if is_coded and plan.weight_payload_bytes is not None:
            bucket.message_bytes = nodes * plan.weight_payload_bytes
            machine.hold("transfers", bucket.message_bytes)
            bucket.encode(machine, plan.wire.weights, plan.layout.shard_numel)
            each_bytes = plan.weight_payload_bytes
        else:
            if not (bucket.is_dropped or plan.full_is_shard):
                machine.touch(f"cast {bucket.name}", plan.shard_bytes + plan.node_shard_bytes / nodes)
            each_bytes = plan.node_shard_bytes / nodes
        transfer = Transfer(name=f"gather {bucket.name}", purpose="weights", sent={"node": (nodes - 1) * each_bytes})
        bucket.crossing, bucket.is_crossing = machine.send(transfer, bucket.loaded), True
        bucket.has_copy = bucket.is_cached

    def _start_local(self, unit: _Unit) -> None:
        if unit.state is not _State.NODE:
            return
        for bucket in unit.buckets:
            self._hold_full(bucket)
            after = bucket.loaded
            if bucket.is_crossing:
                self._finish_crossing(bucket)
                after = bucket.crossing if not self._is_cpu else None
            if bucket.is_direct:
                self.machine.touch(f"place {bucket.name}", 2 * bucket.plan.node_shard_bytes)
            transfer = Transfer(
                name=f"gather {bucket.name} inside", purpose="weights",
                sent={"local": (self.shape.local - 1) * bucket.plan.node_shard_bytes},
            )  # fmt: skip
            bucket.local = self.machine.send(transfer, after) or after
        unit.state = _State.LOCAL

    def _finish_crossing(self, bucket: BucketState) -> None:
        bucket.is_crossing = False
        if self._is_cpu:
            self.machine.wait(bucket.crossing, f"gather {bucket.name}")
        if bucket.message_bytes:
            plan = bucket.plan
            bucket.decode(self.machine, plan.wire.weights, plan.layout.shard_numel * self.shape.nodes)
            self.machine.hold("transfers", -bucket.message_bytes)
            bucket.message_bytes = 0.0

    def _complete(self, unit: _Unit) -> None:
        if unit.state is _State.FULL:
            return
        self._start_local(unit)
        for bucket in unit.buckets:
            self.machine.wait(bucket.local, f"gather {bucket.name}")
            if bucket.is_cached and not bucket.comes_from_cache:
                bucket.holds_valid = True
                if not bucket.is_direct:
                    nbytes = bucket.plan.node_shard_bytes
                    bucket.stored = self.machine.copy(f"store {bucket.name}", nbytes, bucket.crossing, to_device=False)
            bucket.crossing = bucket.loaded = bucket.local = None
        unit.state = _State.FULL

    def _hold_full(self, bucket: BucketState) -> None:
        if not bucket.is_full_held and not bucket.plan.full_is_shard:
            bucket.is_full_held = True
            self.machine.hold("parameters", bucket.plan.full_bytes)

    def _release(self, unit: _Unit) -> None:
        """Free the full buffers of a unit."""
        if unit.state is _State.IDLE:
            return
        self._complete(unit)
        for bucket in unit.buckets:
            self.machine.wait(bucket.stored, f"store {bucket.name}")
            bucket.stored = None
            if bucket.is_full_held:
                bucket.is_full_held = False
                self.machine.hold("parameters", -bucket.plan.full_bytes)
            if bucket.plan.is_frozen and bucket.is_cached and not bucket.is_dropped and bucket.plan.keeps_own_bits:
                bucket.is_dropped = True
                self.machine.hold("parameters", -bucket.plan.shard_bytes)
        unit.state = _State.IDLE

    # -- reduce --------------------------------------------------------------------------------------------------------

    def _end_backward(self, unit: _Unit, *, syncs: bool) -> None:
        """Free the weights and begin to reduce the gradients."""
        self._release(unit)
        for bucket in unit.buckets:
            if bucket.gradient_held:
                bucket.gradient_held = False
                self.reductions.add(bucket, bucket.plan.gradient_bytes, syncs=syncs)

    def _finish_backward(self, *, syncs: bool) -> None:
        """Finish all reductions in flight, and free device caches that the optimizer will make stale."""
        if syncs:
            for bucket in self.buckets:
                if bucket.partial_bytes and not self.reductions.has(bucket):
                    self.reductions.add(bucket, 0.0, syncs=True)
                is_base = bucket.plan.wire.sends_differences
                if bucket.is_cached and not bucket.plan.is_frozen and not is_base:
                    self._free_cache(bucket)
        flags = sum(bucket.plan.num_parameters for bucket in self.reductions.finish(syncs=syncs))
        if flags:  # the ranks agree on the parameters that got a gradient
            self.machine.wait(self.machine.send(self.flags("agree", flags)))

    def _free_cache(self, bucket: BucketState) -> None:
        if bucket.has_memory:
            bucket.has_memory = bucket.holds_valid = False
            self.machine.hold("cache", -bucket.plan.node_shard_bytes)

    def flags(self, name: str, count: int, *, across_islands: bool = True) -> Transfer:
        """A message of `count` bytes from every rank of the island, or of all islands, to every other."""
        inside, across = self.shape.local - 1, self.shape.ranks - self.shape.local
        sent: dict[Level, float] = {"local": inside * count, "node": across * count}
        if across_islands and not self.options.replicas_diverge:
            sent["island"] = (self.shape.islands - 1) * self.shape.ranks * count
        return Transfer(name=name, purpose="control", sent=sent)
