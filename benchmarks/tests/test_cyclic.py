"""benchmarks.cyclic: what its rows compute from traces and losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.accuracy import is_within_noise
from benchmarks.cyclic.traces import Trace, trace


def staircase(num_stages: int) -> Trace:
    """N equal stages; each holds 10 bytes from its forward to its backward, and takes 1 FLOP each way."""
    up = [10 * j for j in range(num_stages + 1)]
    sizes = (*up, *up[-2:0:-1])
    return Trace(flops=2 * num_stages, times=tuple(range(2 * num_stages)), most_bytes=sizes, held_bytes=sizes)


def test_staggered_total_is_the_largest_sum_over_workers() -> None:
    workers = 3
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
    """Time passes with each of the five products. The later products need the saved bytes."""
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


def test_noise_is_the_deviation_between_seeds() -> None:
    def seeds(middle: float, spread: float) -> list[float]:
        return [middle - spread, middle, middle + spread]

    plain = seeds(1.0, 0.1)
    assert is_within_noise(plain, seeds(0.5, 0.0))
    assert not is_within_noise(plain, seeds(1.5, 0.1))
    assert is_within_noise(plain, seeds(1.5, 0.6))
