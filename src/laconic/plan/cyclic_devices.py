"""The devices of the cyclic schedule, all at once, each with the instructions that the runtime executes.

Devices differ, so none can stand for all, as [Note: One program, three readings] has it. Here every device has a clock
and runs its own program (cyclic/program.py) until it needs a message that has not arrived. A reading is that
of some batches of all devices in the steady state. The messages are those of [Note: Messages of a batch].

[Note: Batches that differ]
With shared stages, micro-batches take turns on the devices of a stage, so a batch may send other bytes inside nodes and
between them than the batch before. N - j devices take turns at stage j, and N micro-batches are a batch. So everything
repeats after a number of batches whose micro-batches every N - j divides. A reading covers as many batches, up to a
limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from laconic.comm.traffic import Level, Purpose
from laconic.cyclic.links import NUMBER_BYTES, PURPOSES
from laconic.cyclic.program import program
from laconic.cyclic.schedule import Compute, Instruction, Message, Receive, Schedule, Send, Update
from laconic.plan.cyclic_stages import Stages
from laconic.plan.machine import PlanLane, Reading, Simulator

_FIRST = 2
"""The first batch of the steady state: earlier ones have no messages of batches before them."""
_LEAST, _MOST = 3, 12
"""The batches of a reading. Above the most, bytes are means over some of the batches of a period."""


def read_steady_state(machine: Simulator, schedule: Schedule, stages: Stages, *, pass_after: int) -> Reading:
    """Read one batch of the steady state, as a mean over devices: its seconds, bytes, waits and compute.

    Args:
        machine: its cluster; rank i of the cluster is device i of the schedule.
        schedule: the instructions of every device.
        stages: what the instructions take.
        pass_after: the forwards and backwards of a batch that a worker runs before the next worker may begin.
    """
    num_batches = _num_batches(schedule)
    run = _Run(machine, schedule, stages, pass_after, _FIRST + num_batches)
    ends_s = run.finish()
    share = 1.0 / (schedule.num_devices * num_batches)
    reading = Reading(seconds=(ends_s[-1] - ends_s[_FIRST - 1]) / num_batches)
    for key, nbytes in run.sent_bytes.items():
        reading.sent_bytes[key] += nbytes * share  # type: ignore[assignment]
    for lane, seconds in run.waits_s.items():
        reading.waits_s[lane] += seconds * share  # type: ignore[assignment]
    busy_s = sum(stage.forward_s + stage.backward_s for stage in stages.stages)  # of one worker
    reading.busy_s[PlanLane.COMPUTE] = busy_s * schedule.num_stages / schedule.num_devices  # type: ignore[assignment]
    return reading


def _num_batches(schedule: Schedule) -> int:
    """The batches of a reading: see [Note: Batches that differ]."""
    if schedule.states != "shared":
        return _LEAST
    n = schedule.num_stages
    period = math.lcm(*(turns // math.gcd(turns, n) for turns in range(1, n + 1)))
    return min(_MOST, period * -(-_LEAST // period))


class _Run:
    """All devices in some batches, each with a clock of its own."""

    def __init__(
        self, machine: Simulator, schedule: Schedule, stages: Stages, pass_after: int, num_batches: int
    ) -> None:
        self._machine, self._schedule, self._stages = machine, schedule, stages
        self._pass_after, self._num_batches = pass_after, num_batches
        devices = range(schedule.num_devices)
        self._now_s = dict.fromkeys(devices, 0.0)
        self._ready_s: dict[int | str, float] = {}
        """When each sender's network is free: that of a node between nodes, that of a rank inside."""
        self._arrivals_s: dict[tuple[object, int], tuple[float, PlanLane]] = {}
        self._batons_s: dict[tuple[int, int], tuple[float, PlanLane]] = {}
        self._ends_s = {device: [0.0] * num_batches for device in devices}
        self.sent_bytes: Counter[tuple[Level, Purpose]] = Counter()
        self.waits_s: Counter[PlanLane] = Counter()
        self._pending = {device: self._steps(device) for device in devices}

    def finish(self) -> list[float]:
        """Run all devices to the end. Returns when the last of them has finished each batch."""
        while self._pending:
            moved = False
            for device in list(self._pending):
                for is_blocked in self._pending[device]:
                    if is_blocked:
                        break
                    moved = True
                else:
                    del self._pending[device]
                    moved = True
            assert moved or not self._pending, "the schedule never waits for a message that is not sent"
        return [max(ends[batch] for ends in self._ends_s.values()) for batch in range(self._num_batches)]

    def _steps(self, device: int) -> Iterator[bool]:
        """Run a device's instructions; yield True while one has to wait for a message that has not been sent."""
        schedule = self._schedule
        for batch in range(self._num_batches):
            done = 0
            self._pass_baton(device, batch, done)
            for instruction in program(schedule, device, batch):
                if isinstance(instruction, Compute) and done == 0 and device > 0 and schedule.has_device_per_worker:
                    while (device, batch) not in self._batons_s:
                        yield True
                    self._wait(device, *self._batons_s[device, batch], batch)
                if isinstance(instruction, Receive):
                    key = instruction.message.key, device
                    while key not in self._arrivals_s:
                        yield True
                    self._receive(instruction.message, device, batch)
                else:
                    self._do(instruction, device, batch)
                if isinstance(instruction, Compute):
                    done += 1
                    self._pass_baton(device, batch, done)
                yield False
            self._ends_s[device][batch] = self._now_s[device]

    def _do(self, instruction: Instruction, device: int, batch: int) -> None:
        stages = self._stages.stages
        if isinstance(instruction, Compute):
            op = instruction.op
            stage = stages[op.stage]
            self._now_s[device] += stage.forward_s if op.is_forward else stage.backward_s + self._pass_s(op.stage, 3)
        elif isinstance(instruction, Update):
            self._now_s[device] += stages[instruction.stage].update_s
        elif isinstance(instruction, Send):
            message = instruction.message
            nbytes, purpose = self._stages.message_bytes(message), PURPOSES[message.kind]
            arrival = self._send(device, message.target, nbytes, purpose, batch)
            self._arrivals_s[message.key, message.target] = arrival

    def _receive(self, message: Message, device: int, batch: int) -> None:
        self._wait(device, *self._arrivals_s[message.key, device], batch)
        if message.source != device:
            self._lose_compute(device, self._level(message.source, device), self._stages.message_bytes(message))
        if message.kind == "gradient":
            self._now_s[device] += self._pass_s(message.stage, 3)  # the sum is read and written, the gradient read
        elif PURPOSES[message.kind] == "weights" and self._schedule.states == "sharded":
            self._now_s[device] += self._pass_s(message.stage, 2)  # into the home

    def _pass_s(self, stage: int, passes: int) -> float:
        """The seconds to read or write a stage's message some times."""
        return passes * self._stages.stages[stage].message_bytes / self._machine.cluster.device_memory_bytes_per_s

    def _lose_compute(self, device: int, level: Level, nbytes: float) -> None:
        """Let one side of a message lose half of what a rank loses to sending and receiving as much."""
        machine = self._machine
        latency_s, bytes_s = machine.cluster.latency_s(level), machine.bytes_s(level, nbytes)
        self._now_s[device] += machine.exposed_s(level, bytes_s=bytes_s, latency_s=latency_s) / 2

    def _level(self, source: int, target: int) -> Level:
        local = self._machine.cluster.ranks_per_node
        return "local" if source // local == target // local else "node"

    def _pass_baton(self, device: int, batch: int, done: int) -> None:
        following = device + 1
        has_next = self._schedule.has_device_per_worker and following < self._schedule.num_devices
        if has_next and done == self._pass_after:
            self._batons_s[following, batch] = self._send(device, following, NUMBER_BYTES, "control", batch)

    def _send(self, source: int, target: int, nbytes: float, purpose: Purpose, batch: int) -> tuple[float, PlanLane]:
        now_s = self._now_s[source]
        if source == target:
            return now_s, PlanLane.COMPUTE
        cluster, level = self._machine.cluster, self._level(source, target)
        if batch >= _FIRST:
            self.sent_bytes[level, purpose] += nbytes  # type: ignore[assignment]
        link = source if level == "local" else f"node {source // cluster.ranks_per_node}"
        begin_s = max(now_s, self._ready_s.get(link, 0.0))
        self._ready_s[link] = begin_s + nbytes / cluster.bytes_per_s(level)
        self._lose_compute(source, level, nbytes)
        lane = PlanLane.LOCAL if level == "local" else PlanLane.WIRE
        return self._ready_s[link] + cluster.latency_s(level), lane

    def _wait(self, device: int, arrival_s: float, lane: PlanLane, batch: int) -> None:
        waited_s = arrival_s - self._now_s[device]
        if waited_s > 0:
            if batch >= _FIRST:
                self.waits_s[lane] += waited_s  # type: ignore[assignment]
            self._now_s[device] = arrival_s
