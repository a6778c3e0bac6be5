"""Weights that come after `fully_shard`: from the meta device, or assigned by a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

import laconic
from laconic.ragged.tensor import RaggedTensor
from tests.shard import test_models
from tests.support.launch import on_ranks
from tests.support.sharded_net import Net, buckets, build, full_parameters, inputs, shard, squared_error, train_step


def reset_all(model: nn.Module) -> None:
    """Initialise as module constructors do."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()


class Layers(nn.Module):
    """Modules with different `reset_parameters`: rows set to zero, bounds from fan-in, in-projections."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8, padding_idx=0)
        self.last = nn.Embedding(5, 8, padding_idx=-1)
        self.conv = nn.Conv1d(8, 6, 3)
        self.linear = nn.Linear(7, 9)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(8, 2)
        self.lstm = nn.LSTM(3, 4)
        self.bilinear = nn.Bilinear(2, 3, 4)


CASES: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = [
    (Layers, reset_all),
    (test_models.gpt2, lambda model: model.init_weights()),
    (test_models.mixtral, lambda model: model.init_weights()),
]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def initialise(model: nn.Module, init: Callable[[nn.Module], Any]) -> None:
    model.to_empty(device="cpu")
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()  # `to_empty` breaks ties in a plain model, and keeps them in a sharded one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(77)  # a value that must not remain
    torch.manual_seed(11)
    init(model)


@on_ranks(3, local=1)
def test_initialising_parts_draws_the_same_numbers() -> None:
    mesh = laconic.init_mesh("cpu")
    for make, init in CASES:
        plain, model = on_meta(make), on_meta(make)
        units = test_models.units_of(model) if make is not Layers else [model.attention, model.lstm]  # type: ignore[list-item]
        for unit in units:
            laconic.fully_shard(unit, mesh=mesh)
        laconic.fully_shard(model, mesh=mesh)
        assert all(parameter.is_meta for parameter in model.parameters())
        identities = [id(parameter) for parameter in model.parameters()]
        for net in (plain, model):
            initialise(net, init)
        assert [id(parameter) for parameter in model.parameters()] == identities, make
        got = full_parameters(model)
        for key, want in plain.named_parameters():
            assert torch.equal(got[key], want), f"{make}: {key}"
            assert not want.eq(77).all()
        if make is test_models.gpt2:
            assert model.lm_head.weight is model.transformer.wte.weight, "what is tied stays so"  # type: ignore[union-attr]
        for key, want in plain.named_buffers():
            assert torch.equal(model.get_buffer(key), want) or not want.is_floating_point(), f"{make}: {key}"


@pytest.mark.parametrize("cache", ["host", "rank"])
@on_ranks(2, local=1)
def test_parameters_left_on_meta_are_named(cache: str) -> None:
    model: Any = shard(on_meta(Net), cache=cache)
    for block in model.blocks:
        block.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"out.weight.* are on the meta device; call model.to_empty"):
        model(torch.zeros(2, 5))


@on_ranks(4, local=2)
def test_a_model_from_meta_trains() -> None:
    """No rank holds more than its shard before the first forward. Afterwards the model trains like any other."""
    model, plain = shard(on_meta(Net), cache="host"), on_meta(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # made before the parameters have memory
    for each in (model, plain):
        initialise(each, reset_all)
    assert model.memory().device_peak_bytes == sum(bucket.shard.nbytes for bucket in buckets(model))
    loss, batch = train_step(model, optimizer), inputs(0, dist.get_rank())
    torch.testing.assert_close(loss, squared_error(plain, batch).detach())
    before = dict(plain.named_parameters())
    assert all(not torch.equal(before[name], value) for name, value in full_parameters(model).items())


FORMS: list[Callable[[RaggedTensor, Tensor], Tensor]] = [
    lambda parameter, value: torch.empty_like(parameter, requires_grad=False).copy_(value),
    lambda parameter, value: nn.Parameter(value.clone()),
    lambda parameter, value: distribute_tensor(value, parameter.device_mesh, parameter.placements),
]


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@on_ranks(3, local=1)
def test_assigned_values_are_taken() -> None:
    for form in FORMS:
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
        loss = train_step(model, optimizer)
        torch.testing.assert_close(loss, squared_error(build(seed=1), inputs(0, dist.get_rank())).detach())
        assert not torch.equal(model.out.weight.full_tensor(), want["out.weight"]), "the optimizer trains what is shown"


@on_ranks(2, local=1)
def test_a_model_on_the_meta_device_gets_memory() -> None:
    want = build(seed=1).state_dict()
    for broadcast in (True, False):
        model = shard(on_meta(Net))
        given = dict(want) if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, given, options=options)
        assert_equal(full_parameters(model), want)
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = shard(on_meta(Net))
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
        shard(on_meta(Net)).load_state_dict(
            {k: v for k, v in want.items() if k != "out.bias"}, assign=True, strict=False
        )
