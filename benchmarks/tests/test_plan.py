"""Predicted peaks of memory against torch's allocator, on jobs whose peak hangs on one rule of the programs each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan import memory
from benchmarks.plan.bench import Bench, any_cluster
from laconic.plan.prediction import Refusal

HELD = {
    "demo, none, LoRA": "the root's weights stay to the end of backward, though nothing of it trains",
    "qwen2, ddp": "autograd sums the gradients of tied weights in new memory",
}


@pytest.mark.timeout(240)
def test_peaks_are_the_allocators(tmp_path: Path) -> None:
    bench = Bench(tmp_path, quick=False)
    cases = [case for case in memory.cases(bench) if case.name in HELD]
    assert len(cases) == len(HELD)
    for case, summary in zip(cases, bench.train(cases, 2, 2), strict=True):
        estimate = bench.predictions.of(case, any_cluster(2, 2))
        assert not isinstance(estimate, Refusal)
        measured = summary["resting_bytes"] + summary["step_peak_bytes"]
        assert estimate.peak_bytes == pytest.approx(measured, rel=5e-3), f"{case.name}: {HELD[case.name]}"
