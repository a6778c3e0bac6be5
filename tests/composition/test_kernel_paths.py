"""Every kernel path of transformers under every strategy has the gradients of the unsharded model."""

from __future__ import annotations

import pytest

from tests.composition.kernel_paths import PARTIAL, STRATEGIES, faults, job, paths, sort_out
from tests.support.launch import run_ranks

SAMPLE = tuple(
    strategy for strategy in STRATEGIES if strategy not in ("cache device", PARTIAL[1], *PARTIAL[2:5], PARTIAL[-1])
)
"""Each slice, each way to compute, and the caches none and host; the benchmark tries the rest, too."""


@pytest.mark.campaign(seconds=80)
def test_every_path_under_every_strategy() -> None:
    runnable, reasons, unknown = sort_out(paths())
    assert not unknown, "the library itself cannot run these here, for a reason that UNAVAILABLE does not list"
    assert {path.implementation for path in runnable} >= {"eager", "sdpa", "grouped_mm", "batched_mm"}
    assert not reasons.keys() & set(runnable)
    by_rank = run_ranks(job, 2, runnable, SAMPLE, local=1)
    assert list(faults(by_rank)) == []
    compared = {(each.path, each.strategy) for each in by_rank[0] if not each.refusal}
    assert {path for path, _ in compared} == set(runnable)
    assert {strategy for _, strategy in compared} == set(SAMPLE)
