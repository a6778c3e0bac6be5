"""Predictions beside measurements: which cases get one, and how the table shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.compare.case import Case
from laconic.compare.predicting import predict
from laconic.compare.result import Prediction, with_predictions
from laconic.compare.table import render
from laconic.config import ConfigError, load
from laconic.plan.cluster_spec import ClusterSpec
from tests.plan.traces import cluster
from tests.support.canned import canned, canned_host


def test_every_case_gets_the_prediction_of_its_job_rate_and_strategy(job: Path, tmp_path: Path) -> None:
    cases = [
        Case(strategy=strategy, job=kind, rate_bits_per_s=rate)
        for kind in ("full", "lora")
        for strategy, rate in (("fsdp2", 1e8), ("host", 1e8), ("host", 1e9))
    ]
    spec: ClusterSpec = cluster(2, 2, wire_bits_per_s=1e7)
    found: list[Any] = predict(cases, load(str(job)), spec, tmp_path, nodes=2, local=2)
    full, lora = found[:3], found[3:]
    for fsdp2, slow, fast in (full, lora):
        assert fsdp2.wire_bytes > slow.wire_bytes == fast.wire_bytes
        assert slow.step_s > fast.step_s
        assert slow.host_bytes_per_node > 0
    assert full[1].wire_bytes > 5 * lora[1].wire_bytes


def test_the_file_may_be_for_other_ranks_but_not_lack_figures(job: Path, tmp_path: Path) -> None:
    cases = [Case(strategy="host")]
    [found] = predict(cases, load(str(job)), cluster(4, 1), tmp_path, nodes=3, local=2)
    assert found is not None
    alone = cluster(1, 2, wire_bits_per_s=None, wire_latency_s=None)
    with pytest.raises(ConfigError, match=r"2 x 2 were started: wire_bits_per_s is missing"):
        predict(cases, load(str(job)), alone, tmp_path, nodes=2, local=2)


def test_results_carry_their_predictions_into_the_table() -> None:
    expected = Prediction(step_s=6.0, wire_bytes=330e6)
    results = with_predictions([canned(), canned_host()], [expected, None])
    assert [result.prediction for result in results] == [expected, None]
    assert render(results).splitlines()[0].count("predicted") == 2
    assert "predicted" not in render([canned(), canned_host()])
