"""Autograd as FSDP2's users use it: several forwards, gradients of inputs, hooks, unused parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks, run_ranks


def assert_mean_gradients(model: nn.Module, plain: nn.Module, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
    """Compare with an unsharded model that sees the batches of all ranks."""
    for batch in (batch for ranks in batches for batch in ranks):
        (sharded_net.squared_error(plain, batch) / dist.get_world_size()).backward()
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize(("world", "cache"), [(1, "none"), (3, "host")])
@on_ranks("world", local=1)
def test_gradients_of_inputs_leave_those_of_weights_alone(cache: str) -> None:
    """`autograd.grad` of an input leaves no gradient behind, and sends none."""
    model, plain = sharded_net.shard(sharded_net.build(), cache=cache), sharded_net.build()
    rank = dist.get_rank()
    x = sharded_net.inputs(0, rank)[0].requires_grad_()
    with sharded_net.moved(model) as moved:
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(gradient, expected)
    assert moved.gradients == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    sharded_net.assert_nothing_gathered(model)
    oracle, batches = sharded_net.oracle_of(model), sharded_net.micro_batches(1)
    sharded_net.squared_error(model, batches[0][rank]).backward()
    sharded_net.assert_gradients(model, oracle, batches)


@on_ranks(2, local=1)
def test_a_penalty_may_not_reach_the_outputs() -> None:
    """The gradient of a linear model does not depend on its outputs, so their hooks never run."""
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(5, 3, bias=False)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    laconic.fully_shard(model)
    for module in (model, plain):
        x = sharded_net.inputs(0, 0)[0].requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)  # type: ignore[union-attr]
    sharded_net.assert_nothing_gathered(model)


@pytest.mark.parametrize(("world", "cache"), [(1, "none"), (2, "none"), (2, "host"), (2, "device"), (2, "rank")])
@on_ranks("world", local=1)
def test_gradient_penalty(cache: str) -> None:
    """The gradient of a gradient needs the weights once more."""
    model, plain = sharded_net.shard(sharded_net.build(), cache=cache), sharded_net.build()
    for module in (model, plain):
        x = sharded_net.inputs(0, 0)[0].requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
    sharded_net.assert_nothing_gathered(model)


class Wide(nn.Module):
    """A block whose weights are much larger than its activations."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class WideNet(sharded_net.Net):
    make_block = Wide

    def __init__(self) -> None:
        super().__init__(num_blocks=5, d=64)


def job_several_forwards(num_forwards: int, order: str) -> tuple[int, int]:
    """Return the peak of the engine's memory, which has no activations, and the bytes of gradients."""
    model = sharded_net.shard(sharded_net.build(WideNet), reshard_after_forward=True)
    model.set_reduce_once_per_backward(order == "reduced once")
    plain, rank = sharded_net.build(WideNet), dist.get_rank()
    batches = sharded_net.micro_batches(num_forwards)
    for _ in range(2):  # the second step prefetches
        model.zero_grad()
        model.reset_peak_memory()
        with sharded_net.moved(model) as moved:
            if order == "one by one":
                for batch in batches:
                    sharded_net.squared_error(model, batch[rank]).backward()
            else:
                sum(sharded_net.squared_error(model, batch[rank]) for batch in batches).backward()  # type: ignore[union-attr]
    assert_mean_gradients(model, plain, batches)
    sharded_net.assert_nothing_gathered(model)
    return model.memory().device_peak_bytes, moved.gradients


def test_several_forwards_take_the_memory_of_one() -> None:
    """FSDP2 frees and reduces after the backward of each forward, too."""
    for num_forwards in (2, 3):
        alone, reduced_alone = run_ranks(job_several_forwards, 2, num_forwards, "one by one", local=1)[0]
        peak, reduced_bytes = run_ranks(job_several_forwards, 2, num_forwards, "together", local=1)[0]
        assert peak <= alone
        assert reduced_alone / num_forwards < reduced_bytes <= reduced_alone
    peak, reduced_bytes = run_ranks(job_several_forwards, 2, 3, "reduced once", local=1)[0]
    assert peak > alone
    assert reduced_bytes == reduced_alone / 3


