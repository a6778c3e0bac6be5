"""Phantom stages: what a place of a pipeline runs, with layers that play their traced phases.

[Note: Phantom stages]
A stage takes hidden states and returns some, in tensors of their real shape that lie on the device: these cross, and
the machine knows their memory. Between them is the chain of [Note: Phantom layers], without elements. The root's phases
belong to the stages at both ends: what runs before the first layer to the first stage, the last norm, the head and the
loss to the last one.

A trace counts hidden states and their gradients as activations of its layers. At the two borders of a stage they are
tensors of their own instead. What its last layer hands on is counted where the layer ends, and freed where the first
layer's backward frees what it was given, which is a message. So a stage takes the bytes of one hidden state from its
activations at the end of forward, and gives them back at the begin of backward, when its last layer is about to free a
gradient that is a message, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from laconic.hf.causal_lm import StageBlocks, blocks_for_stages
from laconic.hf.layers import without_packed_rows
from laconic.pipeline.cutting import PipelineCut
from laconic.pipeline.runtime import Pipeline
from laconic.pipeline.stages import Values
from laconic.pipeline.wire import Boundary, TensorForm
from laconic.plan.model_trace import ModelTrace
from laconic.plan.op_cost import Costs
from laconic.plan.phantom import META, Phantom, Rest, Together
from laconic.plan.phase import Phase
from laconic.rehearse import Machine
from laconic.strategies import pipeline


@dataclass(frozen=True, kw_only=True)
class StageForms:
    """How a model is cut into blocks, and what these hand on, as it was found on the meta device."""

    blocks: Sequence[Sequence[str]]
    """The names of the modules of each block: of the embedding, each layer and the head."""
    trains: Sequence[bool]
    """Whether each block has parameters that are trained."""
    tokens: TensorForm
    """The tokens of a micro-batch, which the first block takes."""
    hidden: TensorForm
    """The hidden states that each block but the last hands on."""

    @staticmethod
    def of(model: nn.Module, rows: int, tokens: int, dtype: torch.dtype | None) -> StageForms:
        """Cut a causal language model on the meta device, for micro-batches of so many rows and tokens.

        `dtype` is that of hidden states. Default: what the model gives.

        Raises:
            ValueError: the model cannot be cut into stages.
        """
        found, taken = blocks_for_stages(model, rows, tokens), torch.empty(rows, tokens, dtype=torch.int64, device=META)
        with torch.no_grad(), without_packed_rows(reads=False):
            hidden = TensorForm.of(found.blocks[0](taken)[0])
        modules = [[*block.modules.values()] for block in found.blocks]
        return StageForms(
            blocks=[[*block.modules] for block in found.blocks],
            trains=[any(p.requires_grad for module in own for p in module.parameters()) for own in modules],
            tokens=TensorForm.of(taken),
            hidden=replace(hidden, dtype=dtype or hidden.dtype, requires_grad=True),
        )

    def entries(self, cut: PipelineCut) -> list[Boundary]:
        """The tensors that each stage of a cut takes for one micro-batch."""
        hands_on = [replace(self.hidden, requires_grad=any(self.trains[:border])) for border in cut.borders[1:-1]]
        return [Boundary((self.tokens,)), *(Boundary((form,)) for form in hands_on)]

    def blocks_in(self, model: nn.Module) -> StageBlocks:
        """The blocks of an equal model, which nobody calls."""
        blocks: list[Any] = [_Uncalled({name: model.get_submodule(name) for name in names}) for names in self.blocks]
        return StageBlocks(blocks=blocks, constants={})

    @contextmanager
    def on(self, machine: Machine) -> Iterator[None]:
        """Let a stepper of a pipeline find these blocks, weights without values, and no other places to ask.

        What layers take beside hidden states crosses once in a run, so it is left out.
        """
        meetings = count()

        def join(own: Mapping[int, nn.Module], cut: PipelineCut, **keys: Any) -> Pipeline:
            return Pipeline(own, cut, entries=self.entries(cut), **keys)

        def materialize(model: nn.Module, config: Any, device: torch.device, *, part: Any) -> int:
            for stage in part.stages:
                stage.to_empty(device=device)
            part.tie_again()
            return 0

        def tell_loss(joined: Pipeline, losses: Sequence[Tensor]) -> Tensor:
            machine.mark(Together(next(meetings)))  # the rank with the loss tells all others
            return torch.zeros(())

        with ExitStack() as stack:
            for target, name, value in (
                (pipeline, "blocks_for_stages", lambda model, rows, tokens: self.blocks_in(model)),
                (pipeline, "Pipeline", join),
                (pipeline, "materialize", materialize),
                (pipeline.PipelineStepper, "_tell_constants", lambda stepper, shape: None),
                (Pipeline, "_tell_loss", tell_loss),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            yield


class _Uncalled:
    """A block of which only the modules are asked for."""

    shells: Sequence[nn.Module] = ()

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules

    def __call__(self, *values: Tensor) -> Values:
        raise AssertionError("a phantom stage plays its blocks")


class PhantomStages(Phantom):
    """The phases of a place's stages, which go onto the tape: [Note: Phantom stages]."""

    def __init__(
        self,
        machine: Machine,
        costs: Costs,
        trace: ModelTrace,
        model: nn.Module,
        layers: Sequence[nn.Module],
        *,
        stages: Mapping[int, nn.Module],
        cut: PipelineCut,
        entries: Sequence[Boundary],
        ties: Sequence[Sequence[tuple[nn.Module, str]]],
    ) -> None:
        """Let the forwards of some stages and of their layers play their phases.

        Args:
            machine: has the tape.
            costs: says what operations cost, besides those of the phases.
            trace: of the whole model, for one micro-batch.
            model: the whole model, of which the stages hold a part.
            layers: all of its layers.
            stages: those of this place, by their numbers.
            cut: of the model into stages; block 0 is what comes before the layers.
            entries: what each stage takes.
            ties: the places of each tied parameter in the whole model.

        Raises:
            ValueError: the layers do not run one after the other, forward and then backward.
        """
        own = {module for stage in stages.values() for module in stage.modules()}
        units = {number: layer for number, layer in enumerate(layers) if layer in own}
        super().__init__(machine, costs, trace, model, units)
        self._own, self._ties, self._num_layers = own, ties, len(layers)
        self._front: list[Phase] = []
        """The phases of the root before the layers in forward."""
        self._tail: list[Phase] = []
        self._front_backward: list[Phase] = []
        self._tail_backward: list[Phase] = []
        before: Phase | None = None
        for phase in trace.phases:
            if phase.unit != self._root:
                before = phase
            elif phase.is_backward:
                (self._front_backward if before is not None and before.is_backward else self._tail_backward).append(
                    phase
                )
            else:
                (self._front if before is None else self._tail).append(phase)
        for number, stage in stages.items():
            exit_form = entries[number + 1].tensors[0] if number + 1 < len(entries) else None
            blocks = range(*cut.borders[number : number + 2])
            stage.forward = partial(self._run_stage, blocks, exit_form)

    def _run_stage(self, blocks: range, exit_form: TensorForm | None, *values: Tensor) -> Tensor:
        """Run blocks, from the tokens or hidden states to hidden states, or to what `loss` takes."""
        if blocks.start == 0:
            self._run_root(self._front)
            hidden = self._chain(torch.empty(0, device=META), self._root, self._front_backward)
        else:
            hidden = _Enter.apply(values[0], self)
        for block in blocks:
            if 0 < block <= self._num_layers:
                hidden = self._modules[block - 1](hidden)
        if exit_form is not None:
            return _Exit.apply(hidden, self, exit_form)
        self._run_root(self._tail)
        return self._chain(hidden, self._root, self._tail_backward)

    def _run_root(self, phases: Sequence[Phase]) -> None:
        for phase in phases:
            self._begin(phase)
        self.end()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        """The loss of what the last stage returns. Its cost is in the phases."""
        loss = output.sum()
        self._machine.take(loss, is_device=self._machine.device.type != "cpu")
        return loss

    def _shown(self, unit: int, name: str) -> Any:
        """See `Phantom`. Of a tied parameter, the copy of this place."""
        path, _, own = name.rpartition(".")
        module = self._modules[unit].get_submodule(path)
        places = next((each for each in self._ties if (module, own) in each), ())
        for other, other_name in places:
            if other in self._own:
                module, own = other, other_name
        return module._parameters[own]

    # -- borders -------------------------------------------------------------------------------------------------------

    def border_tensor(self, form: TensorForm) -> Tensor:
        """A tensor that crosses, or has crossed, on the device."""
        return torch.empty(form.shape, dtype=form.dtype, device=self._machine.device)

    def note_border(self, nbytes: int) -> None:
        """Count a hidden state as an activation of a layer, or not, if `nbytes` is negative."""
        self.end()
        self._mark(Rest(nbytes))


