"""Each optimizer of torch trains a sharded model as a whole one, or says why not, also if it has state before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.optim import AdamW8bit
from laconic.ragged.optimizer_state import move_state
from tests.kernels.apart import told
from tests.support.launch import on_ranks
from tests.support.sharded_net import build, full_parameters, shard, train_step


def moved(optimizer: torch.optim.Optimizer, model: Any) -> Any:
    """Shard a model, and give the optimizer its parameters, as accelerate does."""
    before = list(model.parameters())
    model = shard(model)
    replaced = dict(zip(before, model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [replaced[each] for each in group["params"]]
    move_state(optimizer, replaced.items())
    return model


@on_ranks(3)
def test_state_goes_with_parameters_that_are_replaced() -> None:
    plain, model = build(), build()
    wanted, optimizer = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model))
    for each, own in ((plain, wanted), (model, optimizer)):
        torch.manual_seed(0)
        each(torch.randn(4, 5)).square().mean().backward()
        own.step()
        own.zero_grad()
    model = moved(optimizer, model)
    assert set(optimizer.state) == set(model.parameters())
    for each, own in ((plain, wanted), (model, optimizer)):
        torch.manual_seed(1)
        each(torch.randn(4, 5)).square().mean().backward()
        own.step()
    torch.testing.assert_close(full_parameters(model), {k: v.detach() for k, v in plain.named_parameters()})


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adafactor, AdamW8bit])
@on_ranks(2)
def test_state_that_cannot_be_cut_is_refused_and_stays(optimizer_class: Any) -> None:
    model = build()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    before = set(optimizer.state)
    with pytest.raises(ValueError, match=r"has the state '\w+' of shape .*shard the model first"):
        moved(optimizer, model)
    assert set(optimizer.state) == before


@on_ranks(2)
def test_a_list_of_parameters_of_its_own_is_seen() -> None:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters())
    model = moved(optimizer, model)
    with pytest.raises(RuntimeError, match="LBFGS holds 16 parameters that fully_shard has replaced"):
        train_step(model, optimizer)


@pytest.mark.machine
def test_a_sample_of_the_database() -> None:
    found = told("tests.ragged.optimizers", "3", "Adam", "Adafactor", "LBFGS")
    assert found["problems"] == []
    assert found["configurations"] > 40


@pytest.mark.campaign(seconds=120)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_of_the_database(num_ranks: int) -> None:
    found = told("tests.ragged.optimizers", str(num_ranks))
    assert found["problems"] == []
    assert found["configurations"] > 250
