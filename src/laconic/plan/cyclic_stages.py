"""The stages into which the cyclic schedule cuts a traced model: what each computes, keeps, sends and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from laconic.config import ConfigError
from laconic.cyclic.links import NUMBER_BYTES, PURPOSES, ByteLayout
from laconic.cyclic.schedule import Message
from laconic.cyclic.stage import partition
from laconic.plan.machine import Simulator
from laconic.plan.model_trace import ModelTrace, ParameterSpec
from laconic.plan.optimizer_cost import OptimizerCost, plain_cost
from laconic.plan.phase import LayerInput, Phase
from laconic.plan.program import StepWork

_NOTHING = Phase(work=(), peak_bytes=0, end_bytes=0)


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage of a traced model. Bytes are those of one copy."""

    forward: tuple[Phase, ...]
    """The phases of its blocks, in their order."""
    backward: tuple[Phase, ...]
    """The phases of its blocks, the last block's first."""
    forward_s: float
    backward_s: float
    update_s: float
    message_bytes: int
    """The bytes of a message with its trained parameters, or with their gradients."""
    frozen_bytes: int
    """The bytes of parameters that do not train. Every device keeps them."""
    update: OptimizerCost


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A traced model, cut into stages."""

    stages: tuple[PlannedStage, ...]
    activation_bytes: int
    """The bytes of a message with a stage's output: hidden states, and what layers get besides."""
    activation_gradient_bytes: int
    """The bytes of a message with the gradient of a stage's input."""

    def op_seconds(self) -> list[float]:
        """The seconds of the ops of a worker, in their order."""
        return [stage.forward_s for stage in self.stages] + [stage.backward_s for stage in reversed(self.stages)]

    def message_bytes(self, message: Message) -> int:
        """The payload bytes of a message."""
        if PURPOSES[message.kind] == "control":
            return NUMBER_BYTES
        if PURPOSES[message.kind] == "activations":
            return self.activation_bytes if message.kind == "activation" else self.activation_gradient_bytes
        return self.stages[message.stage].message_bytes


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One layer, or the modules before all layers, or the modules after them."""

    parameters: tuple[ParameterSpec, ...]
    forward: Phase
    backward: Phase

    @property
    def trains(self) -> bool:
        """Whether a parameter trains."""
        return any(each.is_trained for each in self.parameters)


def cut_trace(machine: Simulator, work: StepWork, num_stages: int) -> Stages:
    """Cut a traced model as `laconic.cyclic.cut` cuts the model.

    Raises:
        ConfigError: the model is no sequence of layers, or two stages would share a trained parameter.
        ValueError: there are fewer blocks than stages, or a stage would train nothing.
    """
    trace = work.trace
    if trace.tied:
        raise ConfigError(
            f"{trace.tied[0]} has a second name, and two stages of the cyclic schedule may not share a parameter; "
            "untie it (transformers: tie_word_embeddings = false)"
        )
    blocks = _blocks(trace)
    counts = [0, *accumulate(block.trains for block in blocks)]
    borders = partition(
        _sizes(blocks, machine, work.job.schedule.cut_by), num_stages,
        is_allowed=lambda start, stop: counts[stop] > counts[start],
    )  # fmt: skip
    return Stages(
        stages=tuple(_stage(blocks[start:stop], machine, work) for start, stop in pairwise(borders)),
        activation_bytes=_packed_bytes(trace.layer_inputs),
        activation_gradient_bytes=_packed_bytes([each for each in trace.layer_inputs if each.requires_grad]),
    )


def _blocks(trace: ModelTrace) -> list[_Block]:
    """The blocks of a causal language model: the modules before its layers, each layer, and the modules after them."""
    root = len(trace.units) - 1
    order = [root, *range(root), root]
    forward, backward = ([each.unit for each in part] for part in (trace.forward, trace.backward[::-1]))
    if forward != order or backward not in (order, order[1:]):
        raise ConfigError("the model is not a sequence of layers between an embedding and a head; see docs/cyclic.md")
    own = trace.units[root].parameters
    front = tuple(each for each in own if each.name.rpartition(".")[0] in trace.before_layers)
    rest = tuple(each for each in own if each not in front)
    parameters = [front, *(unit.parameters for unit in trace.units[:root]), rest]
    there, back = ([each.phase for each in part] for part in (trace.forward, trace.backward[::-1]))
    if backward != order:  # backward ends at the first layer, as with adapters
        back.insert(0, _NOTHING)
    return [
        _Block(parameters=own, forward=forward_phase, backward=backward_phase)
        for own, forward_phase, backward_phase in zip(parameters, there, back, strict=True)
    ]


def _sizes(blocks: Sequence[_Block], machine: Simulator, cut_by: str) -> list[float]:
    """The sizes that stages share equally."""
    if cut_by == "parameters":
        return [float(sum(each.numel for each in block.parameters)) for block in blocks]
    if cut_by == "memory":
        return [float(max(0, block.forward.end_bytes)) for block in blocks]
    return [machine.seconds(block.forward) + machine.seconds(block.backward) for block in blocks]


def _stage(blocks: Sequence[_Block], machine: Simulator, work: StepWork) -> PlannedStage:
    parameters = tuple(each for block in blocks for each in block.parameters)
    trained = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in parameters if each.is_trained]
    message_bytes = ByteLayout(trained).num_bytes
    tensors = tuple((tuple(each.shape), each.dtype) for each in trained)
    update = plain_cost(work.optimizer, tensors, machine.device_type)
    copy_s = 2 * message_bytes / machine.cluster.device_memory_bytes_per_s  # an update steps on a copy
    return PlannedStage(
        forward=tuple(block.forward for block in blocks),
        backward=tuple(block.backward for block in reversed(blocks)),
        forward_s=sum(machine.seconds(block.forward) for block in blocks),
        backward_s=sum(machine.seconds(block.backward) for block in blocks),
        update_s=copy_s + machine.seconds(update.phase),
        message_bytes=message_bytes,
        frozen_bytes=sum(each.nbytes for each in parameters if not each.is_trained),
        update=update,
    )


def _packed_bytes(tensors: Sequence[LayerInput]) -> int:
    """The bytes of a message with these tensors; see `ByteLayout`."""
    return ByteLayout(torch.empty(each.nbytes, dtype=torch.uint8, device="meta") for each in tensors).num_bytes
