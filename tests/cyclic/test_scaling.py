"""Loss scaling: an overflow skips an update and lowers the scale, on every device alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import StatePlacement
from laconic.shard.policies import Wire
from tests.cyclic.toys import OPTIMIZERS, Course, assert_equal, assert_equals_oracle, make_stages, train, train_oracle
from tests.support.launch import on_ranks

torch.set_num_threads(1)


def scaler() -> torch.amp.GradScaler:
    """A scaler that begins too high, so that some batches overflow, and then grows again."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_factor=4.0, growth_interval=2)


class Narrow(torch.autograd.Function):
    """The identity; its gradient passes through fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (grad * 20).half().float() / 20


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(Narrow.apply(output), target)


def assert_scales(states: StatePlacement, **options: Any) -> None:
    for rule, max_grad_norm in (("dp", 0.1), ("v1", None), ("clip", 0.1))[states == "shared" :]:
        course = Course(
            rule=rule, states=states, max_grad_norm=max_grad_norm, scaler=scaler, loss_fn=loss_fn, end=7, saves=(1, 5),
            **options,
        )  # fmt: skip
        scales = assert_equals_oracle(course)
        assert min(scales) < 2.0**14, "something overflowed"
        assert any(after > before for before, after in pairwise(scales))


def test_single_device() -> None:
    assert_scales("single")


@pytest.mark.parametrize(
    ("states", "ranks"), [("replicated", 3), ("sharded", 3), pytest.param("shared", 6, marks=pytest.mark.heavy)]
)
@on_ranks("ranks")
def test_devices_agree(states: StatePlacement) -> None:
    assert_scales(states)


@on_ranks(3, local=1)
def test_devices_agree_on_what_crosses_in_few_bits() -> None:
    """A skipped update still brings a version, with what the codec has lost of earlier ones."""
    assert_scales("replicated", wire=Wire(weights="int8", gradients="int8", exact_every=3), local=1)


def test_rules_without_a_global_norm_are_refused() -> None:
    for rule in ("v2", "lag2"):
        with pytest.raises(ValueError, match=r"loss scaling need .* rules that can: dp, v1, clip\."):
            CyclicDataParallel(make_stages(4), loss_fn, OPTIMIZERS["sgd"], rule=rule, grad_scaler=scaler())


def test_a_scaler_that_is_off_changes_nothing() -> None:
    course = Course(states="single")
    off = replace(course, scaler=lambda: torch.amp.GradScaler("cpu", enabled=False)).run()
    oracle = course.oracle()
    train(off, range(2), None)
    train_oracle(oracle, range(2))
    off.drain()
    assert off.loss_scale == 1.0
    assert_equal(off, oracle, course)
