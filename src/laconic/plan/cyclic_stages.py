"""The stages into which the cyclic schedule cuts a traced model, as modules that play their phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from laconic.config import ConfigError
from laconic.cyclic.links import ByteLayout
from laconic.cyclic.stage import partition
from laconic.plan.machine import Simulator
from laconic.plan.model_trace import ModelTrace, ParameterSpec
from laconic.plan.phantom import PhaseBegin, Rest, hidden_tensor
from laconic.plan.phase import LayerInput, Phase
from laconic.plan.program import StepWork
from laconic.rehearse import Machine

_NOTHING = Phase(work=(), peak_bytes=0, end_bytes=0)


@dataclass(frozen=True, kw_only=True)
class PlannedBlock:
    """One layer, or the modules before all layers, or the modules after them."""

    name: str
    parameters: tuple[ParameterSpec, ...]
    forward: Phase
    backward: Phase

    @property
    def trains(self) -> bool:
        """Whether a parameter trains."""
        return any(each.is_trained for each in self.parameters)


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage of a traced model."""

    blocks: tuple[PlannedBlock, ...]
    passes_on: tuple[LayerInput, ...]
    """The inputs of the next stage: hidden states, masks, positions. None if this is the last stage."""

    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors of these sizes, whose memory nobody records, or a loss."""
        return tuple(map(_tensor_like, self.passes_on)) or (hidden_tensor(dtype=torch.float32).requires_grad_(),)


def cut_trace(machine: Simulator, work: StepWork, num_stages: int) -> list[PlannedStage]:
    """Cut a traced model as `laconic.cyclic.cut` cuts the model on several ranks.

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
    return [
        PlannedStage(
            blocks=tuple(blocks[start:stop]), passes_on=trace.layer_inputs if stop < len(blocks) else ()
        )
        for start, stop in pairwise(borders)
    ]  # fmt: skip


def _blocks(trace: ModelTrace) -> list[PlannedBlock]:
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
        PlannedBlock(name=trace.units[unit].name, parameters=own, forward=forward_phase, backward=backward_phase)
        for unit, own, forward_phase, backward_phase in zip(order, parameters, there, back, strict=True)
    ]


def _sizes(blocks: Sequence[PlannedBlock], machine: Simulator, cut_by: str | None) -> list[float]:
    """The sizes that stages share equally."""
    if cut_by == "parameters":
        return [float(sum(each.numel for each in block.parameters)) for block in blocks]
    if cut_by == "memory":
        return [float(max(0, block.forward.end_bytes)) for block in blocks]
    return [machine.seconds(block.forward) + machine.seconds(block.backward) for block in blocks]


class Clock:
    """The time of a rehearsed device as its ops take it; it has the name of `time.perf_counter`."""

    def __init__(self, machine: Simulator) -> None:
        self._machine, self._now_s = machine, 0.0

    def perf_counter(self) -> float:
        """The seconds of all phases so far."""
        return self._now_s

    def run(self, phase: Phase) -> None:
        """Let a phase pass."""
        self._now_s += self._machine.seconds(phase)


class PhantomStage(nn.Module):
    """A stage with real parameters, whose forward and backward play the phases of its blocks: [Note: Phantom layers].

    Autograd's gradients are alive until the runtime has taken them. A stage that is alone on its device frees in
    backward what is left of its activations: a neighbour's phase would free the rest.
    """

    def __init__(
        self, stage: PlannedStage, machine: Machine, clock: Clock, *, merges: bool, is_alone: bool = False
    ) -> None:
        """`merges`: let few parameters stand for all, which an optimizer must not mind that works by elements."""
        super().__init__()
        self.planned, self._machine, self._clock, self._is_alone = stage, machine, clock, is_alone
        specs = [each for block in stage.blocks for each in block.parameters]
        self.all = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=dtype, device=machine.device), requires_grad=is_trained)
            for shape, dtype, is_trained in (_merged(specs) if merges else map(_plain, specs))
        )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Pass on what the stage passes on. What needs no gradient stays the tensor that it was."""
        for block in self.planned.blocks:
            self._play(block.name, block.forward)
        made = self.planned.outputs()
        moving = iter(_Backward.apply(self, len(inputs), *inputs, *self._trained()))
        kept = inputs if len(inputs) == len(made) else made
        return tuple(next(moving) if own.requires_grad else old for own, old in zip(made, kept, strict=True))

    def play_backward(self) -> list[Tensor]:
        """Play the phases of backward, the last block's first. Returns the gradients of what trains."""
        come = []
        for block in reversed(self.planned.blocks):
            self._play(block.name, replace(block.backward, peak_bytes=block.backward.peak_with_gradients_bytes))
            nbytes = sum(each.nbytes for each in block.parameters if each.is_trained)
            come.append(torch.empty(nbytes, dtype=torch.uint8, device=self._machine.device))
        if self._is_alone:
            left_bytes = sum(each.forward.end_bytes + each.backward.end_bytes for each in self.planned.blocks)
            self._machine.mark(Rest(-left_bytes))
        come.clear()
        return list(map(torch.empty_like, self._trained()))

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in self.all.parameters() if each.requires_grad]

    def _play(self, name: str, phase: Phase) -> None:
        self._machine.mark(PhaseBegin(name, phase))
        self._machine.mark(Rest(phase.end_bytes))
        self._clock.run(phase)


_Given = tuple[tuple[int, ...], torch.dtype, bool]
"""The shape and the dtype of a parameter, and whether it trains."""


def _plain(spec: ParameterSpec) -> _Given:
    return spec.shape, spec.dtype, spec.is_trained


def _merged(specs: Sequence[ParameterSpec]) -> list[_Given]:
    """For each dtype a parameter that takes as much in messages. One stands for all that are frozen."""
    numels: Counter[torch.dtype] = Counter()
    for each in specs:
        if each.is_trained:
            place = torch.empty(each.shape, dtype=each.dtype, device="meta")
            numels[each.dtype] += ByteLayout([place]).num_bytes // each.dtype.itemsize
    frozen_bytes = sum(each.nbytes for each in specs if not each.is_trained)
    found: list[_Given] = [((numel, 1), dtype, True) for dtype, numel in numels.items()]
    return [*found, ((frozen_bytes,), torch.uint8, False)] if frozen_bytes else found


class _Backward(torch.autograd.Function):
    """The backward of a stage. Gradients of its inputs have no memory of their own: the phases have it."""

    @staticmethod
    def forward(ctx: Any, stage: PhantomStage, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.stage = stage
        ctx.inputs = [(each.shape, each.dtype) if each.requires_grad else None for each in tensors[:num_inputs]]
        return tuple(each.detach() for each in stage.planned.outputs() if each.requires_grad)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = [None if each is None else hidden_tensor(*each[0], dtype=each[1]) for each in ctx.inputs]
        return None, None, *own, *ctx.stage.play_backward()


def _tensor_like(given: LayerInput) -> Tensor:
    """A tensor of as many bytes."""
    dtype = torch.bfloat16 if given.requires_grad else torch.uint8
    return hidden_tensor(given.nbytes // dtype.itemsize, dtype=dtype).requires_grad_(given.requires_grad)
