"""`laconic train` as islands that come and go: each launch is one island."""

from __future__ import annotations

import contextlib
import io
import runpy
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from laconic.config import Config
from tests.support.jobs import job, train
from tests.support.launch import launch, run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "come_and_go.py"
MEETING: dict[str, Any] = {"mode": "local", "rendezvous": "127.0.0.1:29400", "run_id": "a", "islands": 2}


@pytest.mark.machine
def test_two_launches_train_as_two_islands_of_one(tmp_path: Path) -> None:
    """The same rows, losses and syncs; then both go on from their checkpoints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    sync = {"mode": "local", "every": 4, "fragments": 2, "overlap": 1, "codec": "int8"}
    meeting = {**sync, **MEETING, "rendezvous": f"127.0.0.1:{store.port}"}
    for steps in (8, 12):
        settings = {"steps": steps, "save_every": 0, "resume": "auto"}
        fixed = job(tmp_path, sync=sync, train={**settings, "output": str(tmp_path / "fixed")})
        expected = run_ranks(train, 2, fixed, local=1)[0]
        configs = [
            job(tmp_path, sync=meeting, train={**settings, "output": str(tmp_path / f"island-{number}")})
            for number in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            # after the restart each island goes on with the rows of either one, so the figures are near, not equal
            assert_equal_islands(list(pool.map(train_as_launch, configs)), expected, 1e-6 if steps == 8 else 0.1)


def run_example(address: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE))["main"](address, steps=20)
    return printed.getvalue()


@pytest.mark.machine
def test_the_example_runs() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(_: int) -> str:
        return launch(run_example, f"127.0.0.1:{store.port}", num_ranks=2, timeout_s=90, backend=None)[0]

    with ThreadPoolExecutor(2) as pool:
        for printed in pool.map(start, range(2)):
            assert printed.count("synced with 1 other islands") == 2


def train_as_launch(config: Config) -> dict[str, Any]:
    [summary] = launch(train, config, num_ranks=1, timeout_s=90)
    return summary


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
