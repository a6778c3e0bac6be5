"""What autograd keeps, counted exactly, now and over a step."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.cyclic.stages.meter import ActivationMeter, Trace, trace

FLOAT = 4


def test_what_one_layer_saves_until_its_backward() -> None:
    meter, linear = ActivationMeter(), nn.Linear(8, 16)
    x = torch.randn(4, 8)
    with meter.forward(linear):
        y = linear(x).tanh()
    assert meter.live_bytes == 4 * 8 * FLOAT + 4 * 16 * FLOAT  # the input and tanh's output; not the weight
    assert meter.live_stages == 1
    y.sum().backward()
    assert meter.live_bytes == meter.live_stages == 0
    assert meter.peak_bytes == 4 * 24 * FLOAT
    assert meter.peak_stages == 1


def test_a_storage_counts_once_however_many_save_it() -> None:
    meter, module = ActivationMeter(), nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
    x = torch.randn(4, 8)
    with meter.forward(module):
        a = module[0](x)
        b = module[1](x[:2])
    assert meter.live_bytes == x.nbytes
    a.sum().backward()
    assert meter.live_bytes == x.nbytes
    b.sum().backward()
    assert meter.live_bytes == 0


def test_stage_activations_live_until_the_last_of_them_dies() -> None:
    meter, stages = ActivationMeter(), [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    value, boundaries = torch.randn(2, 4), []
    for index, stage in enumerate(stages):
        leaf = value.detach().requires_grad_()
        with meter.forward(stage):
            value = stage(leaf)
        boundaries.append((leaf, value))
        assert meter.live_stages == index + 1
    gradient = torch.ones_like(value)
    while boundaries:
        leaf, output = boundaries.pop()
        output.backward(gradient)
        gradient = leaf.grad
        assert meter.live_stages == len(boundaries)
    assert (meter.peak_stages, meter.live_bytes) == (3, 0)
    meter.reset_peak()
    assert (meter.peak_stages, meter.peak_bytes) == (0, 0)


def test_a_dropped_graph_frees() -> None:
    meter, linear = ActivationMeter(), nn.Linear(4, 4)
    with meter.forward(linear):
        y = linear(torch.randn(2, 4)).relu()  # which saves its output
    assert meter.live_bytes > 0
    del y
    gc.collect()
    assert meter.live_bytes == 0


def test_gradients_are_those_without_the_meter() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(3, 4)
    plain = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    with ActivationMeter().forward(module):
        y = module(x).sum()
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(y, list(module.parameters())), strict=True))


@pytest.mark.parametrize("what", ["weight", "activation"])
def test_a_change_in_place_before_backward_is_caught(what: str) -> None:
    meter, linear = ActivationMeter(), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with meter.forward(linear):
        y = linear(x).tanh()
    with torch.no_grad():
        (linear.weight if what == "weight" else y).add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place after forward: it is at version \d, expected \d"):
        y.sum().backward()


def test_a_parameter_that_points_elsewhere_keeps_its_old_values_for_backward() -> None:
    meter, linear = ActivationMeter(), nn.Linear(4, 4, bias=False)
    x, old = torch.randn(2, 4, requires_grad=True), linear.weight.detach().clone()
    with meter.forward(linear):
        y = linear(x)
    linear.weight.data = torch.zeros(4, 4)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4) @ old)


def staircase(num_stages: int) -> Trace:
    """N equal stages, each 10 bytes from the end of its forward to the end of its backward; one FLOP each way."""
    up = [10 * j for j in range(num_stages + 1)]
    sizes = (*up, *up[-2:0:-1])
    return Trace(flops=2 * num_stages, times=tuple(range(2 * num_stages)), most_bytes=sizes, held_bytes=sizes)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_staggered_workers_hold_what_the_sum_at_any_moment_says(workers: int) -> None:
    one = staircase(workers)
    assert one.total_peak_bytes(workers, staggered=False) == 10 * workers**2
    by_hand = max(
        sum(one.held_bytes[(moment + 2 * worker) % (2 * workers)] for worker in range(workers))
        for moment in range(2 * workers)
    )
    assert one.total_peak_bytes(workers, staggered=True) == by_hand
    assert one.mean_bytes == 5 * workers
    assert one.reduction(workers) == pytest.approx(1 - by_hand / (10 * workers**2))


def test_a_trace_of_two_layers() -> None:
    """Times by the products, bytes by what each needs: all of it after two of five, then what the first needs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8)
    found = trace(model, lambda: model(x).sum())
    product, size = 2 * 4 * 8 * 8, x.nbytes
    assert found.flops == 5 * product  # the input needs no gradient
    assert found.times == tuple(product * i for i in range(5))
    assert found.held_bytes == (size, 2 * size, 2 * size, 2 * size, size)
    assert found.peak_bytes == 2 * size
    assert all(p.grad is not None for p in model.parameters())


def test_attention_on_a_cpu_takes_time() -> None:
    linear = nn.Linear(8, 8, bias=False)

    def loss() -> Tensor:
        q = linear(torch.ones(1, 2, 16, 8))
        return functional.scaled_dot_product_attention(q, q, q).sum()

    forward = 2 * 2 * (2 * 16 * 16 * 8)  # two products for each of two heads
    linear_flops = 2 * (2 * 2 * 16 * 8 * 8)  # forward, and the weight's gradient
    assert trace(linear, loss).flops == linear_flops + forward + 2.5 * forward


def test_a_step_without_products_has_no_time() -> None:
    norm = nn.LayerNorm(4)
    with pytest.raises(ValueError, match="no matrix product"):
        trace(norm, lambda: norm(torch.ones(2, 4)).sum())
