"""Every kernel path of transformers under every strategy has the gradients of the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from tests.composition import kernel_paths
from tests.composition.kernel_paths import LIMIT, PARTIAL, STRATEGIES, Outcome, Path, faults, job, paths, sort_out
from tests.support.launch import run_ranks

SAMPLE = tuple(
    strategy for strategy in STRATEGIES if strategy not in ("cache device", PARTIAL[1], *PARTIAL[2:5], PARTIAL[-1])
)
"""Each slice, each way to compute, and the caches none and host; the benchmark tries the rest, too."""


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_every_path_under_every_strategy() -> None:
    runnable, reasons, unknown = sort_out(paths())
    assert not unknown, "the library itself cannot run these here, for a reason that UNAVAILABLE does not list"
    assert {path.implementation for path in runnable} >= {"eager", "sdpa", "grouped_mm", "batched_mm"}
    assert not reasons.keys() & set(runnable)
    by_rank = run_ranks(job, 2, runnable, SAMPLE, local=1, timeout_s=300)
    assert list(faults(by_rank)) == []
    compared = {(each.path, each.strategy) for each in by_rank[0] if not each.refusal}
    assert {path for path, _ in compared} == set(runnable)
    assert {strategy for _, strategy in compared} == set(SAMPLE)


@pytest.mark.parametrize("works", [True, False])
def test_a_path_that_transformers_adds_is_tried_or_fails(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("needs a rare machine")

    added = Path("llama", "attn", f"novel-{works}")
    function = eager_attention_forward if works else broken
    monkeypatch.setitem(AttentionInterface._global_mapping, added.implementation, function)
    assert added.implementation in ALL_ATTENTION_FUNCTIONS
    assert added in paths()
    runnable, reasons, unknown = sort_out([added])
    assert runnable == ([added] if works else [])
    assert unknown == ([] if works else ["llama, attn novel-False: RuntimeError: needs a rare machine"])
    assert reasons.keys() == (set() if works else {added})


def test_what_counts_as_a_fault() -> None:
    path, strategy = Path("llama"), "cache none"
    fine = Outcome(path=path, strategy=strategy, difference=LIMIT)
    wrong = [
        Outcome(path=path, strategy=strategy, difference=value, parameter="w")
        for value in (2 * LIMIT, float("nan"), float("inf"))
    ]
    refused = Outcome(path=path, strategy=strategy, refusal="no")
    allowed = Outcome(path=Path("state space"), strategy=PARTIAL[0], refusal=kernel_paths.NO_LAYER)
    assert not fine.fault()
    assert not allowed.fault()
    assert len(list(faults([[fine, *wrong, refused, allowed]]))) == 4
