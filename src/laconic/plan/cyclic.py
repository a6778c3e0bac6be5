"""The program of the cyclic schedule: the runtime itself, rehearsed on phantom stages as every one of its devices.

Source: Fournier and Oyallon, arXiv 2403.08837. cyclic_stages.py cuts the model.

[Note: Devices that differ]
Devices of the cyclic schedule hold, update and send different things, so none can stand for all, as
[Note: One program, three readings] has it. Each is rehearsed, and each has a clock of its own that plays its tape until
it comes to a message that has not been sent. A reading is that of some batches of all devices in the steady state;
memory is that of the fullest.

[Note: Batches that differ]
With shared stages, micro-batches take turns on the devices of a stage, so a batch may send other bytes inside nodes and
between them than the batch before. N - j devices take turns at stage j, and N micro-batches are a batch. So everything
repeats after a number of batches whose micro-batches every N - j divides. A reading covers as many batches, up to a
limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from laconic.comm.cluster import make_mesh
from laconic.comm.traffic import Level, Purpose, Traffic
from laconic.config import ConfigError, OptimizerConfig, ScheduleConfig
from laconic.cyclic import placement, runtime, worker
from laconic.cyclic.coding import check_wire
from laconic.cyclic.links import PURPOSES, ActivationMeta, Links
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Message, Rule, Schedule
from laconic.plan import cyclic_stages
from laconic.plan.cyclic_stages import Clock, PhantomStage, PlannedStage, cut_trace
from laconic.plan.estimates import first_rank
from laconic.plan.machine import Job, Kind, PlanLane, Reading, Simulator
from laconic.plan.op_cost import Costs
from laconic.plan.playing import Kinds, Player
from laconic.plan.program import Program, StepWork, add_share
from laconic.plan.rehearsal import END, Rehearsal
from laconic.rehearse import Machine, rehearsal
from laconic.rehearse.tape import Transfer, Wait
from laconic.strategies.cyclic import num_workers
from laconic.strategies.optimizers import make_stage_optimizer

_FIRST = 2
"""The first batch of the steady state: earlier ones have no messages of batches before them."""
_LEAST, _MOST = 3, 12
"""The batches of a reading. Above the most, bytes are means over some of the batches of a period."""
_ROWS = 4
"""The rows of a batch. It is the number that rehearsed batons bring: [Note: Messages of the machine]."""


class CyclicProgram(Program):
    """`CyclicDataParallel` under `laconic train`: one stage for every worker, one micro-batch each."""

    inexact = "some gradients are one step old, so it wants a smaller learning rate (docs/cyclic.md)"

    def __init__(self, machine: Simulator, work: StepWork) -> None:
        """Cut the model.

        Raises:
            ConfigError, JobError, ValueError: the schedule cannot run the job on these ranks.
        """
        settings = work.job.schedule
        if machine.cluster.ranks < 2:
            raise ConfigError(
                "the cyclic schedule on one rank sends nothing; `laconic plan cyclic` shows its time steps"
            )
        workers = num_workers(settings, first_rank(machine.cluster))
        check_wire(settings.wire, settings.states)
        self._schedule = Schedule(
            Rule.named(settings.rule, workers), settings.states, has_norm=work.job.optimizer.max_grad_norm > 0
        )
        self._work, self._stages = work, cut_trace(machine, work, workers)

    def read(self, machine: Simulator) -> Reading:
        """Read the steady state: see `Program.read` and [Note: Devices that differ]."""
        num_batches, job = self._num_batches(), self._work.job
        network = SharedWires(machine)
        devices = [
            DevicePlayer(
                network, rehearse(machine, self._stages, job.schedule, job.optimizer, number, _FIRST + num_batches),
                number,
            )
            for number in range(self._schedule.num_devices)
        ]  # fmt: skip
        play_all(devices)
        share = 1.0 / (len(devices) * num_batches)
        ends_s = [max(device.began_s[label] for device in devices) for label in (("step", _FIRST), END)]
        reading = Reading()
        for device in devices:
            add_share(reading, device.reading, share)
        reading.seconds = (ends_s[1] - ends_s[0]) / num_batches
        fullest = max(devices, key=lambda device: device.reading.peak_bytes)
        for kind, nbytes in fullest.machine.held.items():
            machine.hold(kind, nbytes)
        return reading

    def _num_batches(self) -> int:
        """The batches of a reading: see [Note: Batches that differ]."""
        if self._schedule.states != "shared":
            return _LEAST
        n = self._schedule.num_stages
        period = math.lcm(*(turns // math.gcd(turns, n) for turns in range(1, n + 1)))
        return min(_MOST, period * -(-_LEAST // period))


def rehearse(
    machine: Simulator, stages: Sequence[PlannedStage], schedule: ScheduleConfig, optimizer: OptimizerConfig,
    number: int, num_batches: int,
) -> Rehearsal:  # fmt: skip
    """Run some batches as the device `number` of the machine's cluster."""
    cluster, costs, clock = machine.cluster, Costs(), Clock(machine)
    shape: dict[str, Any] = {"nodes": cluster.nodes, "local": cluster.ranks_per_node, "rank": number}
    is_alone = schedule.states == "shared"
    merges = optimizer.name == "adamw" and schedule.wire.is_exact  # vectors and the ends of matrices are coded apart
    kinds: dict[int, Kind] = {}
    with (
        rehearsal(**shape, device_type=machine.device_type, cost_of=costs) as recorder,
        _runtime_on(recorder, clock, kinds),
        recorder.recording() as tape,
    ):
        costs.machine = recorder
        recorder.letters.append(ActivationMeta.of(stages[0].outputs()).header(torch.device("cpu")))
        run = CyclicDataParallel(
            [PhantomStage(stage, recorder, clock, merges=merges, is_alone=is_alone) for stage in stages],
            lambda output, _: output[0], make_stage_optimizer(optimizer),
            make_mesh(recorder.device.type, (cluster.ranks,)), max_grad_norm=optimizer.max_grad_norm or None,
            **schedule.pick("rule", "states", "wire", "stagger"),
        )  # fmt: skip
        batch = (torch.empty(_ROWS, device="meta"),) * 2
        for index in range(num_batches):
            recorder.mark(("step", index))
            run.step([batch] * len(stages) if is_alone else batch)
        recorder.mark(END)
        states = (state for each in run.optimizer.by_stage for state in each.state.values())
        tensors = (each for state in states for each in state.values() if isinstance(each, Tensor))
        kinds |= {recorder.memory(each).id: "optimizer" for each in tensors if recorder.knows(each)}
    return Rehearsal(tape=tape, kinds=kinds)


