"""Predicted peaks of memory against torch's allocator, on jobs whose peak hangs on one rule each; largest batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan import memory
from benchmarks.plan.bench import Bench, any_cluster
from benchmarks.plan.jobs import ISLANDS, Case, make_case
from benchmarks.plan.largest import largest
from laconic.plan.prediction import Refusal

pytestmark = pytest.mark.machine

SLICES = "islands int4, 2 slices"
HELD = {
    "demo, none, LoRA": "the root's weights stay to the end of backward, though nothing of it trains",
    SLICES: "sliced weights are joined for their products, and keep copies of inputs",
    "qwen2, ddp": "autograd sums the gradients of tied weights in new memory",
}


def sliced_case(out: Path) -> Case:
    """Rows so many that a step takes more than a sync, of which the profiler sees nothing."""
    layers = {"log": {"memory_step": 2}}, ISLANDS[SLICES], {"sync": {"every": 3}}, {"train": {"micro_batch_size": 8}}
    return make_case(SLICES, "demo", *layers, out=out, candidate="local-steps")


@pytest.mark.timeout(240)
def test_peaks_are_the_allocators(tmp_path: Path) -> None:
    bench = Bench(tmp_path, quick=False)
    cases = [case for case in memory.cases(bench) if case.name in HELD]
    cases.append(sliced_case(tmp_path))
    assert len(cases) == len(HELD)
    for case, summary in zip(cases, bench.train(cases, 2, 2), strict=True):
        estimate = bench.predictions.of(case, any_cluster(2, 2))
        assert not isinstance(estimate, Refusal)
        measured = summary["resting_bytes"] + summary["step_peak_bytes"]
        assert estimate.peak_bytes == pytest.approx(measured, rel=5e-3), f"{case.name}: {HELD[case.name]}"


@pytest.mark.parametrize("near", [1, 2, 7, 8, 30])
@pytest.mark.parametrize("most", [0, 1, 2, 7, 8, 19])
def test_the_largest_count_that_runs_is_found_with_few_trials(most: int, near: int) -> None:
    tried: list[int] = []

    def runs(count: int) -> bool:
        tried.append(count)
        return count <= most

    assert largest(runs, near) == most
    assert len(tried) == len(set(tried)) <= (2 if near == most else 10)