class Gated(nn.Module):
    """A block that uses one of three layers, and another only on rank 0."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.used, self.idle, self.rare = (nn.Linear(d, d) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.used(x)
        return x + self.rare(x) if dist.get_rank() == 0 else x


class GatedNet(sharded_net.Net):
    make_block = Gated


def job_unused_parameters(local_steps: int) -> None:
    model: Any = sharded_net.shard(sharded_net.build(GatedNet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = {name: whole.clone() for name, whole in sharded_net.full_parameters(model).items()}
    for number in range(local_steps):
        model.set_requires_gradient_sync(number == local_steps - 1)
        sharded_net.squared_error(model, sharded_net.inputs(number, dist.get_rank())).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("idle" in name), name
    optimizer.step()
    for name, whole in sharded_net.full_parameters(model).items():
        assert torch.equal(whole, before[name]) == ("idle" in name), name


@pytest.mark.parametrize(("world", "num_micro_batches"), [(1, 1), (3, 1), (2, 2)])
def test_a_parameter_that_no_rank_used_has_no_gradient(world: int, num_micro_batches: int) -> None:
    run_ranks(job_unused_parameters, world, num_micro_batches, local=1)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return sum(self.layers[index](x) for index in chosen)  # type: ignore[return-value]


@on_ranks(2, local=1)
def test_use_in_one_step_does_not_count_in_the_next() -> None:
    """The second backward of a step has nothing to agree on; its use must not count in the next step."""
    model: Any = laconic.fully_shard(Chosen())
    for _ in range(2):
        model(torch.ones(1, 3), [0, 1]).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 3), [0]).sum().backward()
    assert model.layers[0].weight.grad is not None
    assert model.layers[1].weight.grad is None


@on_ranks(2, local=1)
def test_inputs_may_be_changed_in_place() -> None:
    """A unit may change its inputs in place; FSDP2 of torch 2.13 refuses."""
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))) for _ in "ab")
    model.load_state_dict(plain.state_dict())
    laconic.fully_shard(model[1])
    laconic.fully_shard(model)
    for each in (plain, model):
        each(torch.ones(2, 3)).sum().backward()
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)


@on_ranks(2, local=1)
def test_training_may_follow_inference_mode() -> None:
    model = sharded_net.shard(sharded_net.build(), cache="host")
    with torch.inference_mode():
        model(sharded_net.inputs(0, 0)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        sharded_net.train_step(model, optimizer, seed)


@pytest.mark.parametrize("has_hooks", [False, True])
@on_ranks(2, local=1)
def test_micro_batches_keep_what_they_have_used(has_hooks: bool) -> None:
    """Micro-batches without synchronisation neither run hooks nor forget which parameters were used."""
    model: Any = sharded_net.shard(sharded_net.build())
    oracle, batches, rank = sharded_net.oracle_of(model), sharded_net.micro_batches(2), dist.get_rank()
    seen: list[Tensor] = []
    if has_hooks:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(seen.append)
    model.set_requires_gradient_sync(False)
    sharded_net.squared_error(model, batches[0][rank]).backward()
    assert not seen
    model.set_requires_gradient_sync(True)
    x = batches[1][rank][0].clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)  # sends the partial sums
    sharded_net.squared_error(model, batches[1][rank]).backward()
    sharded_net.assert_gradients(model, oracle, batches)
    assert len(seen) == 2 * has_hooks * len(list(model.parameters()))


@on_ranks(2, local=1)
def test_parameters_may_be_frozen_between_micro_batches() -> None:
    """Parameters that are frozen between two micro-batches keep the gradient of the first."""
    model, plain = sharded_net.shard(sharded_net.build()), sharded_net.build()
    for micro_batch in range(2):
        model.set_requires_gradient_sync(micro_batch == 1)
        for module in (model, plain):
            module.blocks[0].requires_grad_(micro_batch == 0)
            module.out.bias.requires_grad_(micro_batch == 0)
        sharded_net.squared_error(model, sharded_net.inputs(micro_batch, dist.get_rank())).backward()
        for rank in range(dist.get_world_size()):
            (sharded_net.squared_error(plain, sharded_net.inputs(micro_batch, rank)) / dist.get_world_size()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("world", [1, 3])
@on_ranks("world", local=1)
def test_hooks_run_when_the_reduced_gradient_is_in_place() -> None:
    """Each hook sees the reduced gradient, takes a step, and frees the gradient."""
    model, plain = sharded_net.shard(sharded_net.build()), sharded_net.build()
    seen = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            seen.append(name)
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(2):
        sharded_net.squared_error(model, sharded_net.inputs(seed, dist.get_rank())).backward()
        for rank in range(dist.get_world_size()):
            (sharded_net.squared_error(plain, sharded_net.inputs(seed, rank)) / dist.get_world_size()).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert sorted(seen) == sorted(2 * [name for name, _ in plain.named_parameters()])
    for name, whole in sharded_net.full_parameters(model).items():
        torch.testing.assert_close(whole, plain.get_parameter(name).detach(), msg=name)


@dataclass(frozen=True)
class Activations:
    hidden: Tensor
    step: int


class Records(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: Activations) -> Activations:
        return Activations(x.hidden + self.linear(x.hidden), x.step + 1)


class RecordNet(sharded_net.Net):
    make_block = Records

    def forward(self, x: Tensor) -> Tensor:
        record = Activations(self.inp(x), 0)
        for block in self.blocks:
            record = block(record)
        assert record.step == len(self.blocks)
        return self.out(record.hidden)


@on_ranks(2, local=1)
def test_dataclasses_of_tensors_go_in_and_out() -> None:
    model = sharded_net.shard(sharded_net.build(RecordNet))
    batches = sharded_net.micro_batches(1)
    sharded_net.squared_error(model, batches[0][dist.get_rank()]).backward()
    assert_mean_gradients(model, sharded_net.build(RecordNet), batches)


@pytest.mark.machine
@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world", local=1)
def test_forward_mode_derivatives() -> None:
    model, plain = sharded_net.shard(sharded_net.build()), sharded_net.build()
    x, tangent = sharded_net.inputs(0, 0)[0], sharded_net.inputs(1, 0)[0]
    found, expected = (torch.func.jvp(module, (x,), (tangent,)) for module in (model, plain))
    torch.testing.assert_close(found, expected)
    x.requires_grad_()
    for module in (model, plain):
        value, slope = torch.func.jvp(module, (x,), (tangent,))
        (value.sum() + slope.square().sum()).backward()
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)


@on_ranks(4, local=2)
def test_sums_in_half_precision_do_not_overflow() -> None:
    """The sum of 4 gradients of 30,000 exceeds the largest float16, 65,504; their mean does not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = laconic.fully_shard(nn.Linear(1, 1, bias=False), mp_policy=policy)
    model(torch.full((1, 1), 30_000.0)).sum().backward()
    assert model.weight.grad.full_tensor().item() == pytest.approx(30_000, rel=1e-3)  # type: ignore[union-attr]
