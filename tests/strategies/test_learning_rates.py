"""Learning rates, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.config import OptimizerConfig
from laconic.strategies.optimizers import lr_at


def rates(total: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)
    return [lr_at(step, config, total_steps=total) for step in range(total)]


def test_constant_after_warmup() -> None:
    assert rates(5, lr_schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    values = rates(10, lr_schedule="cosine", warmup_steps=2, min_lr_ratio=0.2)
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[6] == pytest.approx(0.6)  # half way down
    assert values[2:] == sorted(values[2:], reverse=True)
    assert min(values) > 0.2
    assert rates(12, lr_schedule="cosine", decay_steps=5, min_lr_ratio=0.2)[5:] == pytest.approx([0.2] * 7)


def test_wsd() -> None:
    values = rates(10, lr_schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(10, lr_schedule="wsd", min_lr_ratio=0.0) == pytest.approx([1] * 8 + [0.5, 0])  # a fifth by default


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_positive_rates(schedule: str, total: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(total, lr_schedule=schedule, warmup_steps=1))
