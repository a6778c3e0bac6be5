"""Phantom layers: the modules of a model with real parameters, whose forwards write traced phases onto a tape.

[Note: Phantom layers]
A model's layers compute, allocate and free what a trace has found (model_trace.py), whoever runs them. What is around
them, the engine and the trainer, runs as it is. So a phantom layer keeps its module and its parameters, and its forward
marks the phases of its unit instead of computing. A chain of autograd functions, without elements, takes the place of
its graph. Backward runs it in reverse: one function begins each phase, then one for each gradient gives it to its
parameter, in the order and with the activations of the trace, and the last one ends the phase. A gradient has memory of
its own, as autograd's has, until the engine has taken it. Where activations are recomputed, the phase of backward has
the recomputation; the layer is called again for what engines do around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from laconic.plan.model_trace import ModelTrace
from laconic.plan.op_cost import Costs
from laconic.plan.phase import Arrival, Phase
from laconic.rehearse import Machine
from laconic.shard.linear import sink_of

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class PhaseBegin:
    """On the tape: a phase of the model begins."""

    name: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Alive:
    """On the tape: from now on the phase that runs has this many bytes of activations besides those at its start."""

    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Rest:
    """On the tape: a phase ends, and leaves activations, or has freed those of earlier ones."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Together:
    """On the tape: the ranks of a pipeline wait for each other."""

    number: int


class _Output(NamedTuple):
    loss: Tensor


class Phantom:
    """The phases of a model's units, which go onto the tape: [Note: Phantom layers]."""

    def __init__(
        self, machine: Machine, costs: Costs, trace: ModelTrace, model: nn.Module, units: Mapping[int, nn.Module]
    ) -> None:
        """Let the forwards of `model` and its layers play their phases.

        Args:
            machine: has the tape.
            costs: says what operations cost, besides those of the phases.
            trace: the trace of the model, which may have more layers.
            model: the model, the trace's last unit.
            units: the layers of `model`, by their numbers in `trace`, in the order of execution.

        Raises:
            ValueError: the units do not run one after the other, forward and then backward.
        """
        self._machine, self._mark, self._costs, self._trace = machine, machine.mark, costs, trace
        self._root = len(trace.units) - 1
        self._modules = {**units, self._root: model}
        kept = [phase for phase in trace.phases if phase.unit in self._modules]
        self._forward = [phase for phase in kept if not phase.is_backward]
        self._backward: dict[int, list[Phase]] = {unit: [] for unit in units}
        self._root_backward: dict[int | None, list[Phase]] = {}
        """The phases of the root's backward, by the layer whose backward comes before; None is the begin."""
        last = None
        for phase in kept:
            if phase.is_backward and phase.unit == self._root:
                self._root_backward.setdefault(last, []).append(phase)
            elif phase.is_backward:
                last = phase.unit
                self._backward[last].append(phase)
        order = [phase.unit for phase in self._forward if phase.unit != self._root]
        back = list(dict.fromkeys(s.unit for s in reversed(kept) if s.is_backward and s.unit != self._root))
        if len(set(order)) != len(order) or [unit for unit in order if unit in back] != back:
            raise ValueError("the layers of this model do not run one after the other, so no plan can follow them")
        self._after: int | None = None
        """The most activations since the last gradient."""
        self._rest: int | None = None
        self._is_recomputing = False
        for unit, module in units.items():
            module.forward = partial(self._run_layer, unit)
        model.forward = self._run_model

    def _run_model(self, *_: Any, **__: Any) -> Any:
        hidden = torch.empty(0, device=META)
        for phase in self._forward:
            if phase.unit == self._root:
                self._begin(phase)
                continue
            self.end()
            hidden = self._chain(hidden, self._root, self._root_backward.get(phase.unit, []))
            hidden = self._modules[phase.unit](hidden)
        self.end()
        hidden = self._chain(hidden, self._root, self._root_backward.get(None, []))
        loss = hidden.sum()
        self._machine.take(loss, is_device=self._machine.device.type != "cpu")  # what follows is the trainer's own
        return _Output(loss)

    def _run_layer(self, unit: int, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        if self._is_recomputing:
            return hidden
        for phase in self._forward:
            if phase.unit == unit:
                self._begin(phase)
        self.end()
        return self._chain(hidden, unit, self._backward[unit])

    # -- phases --------------------------------------------------------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        self.end()
        if phase.unit != self._root:
            self._mark((phase.unit, phase.is_backward))
        self._mark(PhaseBegin(self._trace.units[phase.unit], phase))
        self._rest = phase.end_bytes

    def _note_after(self) -> None:
        if self._after is not None:
            self._mark(Alive(self._after))
            self._after = None

    def end(self) -> None:
        """End the phase that runs, if one does."""
        self._note_after()
        if self._rest is not None:
            self._mark(Rest(self._rest))
            self._rest = None

    # -- backward ------------------------------------------------------------------------------------------------------

    def _chain(self, hidden: Tensor, unit: int, phases: Sequence[Phase]) -> Tensor:
        """Add the functions whose backward plays `phases`, given in its order."""
        for phase in reversed(phases):
            hidden = _Step.apply(hidden, None, lambda _: self.end())
            for arrival in reversed(phase.arrivals):
                hidden = _Step.apply(hidden, self._shown(unit, arrival.name), partial(self._give, arrival))
            hidden = _Step.apply(hidden, None, partial(self._begin_backward, phase))
        return hidden

    def _shown(self, unit: int, name: str) -> Any:
        path, _, own = name.rpartition(".")
        return self._modules[unit].get_submodule(path)._parameters[own]

    def _begin_backward(self, phase: Phase, _: None) -> None:
        self._begin(phase)
        module = self._modules[phase.unit]
        if phase.unit != self._root and getattr(module, "gradient_checkpointing", False):
            self._is_recomputing = True
            # not the layer's own __call__: that of transformers would begin another recomputation
            nn.Module.__call__(module, hidden_tensor(0, dtype=torch.float32))
            self._is_recomputing = False

    def _give(self, arrival: Arrival, parameter: Tensor) -> Tensor | None:
        """Give a parameter its gradient. The phase's cost has it already."""
        self._note_after()
        self._after = arrival.after_bytes
        sink = sink_of(parameter)
        with self._costs.silent():
            if arrival.is_in_place and sink is not None and sink[0].accepts(sink[1], parameter.shape, parameter.dtype):
                self._mark(Alive(arrival.at_bytes))
                rows, columns = parameter.shape
                dtype = parameter.dtype
                sink[0].add_product(
                    sink[1], hidden_tensor(rows, 1, dtype=dtype), hidden_tensor(1, columns, dtype=dtype)
                )
                return None
            self._mark(Alive(arrival.at_bytes - parameter.nbytes))
            return torch.empty_like(parameter)


class _Step(torch.autograd.Function):
    """The identity, whose backward calls `action` with a parameter and returns the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parameter: Tensor | None, action: Callable[[Any], Tensor | None]) -> Tensor:
        ctx.parameter, ctx.action = parameter, action
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, ctx.action(ctx.parameter), None


def hidden_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without elements, whose memory nobody records."""
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device=META)
