"""The programs of whole optimizer steps: forward, backward, the gradient norm, the optimizer, and syncs of islands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from laconic.comm.traffic import Level
from laconic.config import Config, OptimizerConfig
from laconic.plan.buckets import Sharding
from laconic.plan.machine import PlanTransfer, Reading, Simulator
from laconic.plan.model_trace import ModelTrace
from laconic.plan.optimizer_cost import OptimizerCost
from laconic.plan.rehearsal import Rehearsals


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What every strategy has to do in a step."""

    job: Config
    """The job under the strategy."""
    trace: ModelTrace
    rehearsals: Rehearsals
    sharding: Sharding
    """The precision and the blocks that `fully_shard` gets. Its wire is the strategy's."""

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a rank in a step."""
        return self.job.train.accumulation

    @property
    def optimizer(self) -> OptimizerConfig:
        """The section of the job with the optimizer."""
        return self.job.optimizer


class Program(ABC):
    """The steps of one strategy on a machine."""

    inexact: str = ""
    """What the strategy trains otherwise than ZeRO-3, in words; empty if it trains the same."""

    @abstractmethod
    def read(self, machine: Simulator) -> Reading:
        """Read a step after caches and optimizer states are warm."""


class WrittenProgram(Program):
    """A program that is written by hand, step by step."""

    @abstractmethod
    def step(self) -> None:
        """Run one optimizer step."""

    def read(self, machine: Simulator) -> Reading:
        """See `Program.read`."""
        for _ in range(2):
            self.step()
        with machine.reading() as reading:
            self.step()
        return reading


class UpdateCost:
    """The gradient norm and the optimizer's step, which follow backward."""

    def __init__(self, machine: Simulator, cost: OptimizerCost, *, gradient_bytes: float) -> None:
        """`gradient_bytes` are those of this rank's gradients."""
        self._machine, self._cost = machine, cost
        self._gradient_bytes = gradient_bytes
        self._has_states = False

    def run(self, norms: Mapping[Level, float]) -> None:
        """Clip, and step. `norms` has the bytes that a rank sends on each level for the norms."""
        machine = self._machine
        machine.touch("norm", self._gradient_bytes)
        machine.wait(machine.send(PlanTransfer(name="norm", purpose="control", sent=dict(norms))), "norm")
        machine.touch("clip", 2 * self._gradient_bytes)
        if not self._has_states:
            self._has_states = True
            machine.hold("optimizer", self._cost.state_bytes)
        with machine.holding("transfers", self._cost.transient_bytes):
            machine.compute("optimizer", self._cost.phase)


def add_share(reading: Reading, other: Reading, share: float) -> None:
    """Add a share of another reading: its seconds, bytes, waits and work. The higher peak counts."""
    reading.seconds += share * other.seconds
    for name in ("sent_bytes", "waits_s", "busy_s"):
        counter = getattr(reading, name)
        for key, value in getattr(other, name).items():
            counter[key] += share * value
    if other.peak_bytes > reading.peak_bytes:
        reading.peak = other.peak
