"""The memory of the devices of the cyclic schedule.

[Note: Buffers as objects]
Which buffers are alive on a device follows from who still refers to them: a graph to the version of its forward, a send
to the sum that it sends. So each buffer is a Python object here, too. It holds the machine's memory until its last user
drops it. The users are those of the runtime: methods and attributes below are named after those of `Worker`, `Links`
and `Placement` in laconic.cyclic, and refer to a buffer for as long.
Activations are those of the traced phases. They belong to a stage of a micro-batch from its forward to its backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from laconic.cyclic.links import PURPOSES
from laconic.cyclic.program import program
from laconic.cyclic.schedule import Compute, Instruction, Key, Message, Op, Receive, Schedule, Send, Update
from laconic.cyclic.worker import DUE_WITH_OP, LOOKAHEAD
from laconic.plan.cyclic_stages import Stages
from laconic.plan.machine import Kind, Simulator

_BATCHES = 4
"""The batches that fill the memory. The last one is read."""
_Received = Mapping[int, Sequence[Message]]
"""The messages to each device in a batch, for each sender in the order of its program."""


class _Buffer:
    """Memory that its last user frees: [Note: Buffers as objects]."""

    def __init__(self, machine: Simulator, kind: Kind, nbytes: float) -> None:
        self.machine, self.kind, self.nbytes = machine, kind, nbytes
        machine.hold(kind, nbytes)

    def __del__(self) -> None:
        self.machine.hold(self.kind, -self.nbytes)


@dataclass
class _PendingBackward:
    """See `laconic.cyclic.worker`."""

    version: _Buffer | None
    inputs: _Buffer | None
    saved_bytes: float


@dataclass(kw_only=True)
class DeviceMemory:
    """The buffers of one device."""

    machine: Simulator
    """Empty; it counts the memory."""
    schedule: Schedule
    stages: Stages
    number: int
    pass_after: int
    """The ops of a batch after which the next worker may run: [Note: Baton]. Until then no message is released."""
    versions: dict[int, _Buffer] = field(default_factory=dict)
    """The newest version of each stage that the device holds."""
    arrived_version: _Buffer | None = None
    """The version of a stage that is not held, which is to be sent on."""
    expected: dict[int, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    posted: dict[Key, _Buffer | None] = field(default_factory=dict)
    """The messages that have memory and are not taken; None for the device's own activations."""
    sent: list[tuple[Message, _Buffer | None]] = field(default_factory=list)
    pending: dict[tuple[int, int], _PendingBackward] = field(default_factory=dict)
    """By worker and stage."""
    received: _Buffer | None = None
    sum: _Buffer | None = None
    """The gradient of the last backward's stage, summed over workers."""

    def __post_init__(self) -> None:
        updated = self.schedule.updated_on(self.number)
        for index, stage in enumerate(self.stages.stages):
            self.machine.hold("parameters", stage.frozen_bytes)
            if self.schedule.states == "replicated" or index in updated:
                self.versions[index] = self._buffer("parameters", stage.message_bytes)
            if index in updated:
                self.machine.hold("optimizer", stage.update.state_bytes)

    def _buffer(self, kind: Kind, nbytes: float) -> _Buffer:
        return _Buffer(self.machine, kind, nbytes)

    # -- Worker --------------------------------------------------------------------------------------------------------

    def step(self, batch: int, messages: Sequence[Message]) -> None:
        """See `Worker.step`."""
        for message in messages:
            self.expected[message.source].append(message)
        steps = [op.step for near in (batch, batch + 1) for op in self.schedule.ops(self.number, near)]
        self.post(steps[1] + DUE_WITH_OP)
        done, last = 0, self.schedule.num_devices - 1
        for instruction in program(self.schedule, self.number, batch):
            if not isinstance(instruction, Compute):
                self.exchange(instruction)
                continue
            self.post(steps[min(done + LOOKAHEAD, len(steps) - 1)] + DUE_WITH_OP)
            if done >= self.pass_after or self.number == last or not self.schedule.has_device_per_worker:
                self.release(instruction.op.step, batch)
            self.compute(instruction.op)
            done += 1

    def exchange(self, instruction: Instruction) -> None:
        """See `Worker._exchange`."""
        match instruction:
            case Send(message):
                self.send(message)
            case Receive(message, is_needed):
                content = self.take(message)
                if is_needed:
                    self.receive(message, content)
            case Update(stage, version):
                key: Key = ("total", stage, version - 1, self.schedule.num_stages - 1)
                total = self.posted.pop(key, None)
                self.update(stage)
                del total

    def receive(self, message: Message, content: _Buffer | None) -> None:
        """See `Worker._receive`."""
        match message.kind:
            case "activation" | "activation gradient":
                self.received = content
            case "gradient":
                self.sum = content
            case "weights" | "rear weights" if message.stage in self.versions:
                assert content is not None
                self.versions[message.stage] = content
            case "weights" | "rear weights":
                self.arrived_version = content

    def update(self, stage: int) -> None:
        """See `Placement.update`: the optimizer steps on a copy."""
        self.versions[stage] = self._buffer("parameters", self.stages.stages[stage].message_bytes)

    def compute(self, op: Op) -> None:
        """See `Worker._compute`. A stage that is not held has memory during the op: [Note: A home without memory]."""
        is_held = op.stage in self.versions
        home_bytes = 0 if is_held else self.stages.stages[op.stage].message_bytes
        with self.machine.holding("parameters", home_bytes):
            if op.is_forward:
                self.forward(op)
            else:
                self.backward(op)

    def forward(self, op: Op) -> None:
        """See `Worker._forward`."""
        stage, inputs, self.received = self.stages.stages[op.stage], self.received, None
        for phase in stage.forward:
            self.machine.compute("", phase)
        saved_bytes = sum(phase.end_bytes for phase in stage.forward)
        self.pending[op.worker, op.stage] = _PendingBackward(self.versions.get(op.stage), inputs, saved_bytes)

    def backward(self, op: Op) -> None:
        """See `Worker._backward`."""
        pending = self.pending.pop((op.worker, op.stage))
        stage, gradients, self.received = self.stages.stages[op.stage], self.received, None
        gradient_bytes = 0.0
        for phase in stage.backward:
            self.machine.compute("", replace(phase, peak_bytes=phase.peak_with_gradients_bytes))
            self.machine.hold("gradients", phase.gradient_bytes)
            gradient_bytes += phase.gradient_bytes
        del gradients
        self.sum = self._buffer("gradients", stage.message_bytes)
        self.machine.hold("gradients", -gradient_bytes)
        if not self.schedule.has_device_per_worker:  # what the neighbours' phases would free is freed here
            left_bytes = pending.saved_bytes + sum(phase.end_bytes for phase in stage.backward)
            self.machine.hold("activations", -left_bytes)

    # -- Links ---------------------------------------------------------------------------------------------------------

    def post(self, step: int) -> None:
        """See `Links.post`."""
        for queue in self.expected.values():
            while any(message.due < step for message in queue):
                self.post_next(queue)

    def post_next(self, queue: deque[Message]) -> None:
        """See `Links._post_next`."""
        message = queue.popleft()
        self.posted[message.key] = self._buffer("transfers", self.stages.message_bytes(message))

    def take(self, message: Message) -> _Buffer | None:
        """See `Links.take`."""
        while message.key not in self.posted:
            self.post_next(self.expected[message.source])
        return self.posted.pop(message.key)

    def send(self, message: Message) -> None:
        """See `Links.send`, and `Worker._content`."""
        content = self.sum
        is_away = message.target != message.source
        match message.kind:
            case "activation" | "activation gradient":
                content = self._buffer("transfers", self.stages.message_bytes(message)) if is_away else None
            case "weights" | "rear weights":
                content = self.versions.get(message.stage, self.arrived_version)
            case "square" | "norm":
                content = None
            case "total" if is_away and self.schedule.states == "shared":
                content = self._buffer("transfers", self.stages.message_bytes(message))
        if is_away:
            self.sent.append((message, content))
        elif PURPOSES[message.kind] != "control":
            self.posted[message.key] = content

    def release(self, step: int, batch: int) -> None:
        """See `Links.release`."""
        self.sent = [pair for pair in self.sent if not (pair[0].due < step and pair[0].due_in <= batch)]


