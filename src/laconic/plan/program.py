"""The programs of whole optimizer steps: forward, backward, the gradient norm, the optimizer, and syncs of islands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from laconic.codec import CODECS
from laconic.comm.traffic import Level
from laconic.config.sections import OptimizerConfig
from laconic.config.sync import SyncConfig
from laconic.islands.fragments import fragment_of
from laconic.plan.buckets import PlannedBucket, Shape, Sharding
from laconic.plan.codec_cost import decode_bytes, encode_bytes
from laconic.plan.engine import Engine, EngineOptions
from laconic.plan.machine import Machine, Reading, Transfer
from laconic.plan.model_trace import ModelTrace
from laconic.plan.optimizer_cost import OptimizerCost, Trained, optimizer_cost
from laconic.plan.sync_memory import sync_memory
from laconic.shard.policies import Cache


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What every strategy has to do in a step."""

    trace: ModelTrace
    micro_batches: int
    optimizer: OptimizerConfig
    sharding: Sharding
    """The precision and the blocks that `fully_shard` gets. Its wire is the strategy's."""


class Program(ABC):
    """The steps of one strategy on a machine."""

    inexact: str = ""
    """What the strategy trains otherwise than ZeRO-3, in words; empty if it trains the same."""

    @abstractmethod
    def step(self) -> None:
        """Run one optimizer step."""

    def read(self, machine: Machine) -> Reading:
        """Read a step after caches and optimizer states are warm."""
        for _ in range(2):
            self.step()
        with machine.reading() as reading:
            self.step()
        return reading


class Update:
    """The gradient norm and the optimizer's step, which follow backward."""

    def __init__(self, machine: Machine, cost: OptimizerCost, *, gradient_bytes: float, num_tensors: int) -> None:
        """`gradient_bytes` are those of this rank's gradients. `num_tensors` counts the norms that are reduced."""
        self._machine, self._cost = machine, cost
        self._gradient_bytes, self._num_tensors = gradient_bytes, num_tensors
        self._has_states = False

    def run(self, norms: Mapping[Level, float]) -> None:
        """Clip, and step. `norms` has the bytes that a rank sends on each level for the norms."""
        machine = self._machine
        machine.touch("norm", self._gradient_bytes)
        machine.wait(machine.send(Transfer(name="norm", purpose="control", sent=dict(norms))), "norm")
        machine.touch("clip", 2 * self._gradient_bytes)
        if not self._has_states:
            self._has_states = True
            machine.hold("optimizer", self._cost.state_bytes)
        with machine.holding("transfers", self._cost.transient_bytes):
            moves = Transfer(name="matrices", purpose="optimizer", sent=dict(self._cost.sent_bytes))
            job = machine.send(moves)
            machine.compute("optimizer", self._cost.phase)
            machine.wait(job, "matrices")


def norm_bytes(num_tensors: int, shape: Shape) -> dict[Level, float]:
    """The bytes that a rank sends to sum one fp32 number for each tensor, first inside the nodes, then across."""
    return all_reduce_bytes(4 * num_tensors, shape)


