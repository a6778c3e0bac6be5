"""Predictions beside measurements: which cases get one, and how the table shows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from laconic.compare.case import Case
from laconic.compare.predicting import predict
from laconic.compare.result import Prediction, with_predictions
from laconic.compare.table import render
from laconic.config import ConfigError, load
from laconic.plan.cluster_spec import ClusterSpec
from tests.plan.traces import cluster
from tests.support.canned import canned, canned_host

pytestmark = pytest.mark.machine

DEMO = Path(__file__).parents[2] / "src" / "laconic" / "compare" / "demo.toml"


def test_every_case_gets_the_prediction_of_its_job_rate_and_strategy(tmp_path: Path) -> None:
    cases = [
        Case(strategy=strategy, job=job, rate_bits_per_s=rate)
        for job in ("full", "lora")
        for strategy, rate in (("fsdp2", 1e8), ("host", 1e8), ("host", 1e9))
    ]
    spec: ClusterSpec = cluster(2, 2, wire_bits_per_s=1e7)
    found = predict(cases, load(DEMO), spec, tmp_path, nodes=2, local=2)
    full, lora = found[:3], found[3:]
    for fsdp2, slow, fast in (full, lora):
        assert fsdp2 is not None
        assert slow is not None
        assert fast is not None
        assert slow.wire_bytes == fast.wire_bytes
        assert fsdp2.wire_bytes > slow.wire_bytes  # type: ignore[operator]
        assert slow.step_s > fast.step_s  # type: ignore[operator]
        assert slow.host_bytes_per_node > 0  # type: ignore[operator]
    assert full[1].wire_bytes > 10 * lora[1].wire_bytes  # type: ignore[union-attr,operator]


def test_the_file_may_be_for_other_ranks_but_not_lack_figures(tmp_path: Path) -> None:
    cases = [Case(strategy="host")]
    [found] = predict(cases, load(DEMO), cluster(4, 1), tmp_path, nodes=3, local=2)
    assert found is not None
    alone = dataclasses.replace(cluster(1, 2, wire_bits_per_s=None, wire_latency_s=None))
    with pytest.raises(ConfigError, match=r"2 x 2 were started: wire_bits_per_s is missing"):
        predict(cases, load(DEMO), alone, tmp_path, nodes=2, local=2)


def test_results_carry_their_predictions_into_the_table() -> None:
    expected = Prediction(step_s=6.0, wire_bytes=330e6)
    results = with_predictions([canned(), canned_host()], [expected, None])
    assert [result.prediction for result in results] == [expected, None]
    assert render(results).splitlines()[0].count("predicted") == 2
    assert "predicted" not in render([canned(), canned_host()])