@dataclass(frozen=True, slots=True)
class _Sending:
    """On the tape: why the messages that follow are sent."""

    purpose: Purpose


@contextmanager
def _runtime_on(machine: Machine, clock: Clock, kinds: dict[int, Kind]) -> Iterator[None]:
    """Let workers time their ops by the plan's clock, and say on the tape what they send and why."""
    send = Links.send

    def say(links: Links, message: Message, content: Any) -> int:
        purpose = PURPOSES[message.kind]
        machine.mark(_Sending(purpose))
        if purpose in ("weights", "gradients"):
            kinds[machine.memory(content).id] = "parameters" if purpose == "weights" else "gradients"
        sent_bytes = send(links, message, content)
        machine.mark(_Sending("control"))
        return sent_bytes

    with (
        mock.patch.object(runtime, "watch_peers"),
        mock.patch.object(worker, "time", clock),
        mock.patch.object(Links, "send", say),
        mock.patch.object(Traffic, "observer", None),
    ):
        yield


def play_all(devices: Sequence[DevicePlayer]) -> None:
    """Play all devices to the end, each as far as the messages of others allow."""
    pending = {device: device.play() for device in devices}
    while pending:
        before = len(pending), sum(device.done for device in devices)
        pending = {device: steps for device, steps in pending.items() if next(steps, None) is not None}
        assert before != (len(pending), sum(device.done for device in devices)), "a message is not sent"