def fullest_device(
    machine: Simulator, schedule: Schedule, stages: Stages, *, pass_after: int
) -> tuple[dict[Kind, float], dict[Kind, float]]:
    """The memory of the device that has the highest peak: at its peak, and between two steps."""
    by_batch = [messages_by_target(schedule, batch) for batch in range(_BATCHES)]
    fullest: tuple[dict[Kind, float], dict[Kind, float]] = {}, {}
    for number in range(schedule.num_devices):
        empty = Simulator(machine.cluster, device_type=machine.device_type)
        device = DeviceMemory(machine=empty, schedule=schedule, stages=stages, number=number, pass_after=pass_after)
        for batch, received in enumerate(by_batch):
            with empty.reading() as reading:
                device.step(batch, received.get(number, ()))
        if sum(reading.peak.values()) > sum(fullest[0].values()):
            fullest = reading.peak, {kind: float(nbytes) for kind, nbytes in empty.held.items()}
    return fullest


def messages_by_target(schedule: Schedule, batch: int) -> _Received:
    """The messages between devices in a batch."""
    found: dict[int, list[Message]] = defaultdict(list)
    for source in range(schedule.num_devices):
        for instruction in program(schedule, source, batch):
            if isinstance(instruction, Send) and instruction.message.target != source:
                found[instruction.message.target].append(instruction.message)
    return found
