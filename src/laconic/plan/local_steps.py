"""The program of islands: a rehearsed step, and a sync now and then, which is written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.codec import CODECS
from laconic.config.sections import SyncConfig
from laconic.islands.fragments import fragment_of
from laconic.plan.buckets import PlannedBucket, Shape, plan_buckets
from laconic.plan.codec_cost import decode_bytes, encode_bytes
from laconic.plan.machine import Machine, Reading, Transfer
from laconic.plan.program import Program, StepWork, add_sync, all_reduce_bytes
from laconic.plan.rehearsed import RehearsedStep
from laconic.plan.sync_memory import sync_memory


class LocalStepsProgram(Program):
    """Islands that train on their own, and average their pseudo-gradients now and then: `laconic.LocalSteps`."""

    def __init__(self, machine: Machine, work: StepWork, shape: Shape) -> None:
        """Rehearse a step without a sync.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        self._sync, self.shape = work.job.sync, shape
        sync = self._sync
        self.inner = RehearsedStep(machine, work, shape)
        slices = f" and train {sync.slices} slices" if sync.slices > 1 else ""
        self.inexact = f"islands agree every {sync.policy.schedule.every} steps{slices}"
        buckets = [
            ("" if unit is work.trace.units[-1] else f"{unit.name}.", bucket)
            for unit in work.trace.units
            for bucket in plan_buckets(unit, shape, work.sharding)
        ]
        self._gradient_bytes = sum(bucket.shard_bytes for _, bucket in buckets if not bucket.is_frozen)
        self._fragments = _fragment_numels(buckets, shape, sync)
        memory = sync_memory(sync, shape.islands)
        self._working_bytes = memory.working * max(map(_mean, self._fragments))
        machine.host_bytes += memory.resting * sum(map(_mean, self._fragments))
        if machine.device_type != "cpu":
            machine.host_bytes += self._working_bytes

    @property
    def interval(self) -> int:
        """The steps between two syncs."""
        return self._sync.policy.schedule.interval

    def read(self, machine: Machine) -> Reading:
        """Read a step, and add its share of a sync. Of an exchange that other steps hide, only the rest takes time.

        On a CPU a sync works in the device's memory: beside steps if it overlaps them, and else beside gradients.
        """
        on_cpu = self._working_bytes if machine.device_type == "cpu" else 0.0
        with machine.holding("transfers", on_cpu if self._sync.policy.schedule.overlap else 0.0):
            reading = self.inner.read(machine)
        with machine.holding("gradients", self._gradient_bytes), machine.holding("transfers", on_cpu):
            syncs = [self._read_sync(machine, numels, reading.seconds) for numels in self._fragments]
        share = 1.0 / (self.interval * len(syncs))
        for sync in syncs:
            add_sync(reading, sync, share)
        return reading

    def _read_sync(self, machine: Machine, numels: Sequence[int], step_s: float) -> Reading:
        islands, codec = self.shape.islands, CODECS[self._sync.policy.coding.codec]
        numel = _mean(numels)
        if codec.is_sparse:
            sent = _mean([(islands - 1) * codec.payload_bytes(each) for each in numels])
        else:
            sent = _mean([2 * (islands - 1) * codec.payload_bytes(-(-each // islands)) for each in numels])
        with machine.reading() as reading:
            host = 1.0 if machine.device_type == "cpu" else _host_factor(machine)
            machine.touch("pseudo-gradient", host * 16 * numel)
            agree = Transfer(name="agree", purpose="control", sent=all_reduce_bytes(4, self.shape))
            machine.wait(machine.send(agree))
            coding = 2 * encode_bytes(codec.name, int(numel), rotates=False, device_type="cpu") / islands
            coding += decode_bytes(codec.name, int(numel), rotates=False, device_type="cpu") * (1 + 1 / islands)
            began_s = machine.now_s
            machine.touch("code", host * coding)
            exchange = machine.send(Transfer(name="islands", purpose="outer", sent={"island": sent}, hops=2))
            hidden_s = self._sync.policy.schedule.overlap * step_s
            machine.wait(exchange, "islands")
            machine.now_s = max(began_s, machine.now_s - hidden_s)
            machine.touch("outer step", host * 40 * numel)
            report = Transfer(name="report", purpose="control", sent=all_reduce_bytes(5 * 4, self.shape))
            machine.wait(machine.send(report))
        return reading


def _host_factor(machine: Machine) -> float:
    """How much slower the host's memory is for each rank than the device's."""
    rate = machine.cluster.host_memory_bytes_per_s
    if rate is None:
        return 1.0
    return max(1.0, machine.cluster.device_memory_bytes_per_s * machine.cluster.ranks_per_node / rate)


def _fragment_numels(buckets: Sequence[tuple[str, PlannedBucket]], shape: Shape, sync: SyncConfig) -> list[list[int]]:
    """For each fragment, the elements that each rank of an island has of it. Buckets come with their unit's prefix."""
    synced = [(prefix, bucket) for prefix, bucket in buckets if bucket.is_slice or not bucket.is_frozen]
    names = [f"{prefix}{slot.name}" for prefix, bucket in synced for slot in bucket.layout.slots]
    slots = [(bucket, index) for _, bucket in synced for index in range(len(bucket.layout.slots))]
    assigned = fragment_of(names, sync.policy.schedule.fragments, sync.policy.schedule.pattern)
    ranks = range(shape.ranks)
    ranks = range(0, len(ranks), max(1, len(ranks) // 64))
    found = [[0] * len(ranks) for _ in range(sync.policy.schedule.fragments)]
    for name, (plan, index) in zip(names, slots, strict=True):
        for place, shard in enumerate(ranks):
            extent = plan.layout.extent(index, shard)
            found[assigned[name]][place] += extent.numel if extent else 0
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
