"""The program of the cyclic schedule: all workers at once, each with the instructions that the runtime executes.

Workers differ, so none can stand for all, as [Note: One program, three readings] has it. Here every device has a clock
and runs its own program (cyclic/schedule/program.py) until it needs a message that has not arrived. A reading is that
of some batches of all devices in the steady state.

Source: Fournier and Oyallon, arXiv 2403.08837. The messages are our own: [Note: Messages of a batch].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from laconic.comm.traffic import Level, Purpose
from laconic.config import Config, ConfigError
from laconic.cyclic.buffers import ByteLayout
from laconic.cyclic.links import NUMBER_BYTES, PURPOSES
from laconic.cyclic.schedule.messages import Compute, Instruction, Message, Receive, Send, Update
from laconic.cyclic.schedule.program import program
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule
from laconic.cyclic.stages.partition import partition
from laconic.plan.machine import Lane, Machine, Reading
from laconic.plan.model_trace import ModelTrace, ParameterSpec
from laconic.plan.phase import Phase
from laconic.plan.program import Program

_BATCHES = 5
_FIRST = 2
"""The first batch of the steady state: earlier ones have no messages of batches before them."""
_FRONT = ("embed", "wte", "wpe")
"""Parts of the names of parameters that the first block has; the root's others belong to the last one."""
_PASSES = 7
"""The bytes that fused AdamW moves, in multiples of the parameters."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A layer, what comes before the layers, or what comes after them."""

    parameters: tuple[ParameterSpec, ...]
    forward: Phase
    backward: Phase


class CyclicProgram(Program):
    """`CyclicDataParallel` under `laconic train`: one stage for every worker, one micro-batch each."""

    inexact = "some gradients are one step old, so it wants a smaller learning rate (docs/cyclic.md)"

    def __init__(self, machine: Machine, config: Config, trace: ModelTrace) -> None:
        cluster = machine.cluster
        settings, ranks = config.schedule, cluster.ranks
        if settings.states == "shared":
            raise ConfigError("schedule.states = 'shared' is not predicted; `laconic plan cyclic` shows its messages")
        if ranks < 2:
            raise ConfigError(
                "the cyclic schedule on one rank sends nothing; `laconic plan cyclic` shows its time steps"
            )
        self._machine, self._local = machine, cluster.ranks_per_node
        limits = config.optimizer.max_grad_norm > 0
        self._schedule = Schedule(Rule.named(settings.rule, ranks), settings.states, has_norm=limits)
        self._pass_after = max(0, round(2 * settings.stagger))
        blocks = _blocks(trace)
        costs = [self._seconds(b.forward) + self._seconds(b.backward) for b in blocks]
        if settings.cut_by == "parameters":
            costs = [float(sum(p.numel for p in block.parameters)) for block in blocks]
        elif settings.cut_by == "memory":
            costs = [float(max(0, block.forward.end_bytes)) for block in blocks]
        borders = partition(costs, ranks)
        stages = [blocks[start:stop] for start, stop in pairwise(borders)]
        self._stage_bytes = [_message_bytes(stage) for stage in stages]
        self._forward_s = [sum(self._seconds(block.forward) for block in stage) for stage in stages]
        self._backward_s = [sum(self._seconds(block.backward) for block in stage) for stage in stages]
        self._hold(trace, blocks)

    def _seconds(self, phase: Phase) -> float:
        return self._machine.seconds(phase)

    def _hold(self, trace: ModelTrace, blocks: list[_Block]) -> None:
        """Hold what a device has between steps: parameters, and the optimizer's state of the stages that it owns."""
        machine, ranks = self._machine, self._machine.cluster.ranks
        weights = sum(p.numel * p.dtype.itemsize for block in blocks for p in block.parameters)
        largest = max(self._stage_bytes)
        is_sharded = self._schedule.states == "sharded"
        machine.hold("parameters", weights / ranks if is_sharded else weights)
        machine.hold("optimizer", 2 * sum(self._stage_bytes) / ranks)
        self._transient = {"transfers": 3.0 * largest, "gradients": 2.0 * largest, "activations": trace.peak_bytes}

    def step(self) -> None:
        """See `Program.step`: devices run whole batches, in `read`."""

    def read(self, machine: Machine) -> Reading:
        """Read the steady state: see `Program.read`."""
        with machine.reading() as reading:
            for kind, nbytes in self._transient.items():
                machine.hold(kind, nbytes)  # type: ignore[arg-type]
            for kind, nbytes in self._transient.items():
                machine.hold(kind, -nbytes)  # type: ignore[arg-type]
        run = _Run(self)
        ends_s = run.finish()
        reading.seconds = (ends_s[-1] - ends_s[_FIRST - 1]) / (_BATCHES - _FIRST)
        ranks = self._schedule.num_devices
        share = 1.0 / ranks
        for key, nbytes in run.sent_bytes.items():
            reading.sent_bytes[key] += nbytes * share  # type: ignore[assignment]
        for lane, seconds in run.waits_s.items():
            reading.waits_s[lane] += seconds * share / (_BATCHES - _FIRST)  # type: ignore[assignment]
        reading.busy_s[Lane.COMPUTE] = sum(self._forward_s) + sum(self._backward_s)  # type: ignore[assignment]
        return reading

    def bytes_of(self, message: Message) -> float:
        """The bytes of a message between devices."""
        return NUMBER_BYTES if message.kind in ("square", "norm") else self._stage_bytes[message.stage]

    def level(self, source: int, target: int) -> Level:
        """Whether two devices are on one node."""
        return "local" if source // self._local == target // self._local else "node"


