"""The programs of whole optimizer steps, and what they have to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from laconic.config import Config
from laconic.plan.machine import Reading, Simulator
from laconic.plan.model_trace import ModelTrace, trace_job
from laconic.plan.rehearsal import Rehearsals
from laconic.shard.policies import Placement


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ranks that share a model: islands of nodes of local ranks."""

    nodes: int
    """The nodes of one island."""
    local: int
    """The ranks of one node."""
    islands: int = 1

    @property
    def ranks(self) -> int:
        """The ranks of one island."""
        return self.nodes * self.local


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What every strategy has to do in a step."""

    job: Config
    """The job under the strategy."""
    trace: ModelTrace
    rehearsals: Rehearsals
    placements: Mapping[str, Placement] | None = None
    """Where units rest, by their names; None: as the job's cache says."""


class Program(ABC):
    """The steps of one strategy on a machine."""

    inexact: str = ""
    """What the strategy trains otherwise than ZeRO-3, in words; empty if it trains the same."""
    notes: tuple[str, ...] = ()
    """Notes for readers of its figures."""

    @abstractmethod
    def read(self, machine: Simulator) -> Reading:
        """Read a step after caches and optimizer states are warm."""


def add_share(reading: Reading, other: Reading, share: float) -> None:
    """Add a share of another reading: its seconds, bytes, waits and work. The higher peak counts."""
    reading.seconds += share * other.seconds
    for name in ("sent_bytes", "waits_s", "busy_s"):
        counter = getattr(reading, name)
        for key, value in getattr(other, name).items():
            counter[key] += share * value
    if other.peak_bytes > reading.peak_bytes:
        reading.peak = other.peak


def work_of(
    config: Config, *, device_type: str, trace: ModelTrace | None = None, rehearsals: Rehearsals | None = None
) -> StepWork:
    """The work of a job in every step. A trace and rehearsals of the same model and batch may be given.

    Raises:
        JobError: the model cannot be built.
        TraceError: the model cannot be traced.
    """
    return StepWork(
        trace=trace or trace_job(config, device_type=device_type),
        job=config,
        rehearsals=rehearsals or Rehearsals(),
    )
