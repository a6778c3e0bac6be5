"""`shard.cache = "auto"` in a job: metrics, summary and checkpoints have the choice, and a resumed run keeps it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import assert_resumed, interrupted, job, metrics, train_all
from tests.support.launch import run_ranks

AUTO: dict[str, Any] = {"cache": "auto", "device_bytes": 1 << 30, "host_bytes": 0}


def _resting(folder: Path) -> dict[int, dict[str, int]]:
    """The units that rest in each place, by step, as the metrics have them."""
    return {row["step"]: row.get("resting", {}) for row in metrics(folder) if "loss" in row}


@pytest.mark.heavy
def test_a_resumed_run_rests_where_the_broken_one_has_chosen(tmp_path: Path) -> None:
    whole, broken = tmp_path / "broken-whole", tmp_path / "broken"
    plain = job(tmp_path, shard={"cache": "none"}, train={"output": str(tmp_path / "none")})
    configs = [*interrupted(tmp_path, "broken", 2, shard=AUTO), plain]
    unbroken, start, rest, none = run_ranks(train_all, 2, configs, local=1)[0]
    assert_resumed(unbroken, start, rest)
    assert unbroken["placements"] == start["placements"] == rest["placements"]
    where = Counter(each["weights"] for each in unbroken["placements"].values())
    assert where["rank"] > 0
    assert none["placements"] == {}
    assert unbroken["losses"] == none["losses"]
    assert _resting(whole) == {1: {}, 2: where, 3: where, 4: where}
    assert _resting(broken) == _resting(whole), "the resumed run has not chosen again"


@pytest.mark.heavy
def test_on_another_cluster_a_resumed_run_chooses_anew(tmp_path: Path) -> None:
    start = job(tmp_path, shard=AUTO, train={"steps": 2, "save_every": 0})
    rest = job(tmp_path, shard={**AUTO, "device_bytes": 0}, train={"steps": 5, "resume": "auto"})
    run_ranks(train_all, 2, [start], local=1)
    [summary] = run_ranks(train_all, 4, [rest], local=2)[0]
    assert {each["weights"] for each in summary["placements"].values()} == {"none"}
    assert _resting(Path(rest.train.output))[3] == {}, "one step shows what there is"