class _Run:
    """All devices in some batches."""

    def __init__(self, owner: CyclicProgram) -> None:
        self._owner, self._schedule = owner, owner._schedule
        self._machine = owner._machine
        devices = range(self._schedule.num_devices)
        self._now_s = dict.fromkeys(devices, 0.0)
        self._ready_s: dict[int | str, float] = {}
        """When each sender's network is free: that of a node between nodes, that of a rank inside."""
        self._arrivals_s: dict[tuple[object, int], tuple[float, Lane]] = {}
        self._batons_s: dict[tuple[int, int], tuple[float, Lane]] = {}
        self._ends_s = {device: [0.0] * _BATCHES for device in devices}
        self.sent_bytes: Counter[tuple[Level, Purpose]] = Counter()
        self.waits_s: Counter[Lane] = Counter()
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
        return [max(ends[batch] for ends in self._ends_s.values()) for batch in range(_BATCHES)]

    def _steps(self, device: int) -> Iterator[bool]:
        """Run a device's instructions; yield True while one has to wait for a message that has not been sent."""
        schedule = self._schedule
        for batch in range(_BATCHES):
            done = 0
            self._pass_baton(device, batch, done)
            for instruction in program(schedule, device, batch):
                if isinstance(instruction, Compute) and device > 0 and done == 0:
                    while (device, batch) not in self._batons_s:
                        yield True
                    self._wait(device, *self._batons_s[device, batch], batch)
                if isinstance(instruction, Receive):
                    key = instruction.message.key, device
                    while key not in self._arrivals_s:
                        yield True
                    self._wait(device, *self._arrivals_s[key], batch)
                else:
                    self._do(instruction, device, batch)
                if isinstance(instruction, Compute):
                    done += 1
                    self._pass_baton(device, batch, done)
                yield False
            self._ends_s[device][batch] = self._now_s[device]

    def _do(self, instruction: Instruction, device: int, batch: int) -> None:
        owner = self._owner
        if isinstance(instruction, Compute):
            op = instruction.op
            self._now_s[device] += (owner._forward_s if op.is_forward else owner._backward_s)[op.stage]
        elif isinstance(instruction, Update):
            nbytes = _PASSES * owner._stage_bytes[instruction.stage]
            self._now_s[device] += nbytes / self._machine.cluster.device_memory_bytes_per_s
        elif isinstance(instruction, Send):
            message = instruction.message
            purpose = PURPOSES[message.kind]
            arrival = self._send(device, message.target, owner.bytes_of(message), purpose, batch)
            self._arrivals_s[message.key, message.target] = arrival

    def _pass_baton(self, device: int, batch: int, done: int) -> None:
        following = device + 1
        if following < self._schedule.num_devices and done == self._owner._pass_after:
            self._batons_s[following, batch] = self._send(device, following, NUMBER_BYTES, "control", batch)

    def _send(self, source: int, target: int, nbytes: float, purpose: Purpose, batch: int) -> tuple[float, Lane]:
        now_s = self._now_s[source]
        if source == target:
            return now_s, Lane.COMPUTE
        level = self._owner.level(source, target)
        if batch == _FIRST:
            self.sent_bytes[level, purpose] += nbytes  # type: ignore[assignment]
        cluster = self._machine.cluster
        link = source if level == "local" else f"node {source // self._owner._local}"
        begin_s = max(now_s, self._ready_s.get(link, 0.0))
        self._ready_s[link] = begin_s + nbytes / cluster.bytes_per_s(level)
        lane = Lane.LOCAL if level == "local" else Lane.WIRE
        return self._ready_s[link] + cluster.latency_s(level), lane

    def _wait(self, device: int, arrival_s: float, lane: Lane, batch: int) -> None:
        waited_s = arrival_s - self._now_s[device]
        if waited_s > 0:
            if batch >= _FIRST:
                self.waits_s[lane] += waited_s  # type: ignore[assignment]
            self._now_s[device] = arrival_s


def _blocks(trace: ModelTrace) -> list[_Block]:
    """The blocks of a causal language model: what comes before the layers, the layers, what comes after them."""
    root = len(trace.units) - 1
    forward = [segment for segment in trace.segments if not segment.is_backward]
    backward = [segment for segment in trace.segments if segment.is_backward][::-1]
    units = [segment.unit for segment in forward]
    if units != [root, *range(root), root] or [segment.unit for segment in backward] != units:
        raise ConfigError("the model is not a sequence of layers between an embedding and a head; see docs/cyclic.md")
    own = trace.units[root].parameters
    front = tuple(each for each in own if any(part in each.name for part in _FRONT))
    rest = tuple(each for each in own if each not in front)
    parameters = [front, *(unit.parameters for unit in trace.units[:root]), rest]
    return [
        _Block(parameters=each, forward=before.phase, backward=after.phase)
        for each, before, after in zip(parameters, forward, backward, strict=True)
    ]


def _message_bytes(stage: list[_Block]) -> int:
    """The bytes of a message with a stage's trained parameters."""
    trained = (each for block in stage for each in block.parameters if each.is_trained)
    return ByteLayout(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in trained).num_bytes
