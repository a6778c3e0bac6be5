"""The step of an optimizer calls few functions of laconic for each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import laconic
from tests.support.calls import calls_in
from tests.support.launch import on_ranks


def calls_of_a_step(num_tensors: int, options: dict[str, bool]) -> int:
    model: Any = laconic.fully_shard(nn.ParameterList([nn.Parameter(torch.ones(8, 4)) for _ in range(num_tensors)]))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return calls_in(optimizer.step)


@pytest.mark.parametrize(
    ("options", "most"), [({"foreach": False}, 36), ({"foreach": True}, 8), ({"fused": True}, 2)], ids=str
)
@on_ranks(2, local=1)
def test_a_step_of_adamw_makes_few_calls_for_each_tensor(options: dict[str, bool], most: int) -> None:
    assert (calls_of_a_step(40, options) - calls_of_a_step(8, options)) / 32 <= most
