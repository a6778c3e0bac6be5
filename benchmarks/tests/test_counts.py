"""The arithmetic of benchmarks: bytes, padding, memory and ratios are computed from measurements."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import layout
from benchmarks.plan import memory
from benchmarks.plan.bench import Bench, any_cluster
from benchmarks.plan.jobs import ISLANDS, make_case
from benchmarks.simulated.grid import Cell
from benchmarks.wire import bench
from laconic.plan.prediction import Refusal
from tests.support.canned import canned_host

W_BYTES = 25_000_000 * 4


@pytest.mark.parametrize(
    ("strategy", "num_trainable", "nbytes"),
    [
        ("none", 25_000_000, 1.5 * W_BYTES),
        ("host", 25_000_000, W_BYTES),
        ("fsdp2", 25_000_000, 2.25 * W_BYTES),
        ("ddp", 25_000_000, 1.5 * W_BYTES),
        ("host", 100_000, 4e5),
        ("none", 100_000, 1.5 * 4e5 + W_BYTES - 4e5),
    ],
)
def test_formula_of_a_run(strategy: str, num_trainable: int, nbytes: float) -> None:
    job = "full" if num_trainable == 25_000_000 else "lora"
    run = canned_host(strategy=strategy, job=job, num_trainable=num_trainable)
    assert bench.formula_bytes(run).node == pytest.approx(nbytes)


def test_padding_is_that_of_the_plan_of_one_bucket_and_of_the_better_rule() -> None:
    case = layout.Bench(quick=True).get("GPT-OSS-120B", 1024, 16)
    found = [100 * each for each in (case.planned, case.one_bucket, case.other_rules)]
    assert found == pytest.approx([1.95, 87.98, 428.68], abs=0.01), "the last by the LCM; FSDP2 pads 694 %"


SLICES = "islands int4, 2 slices"
HELD = {
    "demo, none, LoRA": "the root's weights stay to the end of backward, though nothing of it trains",
    SLICES: "sliced weights are joined for their products, and keep copies of inputs",
    "qwen2, ddp": "autograd sums the gradients of tied weights in new memory",
}


@pytest.mark.machine
@pytest.mark.timeout(240)
def test_peaks_are_the_allocators(tmp_path: Path) -> None:
    """On jobs whose peak hangs on one rule each. The sliced one takes more in a step than in a sync."""
    runs = Bench(tmp_path, quick=False)
    layers = {"log": {"memory_step": 2}}, ISLANDS[SLICES], {"sync": {"every": 3}}, {"train": {"micro_batch_size": 8}}
    sliced = make_case(SLICES, "demo", *layers, out=tmp_path, candidate="local-steps")
    cases = [*(case for case in memory.cases(runs) if case.name in HELD), sliced]
    assert len(cases) == len(HELD)
    for case, summary in zip(cases, runs.train(cases, 2, 2), strict=True):
        estimate = runs.predictions.of(case, any_cluster(2, 2))
        assert not isinstance(estimate, Refusal)
        measured = summary["resting_bytes"] + summary["step_peak_bytes"]
        assert estimate.peak_bytes == pytest.approx(measured, rel=5e-3), f"{case.name}: {HELD[case.name]}"


@pytest.mark.parametrize(
    ("seconds", "ratio"),
    [
        ({"FSDP2": 10, "HSDP": 4, "host": 3, "device": -1, "4bit": 2}, 3 / 4),
        ({"FSDP2": 10, "HSDP": -4, "host": 3, "FSDP2 offload": 6}, 3 / 6),
        ({"FSDP2": -10, "host": 3}, None),
    ],
)
def test_the_best_of_a_side_is_exact_and_fits(seconds: dict[str, float], ratio: float | None) -> None:
    """Negative seconds are those of a step that does not fit."""
    steps: Any = {name: SimpleNamespace(seconds=abs(each), fits=each > 0) for name, each in seconds.items()}
    cell = Cell(model="Llama 3 8B", form="full", tokens=2048, nodes=2, rate_gbit_per_s=25, steps=steps)
    assert cell.ratio == ratio