class _Enter(torch.autograd.Function):
    """From hidden states into the chain; backward makes their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stages: PhantomStages) -> Tensor:
        ctx.form, ctx.stages = TensorForm.of(hidden), stages
        return torch.empty(0, device=META)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.stages.end()
        return ctx.stages.border_tensor(ctx.form), None


class _Exit(torch.autograd.Function):
    """From the chain to hidden states; backward takes their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stages: PhantomStages, form: TensorForm) -> Tensor:
        ctx.stages, ctx.nbytes = stages, form.nbytes("exact")
        stages.note_border(-ctx.nbytes)
        return stages.border_tensor(form)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.stages.note_border(ctx.nbytes)
        return torch.empty(0, device=META), None, None


def stages_of(
    stepper: Any, forms: StageForms, machine: Machine, costs: Costs, trace: ModelTrace, layers: Sequence[nn.Module]
) -> PhantomStages:
    """Let the stages of a `PipelineStepper` play their phases, and its loss."""
    joined: Pipeline = stepper._pipeline
    found = PhantomStages(
        machine, costs, trace, stepper.module, layers, stages=joined.modules, cut=joined.cut,
        entries=forms.entries(joined.cut), ties=stepper._part.ties,
    )  # fmt: skip
    stepper._loss = found.loss
    return found
