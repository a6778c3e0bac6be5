"""The savings of a step of a model of 1.3 B parameters, counted without computing it."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from benchmarks.local_steps.partial import step_cost
from laconic.partial.patterns import Kind

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def full():
    return step_cost("gpt2")


@pytest.mark.parametrize(("include", "flops", "peak"), [(("mlp",), 0.1465, 0.20), (("mlp", "attention"), 0.2198, 0.40)])
def test_a_quarter_of_every_layer(full, include: Collection[Kind], flops: float, peak: float) -> None:
    part = step_cost("gpt2", slices=4, include=include)
    # 2 (1 - 1/4) P / (6 P_linear + 12 L d T) for d = 2048, L = 24, T = 1024
    assert 1 - part.flops / full.flops == pytest.approx(flops, abs=1e-3)
    assert part.peak_bytes < (1 - peak) * full.peak_bytes
    assert part.weights_bytes == full.weights_bytes
    assert part.activations_bytes < full.activations_bytes
