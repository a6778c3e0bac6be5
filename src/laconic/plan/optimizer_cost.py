"""An optimizer's step on whole tensors, for programs that are written by hand: the trainer's own, rehearsed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from laconic.comm.traffic import Level
from laconic.config import OptimizerConfig
from laconic.plan.machine import PlanTransfer, Simulator
from laconic.plan.op_cost import Costs, OpWork
from laconic.plan.phase import Operations, Phase
from laconic.rehearse import rehearsal
from laconic.rehearse.tape import Free, Mark, Step
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_optimizer

_STEPS = 2
"""The first makes the states; the second is read."""


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """An optimizer's step on one rank that holds its parameters whole."""

    state_bytes: float = 0.0
    transient_bytes: float = 0.0
    """The most bytes that the step takes besides."""
    phase: Phase


def optimizer_cost(settings: OptimizerConfig, model: nn.Module, device_type: str) -> OptimizerCost:
    """The cost of a step on the trainable parameters of `model`, which is on the meta device and stays as it is."""
    costs, model = Costs(), copy.deepcopy(model)
    with rehearsal(device_type=device_type, cost_of=costs) as machine, machine.recording() as tape:
        costs.machine = machine
        model.to_empty(device=machine.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make_optimizer(model, settings)
        for step in range(_STEPS):
            machine.mark(step)
            optimizer.step()
        machine.mark(_STEPS)
        state_bytes = state_nbytes(optimizer)
        places = [place for place, entry in enumerate(tape.entries) if isinstance(entry, Mark)]
        work: list[Operations] = []
        held = most = 0
        for entry in tape.entries[places[-2] : places[-1]]:
            if isinstance(entry, Free):
                held -= tape.memories[entry.memory].nbytes
            elif isinstance(entry, Step) and entry.allocates is not None:
                held += tape.memories[entry.allocates].nbytes
            elif isinstance(entry, Step) and isinstance(entry.cost, OpWork):
                work.append(Operations(dtype=None, flops=0.0, memory_bytes=entry.cost.nbytes, count=1))
            most = max(most, held)
    phase = Phase(work=tuple(work), peak_bytes=0, end_bytes=0)
    return OptimizerCost(state_bytes=state_bytes, transient_bytes=most, phase=phase)


@cache
def adamw_cost(settings: OptimizerConfig, numel: float, itemsize: int) -> OptimizerCost:
    """The cost of torch's AdamW on a flat tensor of `numel` elements."""
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    flat = nn.Parameter(torch.empty(round(numel), dtype=dtype, device="meta"))
    return optimizer_cost(settings, nn.ParameterList([flat]), "cpu")


class UpdateCost:
    """The gradient norm and the optimizer's step, which follow backward."""

    def __init__(self, machine: Simulator, cost: OptimizerCost, *, gradient_bytes: float) -> None:
        """`gradient_bytes` are those of this rank's gradients."""
        self._machine, self._cost = machine, cost
        self._gradient_bytes = gradient_bytes
        self._has_states = False

    def run(self, norms: Mapping[Level, float]) -> None:
        """Clip, and step. `norms` has the bytes that a rank sends on each level for the norms."""
        machine = self._machine
        machine.touch("norm", self._gradient_bytes)
        machine.wait(machine.send(PlanTransfer(name="norm", purpose="control", sent=dict(norms))), "norm")
        machine.touch("clip", 2 * self._gradient_bytes)
        if not self._has_states:
            self._has_states = True
            machine.hold("optimizer", self._cost.state_bytes)
        with machine.holding("transfers", self._cost.transient_bytes):
            machine.compute("optimizer", self._cost.phase)
