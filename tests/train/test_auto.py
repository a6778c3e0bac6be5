"""What a job chooses by itself: its strategy, as the plan says; and where units rest, which a resumed run keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from laconic.config import ConfigError, ShardConfig, load
from tests.support.jobs import assert_resumed, interrupted, job, metrics, refusal, train_all
from tests.support.launch import run_ranks

FIGURES: dict[str, Any] = {
    "device_memory_bytes": "4 GB", "device_memory_bytes_per_s": "10 GB/s", "host_memory_bytes": "32 GB",
    "host_to_device_bytes_per_s": "10 GB/s", "device_to_host_bytes_per_s": "10 GB/s", "local_bytes_per_s": "1 GB/s",
    "local_latency_s": "50 us", "wire_bits_per_s": "100 Mbit/s", "wire_latency_s": "1 us",
}  # fmt: skip


def cluster_file(folder: Path, nodes: int, local: int, **figures: str) -> str:
    lines = [f"nodes = {nodes}", f"ranks_per_node = {local}"]
    lines += [f'{key} = "{value}"' for key, value in {**FIGURES, **figures}.items()]
    path = folder / "cluster.toml"
    path.write_text("\n".join([*lines, "[device_flops_per_s]", 'float32 = "50 GFLOP/s"', ""]))
    return str(path)


@pytest.mark.machine
def test_several_ranks_train_as_if_the_job_had_named_the_strategy(tmp_path: Path) -> None:
    """The file is for other ranks than those that start; its figures count all the same."""
    auto = {"strategy": "auto", "cluster": cluster_file(tmp_path, 8, 1)}
    planned = job(tmp_path, shard=auto, train={"steps": 2, "output": str(tmp_path / "auto")})
    [first, second] = run_ranks(train_all, 4, [planned], local=2)[:2]
    chosen = load(tmp_path / "auto" / "config.toml")
    assert chosen.shard.strategy != "auto"
    assert chosen.shard.cluster is None
    named = job(
        tmp_path,
        shard={"strategy": chosen.shard.strategy, "cache": chosen.shard.policy.cache.where},
        pipeline=asdict(chosen.pipeline),
        train={"steps": 2, "output": str(tmp_path / "named")},
    )
    assert run_ranks(train_all, 4, [named], local=2)[0][0]["losses"] == first[0]["losses"] == second[0]["losses"]


@pytest.mark.heavy
def test_what_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    tight = cluster_file(tmp_path, 1, 1, device_memory_bytes="1 MB")
    assert "nothing fits" in refusal(job(tmp_path, shard={"strategy": "auto", "cluster": tight}))


def test_a_cluster_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "cluster.toml")
    assert "cluster.toml" in refusal(job(tmp_path, shard={"strategy": "auto", "cluster": missing}))


def test_auto_needs_a_cluster_file_and_nothing_else_does() -> None:
    with pytest.raises(ConfigError, match=r"needs shard\.cluster, a cluster file: `laconic doctor --out`"):
        ShardConfig(strategy="auto")
    with pytest.raises(ConfigError, match=r"shard\.cluster.*is for shard\.strategy = 'auto'"):
        ShardConfig(cluster="cluster.toml")


# -- shard.cache = "auto" ----------------------------------------------------------------------------------------------

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
