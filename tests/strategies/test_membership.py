"""`laconic train` as islands that come and go: each launch is one island."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from laconic.config import Config
from laconic.rehearse import ranks
from tests.support.jobs import job, train
from tests.support.launch import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "come_and_go.py"
MEETING: dict[str, Any] = {"mode": "local", "rendezvous": "127.0.0.1:29400", "run_id": "a", "islands": 2}


def test_two_launches_train_as_two_islands_of_one(tmp_path: Path) -> None:
    """The same rows, losses and syncs; then both go on from their checkpoints."""
    sync = {"mode": "local", "every": 4, "fragments": 2, "overlap": 1, "codec": "int8"}
    for steps in (8, 12):
        settings = {"steps": steps, "save_every": 0, "resume": "auto"}
        fixed = job(tmp_path, sync=sync, train={**settings, "output": str(tmp_path / "fixed")})
        expected = run_ranks(train, 2, fixed, local=1)[0]
        configs = [
            job(tmp_path, sync={**sync, **MEETING}, train={**settings, "output": str(tmp_path / f"island-{number}")})
            for number in range(2)
        ]
        # after the restart each island goes on with the rows of either one, so the figures are near, not equal
        assert_equal_islands(ranks(train_one_of, configs, jobs=2), expected, 1e-6 if steps == 8 else 0.1)


def train_one_of(configs: list[Config]) -> dict[str, Any]:
    from laconic.train.loop import run  # takes transformers along

    return run(configs[int(os.environ["LACONIC_JOB"])])


def test_the_example_runs() -> None:
    def run() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLE))["main"]("127.0.0.1:29400", steps=20)
        return printed.getvalue()

    for printed in ranks(run, jobs=2, local=2)[::2]:
        assert printed.count("synced with 1 other islands") == 2


def assert_equal_islands(summaries: list[dict[str, Any]], expected: dict[str, Any], tolerance: float) -> None:
    assert expected["syncs"]
    for summary in summaries:
        assert summary["tokens_per_step"] == expected["tokens_per_step"]
        assert [(each["step"], each["fragment"], each["num_islands"]) for each in summary["syncs"]] == [
            (each["step"], each["fragment"], 2) for each in expected["syncs"]
        ]
        for own, all_islands in zip(summary["syncs"], expected["syncs"], strict=True):
            assert own["mean_norm"] == pytest.approx(all_islands["mean_norm"], rel=tolerance)
    means = [sum(losses) / 2 for losses in zip(*(summary["losses"] for summary in summaries), strict=True)]
    assert means == pytest.approx(expected["losses"], rel=tolerance)
