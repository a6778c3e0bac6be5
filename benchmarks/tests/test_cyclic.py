"""benchmarks.cyclic: what its rows compute from traces, observations and studies of accuracy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic import accuracy, schedule
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


def test_live_activations_are_summed_over_workers_in_time() -> None:
    def worker(*events: tuple[float, int]) -> schedule.Observation:
        return schedule.Observation(start_s=0.0, end_s=1.0, log=schedule.Log(alive=list(events)), on_time=1.0)

    both = [worker((0.1, 1), (0.3, -1)), worker((0.2, 1), (0.3, 1), (0.4, -1), (0.5, -1))]
    assert schedule.live_over_time(both) == [(0.1, 1), (0.2, 2), (0.3, 1), (0.3, 2), (0.4, 1), (0.5, 0)]


@pytest.mark.parametrize(("is_loss", "better", "worse"), [(True, 0.5, 1.5), (False, 1.5, 0.5)])
def test_noise_is_the_deviation_between_seeds(is_loss: bool, better: float, worse: float) -> None:
    def outcome(middle: float, spread: float) -> accuracy.Outcome:
        setting = accuracy.Setting(lr=0.05, momentum=0.5)
        return accuracy.Outcome(rule="v2", setting=setting, results=(middle - spread, middle, middle + spread))

    plain = outcome(1.0, 0.1)
    made: Any = SimpleNamespace(is_loss=is_loss)
    assert accuracy.is_within_noise(made, plain, outcome(better, 0.0))
    assert not accuracy.is_within_noise(made, plain, outcome(worse, 0.1))
    assert accuracy.is_within_noise(made, plain, outcome(worse, 0.6))
    # The standard error of the difference: three seeds of deviation 0.6, and three of 0.1.
    error = math.sqrt((0.6**2 + 0.1**2) / 3)
    assert accuracy.is_within_error(made, plain, outcome(1.0 + math.copysign(0.99 * error, worse - 1.0), 0.6))
    assert not accuracy.is_within_error(made, plain, outcome(1.0 + math.copysign(1.01 * error, worse - 1.0), 0.6))
    assert accuracy.is_within_error(made, plain, outcome(better, 0.0))
