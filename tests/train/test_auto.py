"""shard.strategy = "auto": the job trains as the plan says, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.config import ConfigError, ShardConfig, load
from tests.support.jobs import job, refusal, train_all
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
        train={"steps": 2, "output": str(tmp_path / "named")},
    )
    assert run_ranks(train_all, 4, [named], local=2)[0][0]["losses"] == first[0]["losses"] == second[0]["losses"]


def test_what_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    tight = cluster_file(tmp_path, 1, 1, device_memory_bytes="1 MB")
    message = refusal(job(tmp_path, shard={"strategy": "auto", "cluster": tight}))
    assert "nothing fits" in message
    assert "cluster.toml" in refusal(
        job(tmp_path, shard={"strategy": "auto", "cluster": str(tmp_path / "no" / "cluster.toml")})
    )


def test_auto_needs_a_cluster_file_and_nothing_else_does() -> None:
    with pytest.raises(ConfigError, match=r"needs shard\.cluster, a cluster file: `laconic plan measure`"):
        ShardConfig(strategy="auto")
    with pytest.raises(ConfigError, match=r"shard\.cluster.*is for shard\.strategy = 'auto'"):
        ShardConfig(cluster="cluster.toml")
