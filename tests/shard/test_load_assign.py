"""`load_state_dict(assign=True)` gives a sharded model the values; the sharded parameters stay the ones that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import on_ranks
from tests.support.sharded_net import Net, build, full_parameters, inputs, shard, squared_error, train_step


def distributed(parameter: RaggedTensor, value: Tensor) -> Tensor:
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


FORMS: dict[str, Callable[[RaggedTensor, Tensor], Tensor]] = {
    "ragged": lambda parameter, value: torch.empty_like(parameter, requires_grad=False).copy_(value),
    "plain": lambda parameter, value: value.clone(),
    "parameter": lambda parameter, value: nn.Parameter(value.clone()),
    "dtensor": distributed,
}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def on_meta() -> Any:
    with torch.device("meta"):
        model = Net()
    return shard(model)


@on_ranks(3, local=1)
def test_assigned_values_are_taken() -> None:
    for form in FORMS.values():
        model = shard(build(), cache="host")
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        train_step(model)
        with torch.no_grad():
            model(inputs(0, 0)[0])  # the root stays gathered
        want = build(seed=1).state_dict()
        model.load_state_dict({name: form(parameters[name], v) for name, v in want.items()}, assign=True)
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert_equal(full_parameters(model), want)
        reference = build(seed=1)
        loss = train_step(model, optimizer)
        torch.testing.assert_close(loss, squared_error(reference, inputs(0, dist.get_rank())).detach())
        assert not torch.equal(model.out.weight.full_tensor(), want["out.weight"]), "the optimizer trains what is shown"


@on_ranks(4, local=2)
def test_a_model_on_the_meta_device_gets_memory() -> None:
    want = build(seed=1).state_dict()
    for broadcast in (True, False):
        model = on_meta()
        given = dict(want) if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, given, options=options)
        assert_equal(full_parameters(model), want)
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = on_meta()
    model.load_state_dict(want, assign=True)
    assert_equal(full_parameters(model), want)


@on_ranks(2, local=1)
def test_what_would_be_lost_is_refused() -> None:
    model, want = shard(build()), build(seed=1).state_dict()
    with pytest.raises(RuntimeError, match=r"torch.float32 of shape .*, cannot become torch.float64.*convert"):
        model.load_state_dict({name: v.double() for name, v in want.items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"cannot become torch\.float64"):
        train_step(model)
    model.load_state_dict(want, assign=True)
    assert_equal(full_parameters(model), want)
    with pytest.raises(RuntimeError, match=r"got values, but not out.bias, .*; call to_empty first"):
        on_meta().load_state_dict({k: v for k, v in want.items() if k != "out.bias"}, assign=True, strict=False)