def all_reduce_bytes(nbytes: int, shape: Shape) -> dict[Level, float]:
    """The bytes that a rank sends to sum `nbytes`, first inside the nodes, then across: as a ring moves them."""
    sizes: dict[Level, int] = {"local": shape.local, "node": shape.nodes}
    return {level: 2 * (size - 1) * nbytes // size for level, size in sizes.items()}


class LaconicStep(Program):
    """`fully_shard` and an optimizer, as `laconic train` runs them."""

    def __init__(self, machine: Machine, work: StepWork, shape: Shape, options: EngineOptions) -> None:
        self._machine, self._work, self.shape = machine, work, shape
        self.engine = Engine(machine, work.trace, shape, options)
        trained = trained_buckets(self.engine)
        cost = optimizer_cost(work.optimizer, [each for _, each in trained], shape)
        self.num_trained = sum(bucket.num_parameters for bucket, _ in trained)
        self.gradient_bytes = sum(bucket.shard_bytes for bucket, _ in trained)
        """The bytes of this rank's gradients."""
        self._update = Update(machine, cost, num_tensors=self.num_trained, gradient_bytes=self.gradient_bytes)

    def step(self) -> None:
        """See `Program.step`."""
        self.engine.step(self._work.micro_batches)
        self._update.run(norm_bytes(self.num_trained, self.shape))
        self.engine.update()


def trained_buckets(engine: Engine) -> list[tuple[PlannedBucket, Trained]]:
    """The buckets that train, and what an optimizer must know of them."""
    root = len(engine.units) - 1
    return [
        (bucket.plan, Trained(layout=bucket.plan.layout, itemsize=bucket.plan.dtype.itemsize, is_hidden=index != root))
        for index, unit in enumerate(engine.units)
        for bucket in unit.buckets
        if not bucket.plan.is_frozen
    ]


class LocalStepsProgram(Program):
    """Islands that train on their own, and average their pseudo-gradients now and then: `laconic.LocalSteps`."""

    def __init__(self, machine: Machine, work: StepWork, shape: Shape, cache: Cache, sync: SyncConfig) -> None:
        self._machine, self._sync, self.shape = machine, sync, shape
        options = EngineOptions(sharding=work.sharding, cache=cache, replicas_diverge=True)
        self.inner = LaconicStep(machine, work, replace(shape, islands=shape.islands), options)
        self.inexact = (
            f"islands agree every {sync.every} steps" + (f" and train {sync.slices} slices" if sync.slices > 1 else "")
        )  # fmt: skip
        self._fragments = _fragment_numels(self.inner.engine, sync)
        memory = sync_memory(sync, shape.islands)
        self._working_bytes = memory.working * max(map(_mean, self._fragments))
        machine.host_bytes += memory.resting * sum(map(_mean, self._fragments))
        if machine.device_type != "cpu":
            machine.host_bytes += self._working_bytes

    @property
    def interval(self) -> int:
        """The steps between two syncs."""
        return self._sync.every // self._sync.fragments

    def step(self) -> None:
        """See `Program.step`: a step without a sync."""
        self.inner.step()

    def read(self, machine: Machine) -> Reading:
        """Read a step, and add its share of a sync. Of an exchange that other steps hide, only the rest takes time.

        On a CPU a sync works in the device's memory: beside steps if it overlaps them, and else beside gradients.
        """
        on_cpu = self._working_bytes if machine.device_type == "cpu" else 0.0
        with machine.holding("transfers", on_cpu if self._sync.overlap else 0.0):
            reading = super().read(machine)
        with machine.holding("gradients", self.inner.gradient_bytes), machine.holding("transfers", on_cpu):
            syncs = [self._read_sync(machine, numels, reading.seconds) for numels in self._fragments]
        share = 1.0 / (self.interval * len(syncs))
        for sync in syncs:
            add_sync(reading, sync, share)
        return reading

    def _read_sync(self, machine: Machine, numels: Sequence[int], step_s: float) -> Reading:
        islands, codec = self.shape.islands, CODECS[self._sync.codec]
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
            hidden_s = self._sync.overlap * step_s
            machine.wait(exchange, "islands")
            machine.now_s = max(began_s, machine.now_s - hidden_s)
            machine.touch("outer step", host * 40 * numel)
            report = Transfer(name="report", purpose="control", sent=all_reduce_bytes(5 * 4, self.shape))
            machine.wait(machine.send(report))
        return reading


def add_sync(reading: Reading, sync: Reading, share: float) -> None:
    """Add a share of a sync to the reading of a step: its seconds, bytes, waits and work. The higher peak counts."""
    reading.seconds += share * sync.seconds
    if sync.peak_bytes > reading.peak_bytes:
        reading.peak = sync.peak
    for counter, more in (
        (reading.sent_bytes, sync.sent_bytes), (reading.waits_s, sync.waits_s), (reading.busy_s, sync.busy_s),
    ):  # fmt: skip
        for key, value in more.items():
            counter[key] += share * value  # type: ignore[index,assignment]


def _host_factor(machine: Machine) -> float:
    """How much slower the host's memory is for each rank than the device's."""
    rate = machine.cluster.host_memory_bytes_per_s
    if rate is None:
        return 1.0
    return max(1.0, machine.cluster.device_memory_bytes_per_s * machine.cluster.ranks_per_node / rate)


def _fragment_numels(engine: Engine, sync: SyncConfig) -> list[list[int]]:
    """For each fragment, the elements that each rank of an island has of it."""
    names: list[str] = []
    slots: list[tuple[PlannedBucket, int]] = []
    for unit in engine.units:
        prefix = "" if unit is engine.units[-1] else f"{unit.name}."
        for bucket in unit.buckets:
            if bucket.plan.is_frozen and not bucket.plan.is_slice:
                continue
            for index, slot in enumerate(bucket.plan.layout.slots):
                names.append(f"{prefix}{slot.name}")
                slots.append((bucket.plan, index))
    assigned = fragment_of(names, sync.fragments, sync.pattern)
    ranks = range(engine.shape.ranks)
    ranks = range(0, len(ranks), max(1, len(ranks) // 64))
    found = [[0] * len(ranks) for _ in range(sync.fragments)]
    for name, (plan, index) in zip(names, slots, strict=True):
        for place, shard in enumerate(ranks):
            extent = plan.layout.extent(index, shard)
            found[assigned[name]][place] += extent.numel if extent else 0
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
