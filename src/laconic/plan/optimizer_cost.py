"""An optimizer's step on whole tensors: the trainer's own, rehearsed on one rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from laconic.config import OptimizerConfig
from laconic.plan.op_cost import Costs
from laconic.plan.phase import OpWork, Phase
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
        work: list[OpWork] = []
        held = most = 0
        for entry in tape.entries[places[-2] : places[-1]]:
            if isinstance(entry, Free):
                held -= tape.memories[entry.memory].nbytes
            elif isinstance(entry, Step) and entry.allocates is not None:
                held += tape.memories[entry.allocates].nbytes
            elif isinstance(entry, Step) and isinstance(entry.cost, OpWork):
                work.append(entry.cost)
            most = max(most, held)
    phase = Phase(work=tuple(work), peak_bytes=0, end_bytes=0)
    return OptimizerCost(state_bytes=state_bytes, transient_bytes=most, phase=phase)
