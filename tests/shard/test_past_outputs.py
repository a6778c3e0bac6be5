"""Losses that reach a unit's operations past its outputs: [Note: Losses past the outputs] in shard/hooks.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic._compat import may_pack_saved_tensors
from tests.support.launch import on_ranks
from tests.support.sharded_net import Net, build, full_gradients, full_parameters, inputs, shard


class Scale(nn.Module):
    """A layer whose product saves the parameter itself. A linear layer saves a view."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, d))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda d: nn.Linear(d, d),
    "linear without a bias": lambda d: nn.Linear(d, d, bias=False),
    "layer norm": nn.LayerNorm,
    "RMS norm": nn.RMSNorm,
    "convolution": lambda d: nn.Sequential(nn.Unflatten(1, (1, d)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()),
    "product": Scale,
    "bilinear": lambda d: Twice(nn.Bilinear(d, d, d)),
}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Keeping(nn.Module):
    """A unit that keeps a feature."""

    def __init__(self, layer: nn.Module, d: int) -> None:
        super().__init__()
        self.first, self.last = layer, nn.Linear(d, d)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x).sigmoid()  # an output that its own node saves
        return x + self.last(self.kept)


def build_keeping(layer: str) -> Any:
    def make() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList(Keeping(LAYERS[layer](17), 17) for _ in range(3))
        return model

    return build(make)


def loss_of_features(model: Any, step: int) -> Tensor:
    model(inputs(step, 0)[0])
    return sum(block.kept.square().mean() for block in model.blocks[:2])


def loss_of_all(model: Any, step: int) -> Tensor:
    return model(inputs(step, 0)[0]).square().mean() + loss_of_features(model, step)


def loss_of_features_at_times(model: Any, step: int) -> Tensor:
    output = model(inputs(step, 0)[0])
    return output.square().mean() if step % 2 else model.blocks[1].kept.mean()


def loss_of_a_hook(model: Any, step: int) -> Tensor:
    taken: list[Tensor] = []
    with model.blocks[1].first.register_forward_hook(lambda module, args, output: taken.append(output)):
        model(inputs(step, 0)[0])
    return taken[0].square().mean()


LOSSES = (loss_of_features, loss_of_all, loss_of_features_at_times, loss_of_a_hook)


def train(model: Any, loss_of: Callable[[Any, int], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world", "local", "layer", "policies"),
    [
        *((2, 1, layer, {"cache": "host"}) for layer in LAYERS),
        *((3, 3, "layer norm", each) for each in ({}, {"cache": "device"}, {"cache": "rank"})),
        (3, 3, "layer norm", {"reshard_after_forward": False}),
    ],
)
@on_ranks("world", local="local")
def test_losses_past_the_outputs_train_as_in_plain_torch(layer: str, policies: dict[str, Any]) -> None:
    for loss_of in LOSSES if layer == "linear" else [loss_of_features_at_times]:
        plain, model = build_keeping(layer), build_keeping(layer)
        shard(model, **policies)
        for each in (plain, model):
            train(each, loss_of)
        msg = lambda text, name=loss_of.__name__: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(full_parameters(model), dict(plain.state_dict()), msg=msg)


class Failing(Keeping):
    """Its second forward raises; it counts the forwards in which somebody packs what autograd saves."""

    num_forwards = num_packed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        self.num_packed += not may_pack_saved_tensors(type(None))
        if self.num_forwards == 2:
            raise ArithmeticError
        return super().forward(x)


@on_ranks(2, local=1)
def test_units_that_are_reached_by_their_outputs_stop_looking() -> None:
    model: Any = Net()
    model.blocks[1] = Failing(nn.Linear(17, 17), 17)
    shard(model)
    for step in range(6):
        x = inputs(step, 0)[0]
        with pytest.raises(ArithmeticError) if step == 1 else nullcontext():
            model(x).square().mean().backward()
        assert may_pack_saved_tensors(type(None)), "somebody still packs"
    assert (model.blocks[1].num_forwards, model.blocks[1].num_packed) == (6, 3)


@pytest.mark.parametrize("layer", LAYERS)
@on_ranks(2, local=1)
def test_a_loss_that_first_comes_later_is_an_error_of_autograd(layer: str) -> None:
    """The memory of what is saved is gone then; the process must not read it. Later steps train on."""
    model = shard(build_keeping(layer))
    for step in range(4):
        model(inputs(step, 0)[0]).square().mean().backward()
    model(inputs(4, 0)[0])
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified by an inplace operation"):
        model.blocks[1].kept.mean().backward()
    model(inputs(5, 0)[0]).square().mean().backward()


class Overwriting(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        with torch.no_grad():
            self.kept.mul_(2)  # type: ignore[union-attr]
        return output


@on_ranks(2, local=1)
def test_a_saved_tensor_that_was_changed_is_an_error_in_each_forward() -> None:
    model: Any = Net()
    model.blocks[1] = Overwriting(nn.Linear(17, 17), 17)
    shard(model)
    for step in range(5):
        with pytest.raises(RuntimeError, match="gradient computation has been modified by an inplace operation"):
            model(inputs(step, 0)[0]).square().mean().backward()


@on_ranks(2, local=1)
def test_a_unit_whose_backward_gathers_nothing_gathers_what_it_has_saved() -> None:
    """A user has said that an embedding's backward needs no weights, and so it is; of a layer it is not."""
    model, plain = shard(build()), build()
    for block in model.blocks:
        block.set_unshard_in_backward(False)
    for step in range(2):
        x, y = inputs(step, 0)
        for net in (model, plain):
            (net(x) - y).square().mean().backward()
    gradients = full_gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
