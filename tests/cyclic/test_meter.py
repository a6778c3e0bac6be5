"""The bytes that autograd keeps between forward and backward, counted exactly."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from laconic.pipeline.meter import ActivationMeter

FLOAT = 4


def test_what_one_layer_saves_until_its_backward() -> None:
    meter, linear = ActivationMeter(), nn.Linear(8, 16)
    x = torch.randn(4, 8)
    with meter.forward(linear):
        y = linear(x).tanh()
    assert meter.live_bytes == 4 * 8 * FLOAT + 4 * 16 * FLOAT  # the input and tanh's output; not the weight
    y.sum().backward()
    assert meter.live_bytes == 0
    (plain,) = torch.autograd.grad(linear(x).tanh().sum(), linear.weight)
    assert torch.equal(linear.weight.grad, plain), "gradients are those without the meter"  # type: ignore[arg-type]
    with meter.forward(linear):
        y = linear(x).relu()  # which saves its output
    assert meter.live_bytes > 0
    del y  # a dropped graph frees
    gc.collect()
    assert meter.live_bytes == 0


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


@pytest.mark.parametrize("changed", ["weight", "activation"])
def test_a_change_in_place_before_backward_is_caught(changed: str) -> None:
    meter, linear = ActivationMeter(), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with meter.forward(linear):
        y = linear(x).tanh()
    with torch.no_grad():
        (linear.weight if changed == "weight" else y).add_(1)
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
