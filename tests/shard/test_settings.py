"""Settings of a parameter, gathered or sharded, hold as in plain torch, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.launch import on_ranks
from tests.support.sharded_net import build, full_parameters, inputs, shard, squared_error

POLICIES: dict[str, dict[str, Any]] = {
    "host": {"cache": "host"},
    "rank": {"cache": "rank"},
    "gathered until backward": {"reshard_after_forward": False},
}
PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "of the root": lambda model: model.inp,
    "of a unit": lambda model: model.blocks[1],
}


def loss_of(model: Any) -> torch.Tensor:
    return squared_error(model, inputs(0, 0))


def double(parameter: Any) -> None:
    parameter.grad.mul_(2)


def watch_sums(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(double)


DEEDS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "freeze at rest": lambda model, layer: layer.requires_grad_(False),
    "freeze after a forward": lambda model, layer: (loss_of(model), layer.requires_grad_(False)),
    "freeze and unfreeze": lambda model, layer: (
        loss_of(model), layer.requires_grad_(False), loss_of(model), layer.requires_grad_(True)
    ),
    "freeze between micro-batches": lambda model, layer: (loss_of(model).backward(), layer.requires_grad_(False)),
    "clear gradients after a forward": lambda model, layer: (
        loss_of(model).backward(), loss_of(model), model.zero_grad()
    ),
    "watch sums after a forward": lambda model, layer: (loss_of(model), watch_sums(layer)),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2, local=1)
def test_settings_hold_in_each_phase(policy: str, place: str) -> None:
    for name, deed in DEEDS.items():
        plain, model = build(), shard(build(), **POLICIES[policy])
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(2):
                if step == 1:
                    deed(each, PLACES[place](each))
                loss_of(each).backward()
                optimizer.step()
                optimizer.zero_grad()
        wanted = {key: parameter.detach() for key, parameter in plain.named_parameters()}
        torch.testing.assert_close(full_parameters(model), wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2, local=1)
def test_what_would_be_lost_is_refused(policy: str) -> None:
    model = shard(build(), **POLICIES[policy])
    with pytest.raises(NotImplementedError, match=r"never run.*register_post_accumulate_grad_hook"):
        model.inp.weight.register_hook(print)
    loss = loss_of(model)
    weight, before = model.inp.weight, model.inp.weight.detach().clone()
    weight.data = before * 2
    with pytest.raises(RuntimeError, match=r"the .data of the gathered parameter inp.weight was replaced"):
        loss.backward()
    model.reset_iter_state()
    loss_of(model).backward()
    assert torch.equal(full_parameters(model)["inp.weight"], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2, local=1)
def test_another_dtype_keeps_gradients_hooks_and_attributes(dtype: torch.dtype) -> None:
    plain, model, seen = build(), shard(build()), list[tuple[bool, torch.dtype]]()
    for each in (plain, model):
        weight: Any = each.inp.weight
        weight.mark = 3
        weight.register_post_accumulate_grad_hook(lambda p, is_ours=each is model: seen.append((is_ours, p.grad.dtype)))
        loss_of(each).backward()
        each.to(dtype)
        squared_error(each, tuple(tensor.to(dtype) for tensor in inputs(0, 0))).backward()  # type: ignore[arg-type]
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert each.inp.weight.mark == 3
    assert seen == [(is_ours, kind) for is_ours in (False, True) for kind in (torch.float32, dtype)]
    wanted = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(full_parameters(model), wanted)


@on_ranks(2, local=1)
def test_another_dtype_while_sums_wait_is_refused() -> None:
    model = shard(build())
    with model.no_sync():
        loss_of(model).backward()
    with pytest.raises(ValueError, match=r"cannot change the dtype of .*, as sums of its gradients wait"):
        model.double()


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2, local=1)
def test_state_dicts_in_inference_mode(policy: str) -> None:
    """Their tensors have versions, so a model may load them and train."""
    model, other = (shard(build(seed=seed), **POLICIES[policy]) for seed in (0, 1))
    with torch.inference_mode():
        loss_of(model)
        state = model.state_dict()
    other.load_state_dict(state)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss_of(other).backward()
    optimizer.step()
    found, before = full_parameters(other), full_parameters(model)
    assert all(not torch.equal(found[name], before[name]) for name in ("inp.weight", "blocks.1.up.weight"))


@on_ranks(2, local=1)
def test_a_freeze_while_gathered_is_the_sharded_parameters_own_at_once() -> None:
    model: Any = shard(build())
    loss_of(model)  # no backward follows, and the root is gathered
    model.inp.requires_grad_(False)
    model.reshard()
    assert [parameter.requires_grad for parameter in (*model.inp.parameters(), model.out.weight)] == [
        False,
        False,
        True,
    ]
