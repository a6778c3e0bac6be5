"""The program of the cyclic schedule: a model cut into stages, and what a device holds of them.

Source: Fournier and Oyallon, arXiv 2403.08837. cyclic_devices.py runs the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import torch

from laconic.config import Config, ConfigError
from laconic.cyclic.buffers import ByteLayout
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule
from laconic.cyclic.stages.partition import partition
from laconic.plan.cyclic_devices import StageCosts, read_steady_state
from laconic.plan.machine import Kind, Machine, Reading
from laconic.plan.model_trace import ModelTrace, ParameterSpec
from laconic.plan.phase import Phase
from laconic.plan.program import Program

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
        self._machine = machine
        has_norm = config.optimizer.max_grad_norm > 0
        self._schedule = Schedule(Rule.named(settings.rule, ranks), settings.states, has_norm=has_norm)
        blocks = _blocks(trace)
        self._costs = self._costs_of(self._cut(blocks, settings.cut_by))
        self._pass_after = max(0, round(2 * settings.stagger))
        weights = sum(p.nbytes for block in blocks for p in block.parameters)
        machine.hold("parameters", weights / ranks if settings.states == "sharded" else weights)
        machine.hold("optimizer", 2 * sum(self._costs.message_bytes) / ranks)
        largest = max(self._costs.message_bytes)
        self._transient: dict[Kind, float] = {
            "transfers": 3.0 * largest, "gradients": 2.0 * largest, "activations": trace.peak_bytes,
        }  # fmt: skip

    def _cut(self, blocks: Sequence[_Block], cut_by: str) -> list[Sequence[_Block]]:
        """Cut the model into one stage for each worker, as cyclic/stages does."""
        seconds = self._machine.seconds
        sizes = [seconds(block.forward) + seconds(block.backward) for block in blocks]
        if cut_by == "parameters":
            sizes = [float(sum(p.numel for p in block.parameters)) for block in blocks]
        elif cut_by == "memory":
            sizes = [float(max(0, block.forward.end_bytes)) for block in blocks]
        borders = partition(sizes, self._machine.cluster.ranks)
        return [blocks[start:stop] for start, stop in pairwise(borders)]

    def _costs_of(self, stages: Sequence[Sequence[_Block]]) -> StageCosts:
        machine = self._machine
        message_bytes = [_message_bytes(stage) for stage in stages]
        return StageCosts(
            message_bytes=message_bytes,
            forward_s=[sum(machine.seconds(block.forward) for block in stage) for stage in stages],
            backward_s=[sum(machine.seconds(block.backward) for block in stage) for stage in stages],
            update_s=[_PASSES * nbytes / machine.cluster.device_memory_bytes_per_s for nbytes in message_bytes],
        )

    def step(self) -> None:
        """See `Program.step`: devices run whole batches, in `read`."""

    def read(self, machine: Machine) -> Reading:
        """Read the steady state: see `Program.read`."""
        with machine.reading() as reading, ExitStack() as transient:
            for kind, nbytes in self._transient.items():
                transient.enter_context(machine.holding(kind, nbytes))
        steady = read_steady_state(machine.cluster, self._schedule, self._costs, pass_after=self._pass_after)
        steady.begin_s, steady.peak = reading.begin_s, reading.peak
        return steady


def _blocks(trace: ModelTrace) -> list[_Block]:
    """The blocks of a causal language model: what comes before the layers, the layers, what comes after them."""
    root = len(trace.units) - 1
    forward, backward = trace.forward, trace.backward[::-1]
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


def _message_bytes(stage: Sequence[_Block]) -> int:
    """The bytes of a message with a stage's trained parameters."""
    trained = (each for block in stage for each in block.parameters if each.is_trained)
    return ByteLayout(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in trained).num_bytes
