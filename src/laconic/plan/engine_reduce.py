"""The reductions of gradients in the engine's program, named after those of shard/reduce.py, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from laconic.plan.buckets import PlannedBucket, Shape
from laconic.plan.codec_cost import decode_bytes, encode_bytes
from laconic.plan.machine import Job, Machine, Transfer


@dataclass(eq=False)
class BucketState:
    """One bucket in the course of the program."""

    plan: PlannedBucket
    name: str
    is_cached: bool
    """True if there is a cache for it."""
    is_in_slab: bool
    is_direct: bool
    """True if a gather across nodes lands in the cache itself."""
    holds_valid: bool = False
    """True if the cache has the node shard of the present weights."""
    has_memory: bool = False
    """True if a cache on the device is allocated."""
    is_full_held: bool = False
    is_dropped: bool = False
    """True if a frozen shard lives in the cache alone."""
    has_copy: bool = False
    """True once differences may cross."""
    crossing: Job | None = None
    message_bytes: float = 0.0
    loaded: Job | None = None
    local: Job | None = None
    stored: Job | None = None
    is_crossing: bool = False
    comes_from_cache: bool = False
    partial_bytes: float = 0.0
    """Sums of earlier micro-batches that have not crossed."""
    partial_shard_bytes: float = 0.0
    gradient_held: bool = False
    has_grad: bool = False

    def encode(self, machine: Machine, codec: str, numel: int, *, rotates: bool = False) -> None:
        """Code values for a message."""
        nbytes = encode_bytes(codec, numel, rotates=rotates, device_type=machine.device_type)
        machine.touch(f"encode {self.name}", nbytes)

    def decode(self, machine: Machine, codec: str, numel: int, *, rotates: bool = False) -> None:
        """Decode messages, and add them up."""
        nbytes = decode_bytes(codec, numel, rotates=rotates, device_type=machine.device_type)
        machine.touch(f"decode {self.name}", nbytes)


class Stage(Enum):
    """The progress of a reduction: the level whose sum is under way."""

    LOCAL = auto()
    NODE = auto()
    ISLAND = auto()
    DONE = auto()


@dataclass(eq=False)
class _Reduction:
    """The reduction of one bucket's gradients, and the memory that it holds."""

    bucket: BucketState
    full_bytes: float
    """The bucket's gradients, as long as they are needed."""
    stage: Stage = Stage.LOCAL
    job: Job | None = None
    landing_bytes: float = 0.0
    """What arrives."""
    node_bytes: float = 0.0
    """The sum inside the node, while it crosses."""
    shard_bytes: float = 0.0


