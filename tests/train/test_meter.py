"""The meter of training steps: its figures on the host and on an accelerator, and the waits of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Traffic
from laconic.rehearse import Machine
from laconic.rehearse.modes import accelerator
from laconic.rehearse.tape import Record, Wait
from laconic.shard.ledger import Ledger
from laconic.strategies.stepper import StepResult
from laconic.train import meter as meters
from laconic.train.loggers import RunRecorder
from laconic.train.meter import StepMeter
from laconic.train.records import StepRecord

NUM_STEPS = 3
ALONE = RankInfo(rank=0, world_size=1, local_rank=0, num_local=1, num_nodes=1)


class Stepper:
    """Multiplies on the device; each step sends 7 bytes more than the last one."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.ones(8, 8, device=device)
        self.counters, self.steps = Traffic(), 0

    def step(self) -> StepResult:
        """Take a step."""
        self.steps += 1
        self.x = self.x @ self.x
        self.counters.count("node", "gradients", sent_bytes=7 * self.steps, received_bytes=1)
        return StepResult(loss=1.0, grad_norm=1.0)

    def traffic(self, before: Any = None) -> Any:
        """See `laconic.strategies.stepper.Stepper.traffic`."""
        return self.counters.snapshot()

    def placements(self) -> dict[str, Any]:
        """None."""
        return {}

    def memory(self) -> Ledger:
        """The step's number, as bytes."""
        return Ledger(device_bytes=self.steps)


def measured(device: torch.device) -> Iterator[StepRecord]:
    stepper: Any = Stepper(device)
    meter = StepMeter(stepper, ALONE, device)
    for step in range(1, NUM_STEPS + 1):
        meter.fetch()
        meter.start()
        yield meter.stop(step, 0.1, stepper.step())


def host_waits(machine: Machine) -> list[Wait]:
    return [
        entry for entry in machine.tape.entries if isinstance(entry, Wait) and entry.timeline in machine.tape.threads
    ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 11)
    with accelerator() as found:
        yield found


def test_no_step_waits_for_the_device(machine: Machine) -> None:
    """Each step has two events on the stream that computes, and its product lies between them."""
    with machine.recording():
        records = list(measured(torch.device("cuda", 0)))
        assert host_waits(machine) == []
        entries = [entry for entry in machine.tape.entries if entry.timeline == machine.compute.timeline]
        kept = [each for each in entries if isinstance(each, Record) or getattr(each, "name", "") == "aten::mm"]
        assert [isinstance(each, Record) for each in kept] == [True, False, True] * NUM_STEPS
        assert [record.step_s for record in records] == [0.0] * NUM_STEPS
        events = [each.event for each in kept if isinstance(each, Record)]
        assert [wait.event for wait in host_waits(machine)] == events[1::2], "a record waits for its own last event"
    assert [record.sums["node/gradients"] for record in records] == [7, 14, 21]
    assert [record.peaks["device_bytes"] for record in records] == [1, 2, 3]
    assert [record.peaks["allocated_peak_bytes"] for record in records] == [11] * NUM_STEPS


def test_the_host_measures_the_time_of_cpu_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    records = list(measured(torch.device("cpu")))
    assert [(record.data_s, record.step_s) for record in records] == [(1.0, 1.0)] * NUM_STEPS
    assert [record.step_s for record in records] == [1.0] * NUM_STEPS, "also when it is read again, and later"
    assert [record.peaks["allocated_peak_bytes"] for record in records] == [None] * NUM_STEPS


def test_seconds_are_read_when_records_are_combined_and_not_before(machine: Machine) -> None:
    """A record waits in the recorder with its events; `flush` reads all, the last one's too."""
    seconds: list[float] = []

    def reduce(records: Sequence[StepRecord]) -> list[Any]:
        seconds.extend(record.step_s for record in records)
        return []

    recorder = RunRecorder([], reduce, lambda action: action())
    with machine.recording():
        for record in measured(torch.device("cuda", 0)):
            recorder.add(record)
        assert host_waits(machine) == []
        recorder.flush()
    assert len(seconds) == NUM_STEPS
    assert recorder.num_pending == 0