class SharedWires:
    """The wires of nodes, and the messages under way, which all devices share."""

    def __init__(self, machine: Simulator) -> None:
        self.machine = machine
        self._ready_s: dict[int | str, float] = {}
        """When each sender's network is free: that of a node between nodes, that of a rank inside."""
        self.arrivals: dict[Any, Job | None] = {}
        """By (group, source, target, number)."""

    def level(self, source: int, target: int) -> Level:
        """Where a message goes."""
        local = self.machine.cluster.ranks_per_node
        return "local" if source // local == target // local else "node"

    def send(self, key: Any, now_s: float, nbytes: float) -> None:
        """Send a message, when its wire is free."""
        _, source, target, _ = key
        cluster, level = self.machine.cluster, self.level(source, target)
        wire = source if level == "local" else f"node {source // cluster.ranks_per_node}"
        begin_s = max(now_s, self._ready_s.get(wire, 0.0))
        self._ready_s[wire] = begin_s + nbytes / cluster.bytes_per_s(level)
        lane = PlanLane.LOCAL if level == "local" else PlanLane.WIRE
        self.arrivals[key] = Job(lane, self._ready_s[wire] + cluster.latency_s(level))


class DevicePlayer(Player):
    """Plays the tape of one device. What a message has brought is of the kind of the message."""

    asked_by: ClassVar[Kinds] = {
        **Player.asked_by, "parameters": (placement, cyclic_stages), "gradients": (PhantomStage.play_backward,),
    }  # fmt: skip

    def __init__(self, network: SharedWires, rehearsal: Rehearsal, number: int) -> None:
        cluster, device_type = network.machine.cluster, network.machine.device_type
        super().__init__(Simulator(cluster, device_type=device_type), rehearsal)
        self._network, self._number = network, number
        self._sent = network.arrivals
        self._purpose: Purpose = "control"
        self._sizes: dict[Any, float] = {}
        """The bytes of the messages that this device waits for."""
        self.done = 0
        """The entries that have been played."""
        self.began_s: dict[object, float] = {}
        """When each batch began, and when the last one ended."""
        self.reading = Reading()

    def play(self) -> Iterator[bool]:
        """Play the tape; yield when a message has to come first."""
        yield from self._play_until(("step", _FIRST))
        with self.machine.reading() as self.reading:
            yield from self._play_until(END)

    def _play_until(self, label: object) -> Iterator[bool]:
        while label not in self.began_s:
            entry = self._entries[self.done]
            while isinstance(entry, Wait) and self._is_awaited(entry.event):
                yield True
            self._play((entry,))
            self.done += 1

    def _is_awaited(self, event: int) -> bool:
        key = self._events.get(event)
        return isinstance(key, tuple) and key not in self._sent

    def _mark(self, label: object) -> None:
        if isinstance(label, _Sending):
            self._purpose = label.purpose
        elif label == END or isinstance(label, tuple):
            self.began_s[label] = self.machine.now_s
        super()._mark(label)

    def _transfer(self, taped: Transfer, timeline: int) -> None:
        if taped.message is None:
            return
        group, distance, number = taped.message
        if taped.op == "receive":
            key = group, (self._number - distance) % taped.size, self._number, number
            self._arriving[timeline], self._sizes[key] = key, taped.received_bytes
            return
        target, nbytes = (self._number + distance) % taped.size, taped.sent_bytes
        level = self._network.level(self._number, target)
        self.reading.sent_bytes[level, self._purpose] += nbytes
        self._network.send((group, self._number, target, number), self.machine.now_s, nbytes)
        self._lose_compute(level, nbytes)

    def _wait(self, timeline: int, event: int) -> None:
        key = self._events.get(event)
        super()._wait(timeline, event)
        if isinstance(key, tuple):
            self._lose_compute(self._network.level(key[1], self._number), self._sizes.pop(key))

    def _lose_compute(self, level: Level, nbytes: float) -> None:
        """Let one side of a message lose half of what a rank loses to sending and receiving as much."""
        machine = self.machine
        latency_s, bytes_s = machine.cluster.latency_s(level), machine.bytes_s(level, nbytes)
        machine.now_s += machine.exposed_s(level, bytes_s=bytes_s, latency_s=latency_s) / 2