class Reductions:
    """The reductions in flight, oldest first: at most one on each level."""

    def __init__(self, machine: Machine, shape: Shape, *, sums_replicas: bool) -> None:
        """Reduce on a machine. With `sums_replicas`, islands are replicas, which sum in every step."""
        self._machine, self._shape = machine, shape
        self._sums_islands = sums_replicas and shape.islands > 1
        self._is_cpu = machine.device_type == "cpu"
        self._in_flight: list[_Reduction] = []
        self._reduced: list[BucketState] = []

    def has(self, bucket: BucketState) -> bool:
        """Whether a reduction of the bucket is in flight."""
        return any(each.bucket is bucket for each in self._in_flight)

    def add(self, bucket: BucketState, full_bytes: float, *, syncs: bool) -> None:
        """Begin to sum gradients inside the node; with 0 bytes, only partial sums of earlier micro-batches go on."""
        local, machine = self._shape.local, self._machine
        reduction = _Reduction(bucket, full_bytes)
        if full_bytes and local > 1:
            part_bytes = full_bytes / local
            reduction.landing_bytes = part_bytes * (local - 1 if self._is_cpu else 1)
            machine.hold("transfers", reduction.landing_bytes)
            sent_bytes = (local - 1) * part_bytes
            name = f"reduce {bucket.name} inside"
            reduction.job = machine.send(Transfer(name=name, purpose="gradients", sent={"local": sent_bytes}))
        self._advance_all(syncs=syncs)
        self._finish_local(reduction, syncs=syncs)
        self._in_flight.append(reduction)

    def finish(self, *, syncs: bool) -> list[BucketState]:
        """Finish all. Returns the buckets whose parameters got their first gradient of the step."""
        while self._in_flight:
            self._advance_all(syncs=syncs)
        reduced, self._reduced = self._reduced, []
        return reduced

    def _advance_all(self, *, syncs: bool) -> None:
        """Move each reduction in flight one level on, the youngest first."""
        for reduction in reversed(self._in_flight):
            if reduction.stage is Stage.NODE:
                self._finish_nodes(reduction)
            else:
                self._finish_islands(reduction)
        self._in_flight = [reduction for reduction in self._in_flight if reduction.stage is not Stage.DONE]

    def _finish_local(self, reduction: _Reduction, *, syncs: bool) -> None:
        """Finish the sum inside the node and, at the end of a step, begin that across nodes."""
        bucket, machine, local = reduction.bucket, self._machine, self._shape.local
        part_bytes = bucket.plan.gradient_bytes / local
        self._block(reduction, f"reduce {bucket.name} inside")
        if reduction.full_bytes and local > 1:
            machine.touch(f"sum {bucket.name}", (local + 1) * part_bytes)
            machine.hold("transfers", part_bytes - reduction.landing_bytes)
        if reduction.full_bytes and local == 1 and not bucket.partial_bytes:
            machine.hold("gradients", -part_bytes)  # the gradients' own memory goes on as the sum
            machine.hold("transfers", part_bytes)
        elif reduction.full_bytes:
            machine.hold("gradients", -reduction.full_bytes)
        total_bytes = part_bytes
        if bucket.partial_bytes and reduction.full_bytes:
            machine.touch(f"add {bucket.name}", 3 * part_bytes)
            if local > 1:
                machine.hold("transfers", -part_bytes)
        elif not bucket.partial_bytes and not reduction.full_bytes:
            total_bytes = 0.0
        bucket.partial_bytes = 0.0 if syncs else total_bytes
        reduction.landing_bytes = reduction.full_bytes = 0.0
        if syncs:
            reduction.node_bytes = total_bytes
            reduction.job = self._send_across(reduction)
        reduction.stage = Stage.NODE

    def _send_across(self, reduction: _Reduction) -> Job | None:
        bucket, nodes, machine = reduction.bucket, self._shape.nodes, self._machine
        if nodes == 1:
            return reduction.job
        coded_bytes, wire = bucket.plan.gradient_payload_bytes, bucket.plan.wire
        if coded_bytes is not None:
            numel = bucket.plan.layout.shard_numel * (nodes - 1)
            bucket.encode(machine, wire.gradients, numel, rotates=wire.rotates_gradients)
            each_bytes, reduction.landing_bytes = coded_bytes, 2 * nodes * coded_bytes
        else:
            each_bytes = float(bucket.plan.gradient_shard_bytes)
            reduction.landing_bytes = each_bytes * (nodes - 1 if self._is_cpu else 1)
        machine.hold("transfers", reduction.landing_bytes)
        sent_bytes = (nodes - 1) * each_bytes
        transfer = Transfer(name=f"reduce {bucket.name}", purpose="gradients", sent={"node": sent_bytes})
        return self._send(transfer, reduction)

    def _finish_nodes(self, reduction: _Reduction) -> None:
        """Finish the sum across nodes, if it has begun, and begin that over the islands."""
        bucket, machine, nodes = reduction.bucket, self._machine, self._shape.nodes
        if not reduction.node_bytes:
            reduction.stage = Stage.DONE
            return
        self._block(reduction, f"reduce {bucket.name}")
        reduction.shard_bytes = float(bucket.plan.gradient_shard_bytes)
        if nodes > 1:
            wire = bucket.plan.wire
            if wire.gradients != "exact":
                numel = bucket.plan.layout.shard_numel * nodes
                bucket.decode(machine, wire.gradients, numel, rotates=wire.rotates_gradients)
            else:
                machine.touch(f"sum {bucket.name}", (nodes + 1) * reduction.shard_bytes)
            machine.hold("transfers", reduction.shard_bytes - reduction.landing_bytes)
            machine.hold("transfers", -reduction.node_bytes)
        reduction.node_bytes = reduction.landing_bytes = 0.0
        if not self._sums_islands:
            self._put_into_grad(reduction)
            return
        reduction.job = self._send_to_islands(reduction)
        reduction.stage = Stage.ISLAND

    def _send_to_islands(self, reduction: _Reduction) -> Job | None:
        bucket, islands = reduction.bucket, self._shape.islands
        coded = bucket.plan.replica_payload_bytes()
        sent_bytes: float = 2 * (islands - 1) * bucket.plan.gradient_shard_bytes // islands
        if coded is not None:
            sent_bytes = (islands - 1) * sum(coded)
        name = f"reduce {bucket.name} over islands"
        return self._send(Transfer(name=name, purpose="gradients", sent={"island": sent_bytes}), reduction)

    def _finish_islands(self, reduction: _Reduction) -> None:
        self._block(reduction, f"reduce {reduction.bucket.name} over islands")
        self._put_into_grad(reduction)

    def _block(self, reduction: _Reduction, name: str) -> None:
        """Wait for a transfer, as the host does with Gloo. On an accelerator the lane goes on by itself."""
        if self._is_cpu:
            self._machine.wait(reduction.job, name)

    def _send(self, transfer: Transfer, reduction: _Reduction) -> Job | None:
        """Begin a transfer behind the one before. One that sends nothing leaves that as it is."""
        return self._machine.send(transfer, reduction.job) or reduction.job

    def _put_into_grad(self, reduction: _Reduction) -> None:
        """Divide the sum and let it become `.grad`."""
        bucket, machine = reduction.bucket, self._machine
        machine.wait(reduction.job, f"reduce {bucket.name}")
        machine.touch(f"divide {bucket.name}", 2 * reduction.shard_bytes)
        machine.hold("transfers", -reduction.shard_bytes)
        if not bucket.has_grad:
            bucket.has_grad = True
            machine.hold("gradients", bucket.plan.shard_bytes)
            self._reduced.append(bucket)
        reduction.stage = Stage.DONE
