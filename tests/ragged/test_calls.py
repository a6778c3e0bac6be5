"""The step of an optimizer calls few functions of laconic for each tensor."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import optimizer

import laconic
from laconic.ragged import steps
from tests.support.calls import calls_in
from tests.support.launch import on_ranks


def calls_of_a_step(num_tensors: int, options: dict[str, bool]) -> int:
    model: Any = laconic.fully_shard(nn.ParameterList([nn.Parameter(torch.ones(8, 4)) for _ in range(num_tensors)]))
    adamw = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    return calls_in(adamw.step)


@pytest.mark.parametrize(
    ("options", "most"), [({"foreach": False}, 36), ({"foreach": True}, 8), ({"fused": True}, 2)], ids=str
)
@on_ranks(2, local=1)
def test_a_step_of_adamw_makes_few_calls_for_each_tensor(options: dict[str, bool], most: int) -> None:
    assert (calls_of_a_step(40, options) - calls_of_a_step(8, options)) / 32 <= most


@on_ranks(1, local=1)
def test_one_hook_hears_of_the_steps_with_sharded_parameters_alone() -> None:
    with ExitStack() as patches:
        for place, name in ((steps, "_handles"), (steps, "_before")):
            patches.enter_context(mock.patch.object(place, name, []))
        hooks = [
            patches.enter_context(mock.patch.object(optimizer, f"_global_optimizer_{when}_hooks", OrderedDict()))
            for when in ("pre", "post")
        ]
        plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
        assert [len(each) for each in hooks] == [0, 0]
        models: list[Any] = [laconic.fully_shard(nn.Linear(2, 2)) for _ in range(2)]
        assert [len(each) for each in hooks] == [1, 1]
        told: list[torch.optim.Optimizer] = []
        steps.before_step(lambda step: told.append(step.optimizer))
        ours = torch.optim.SGD(models[0].parameters())
        plain.step()
        ours.step()
        assert told == [ours]
