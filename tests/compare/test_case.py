"""Cases, and their training jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from laconic.compare.case import STRATEGIES, Case, config_of
from laconic.config import Config, ConfigError, ModelConfig, ShardConfig, SyncConfig, from_dict

BASE = Config(model=ModelConfig(config={"model_type": "llama"}))
LOCAL = replace(BASE, sync=SyncConfig.of_keys({"mode": "local", "every": 6, "fragments": 2, "error_feedback": True}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_case_changes_the_strategy_and_nothing_of_the_mathematics(strategy: str) -> None:
    base = LOCAL if STRATEGIES[strategy].has_islands else BASE
    config = config_of(base, Case(strategy=strategy, steps=7), Path("out"))
    keys = STRATEGIES[strategy].shard
    assert config.shard.strategy == keys["strategy"]
    assert "cache" not in keys or config.shard.policy.cache.where == keys["cache"]
    assert (config.model, config.optimizer) == (BASE.model, BASE.optimizer)
    assert config.data.seed == BASE.data.seed
    assert config.train.steps == 7
    assert not config.lora.enabled


def test_runs_of_a_comparison_share_their_tokens_but_not_their_folders() -> None:
    cases = [
        Case(strategy=strategy, job=job, rate_bits_per_s=rate, repeat=repeat)
        for strategy in ("host", "none") for job in ("full", "lora") for rate in (None, 1e9) for repeat in (0, 1)
    ]  # fmt: skip
    configs = [config_of(BASE, case, Path("out")) for case in cases]
    assert len({config.train.output for config in configs}) == len(cases)
    assert {config.data.cache for config in configs} == {"out/tokens"}


def test_a_case_that_cannot_be_is_refused() -> None:
    base = from_dict(Config, {"model": {"config": {"model_type": "llama"}}, "shard": {"param_dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match=r"DDP cannot run this job.*no mixed precision"):
        config_of(base, Case(strategy="ddp"), Path("out"))
    with pytest.raises(ConfigError, match=r"torchft DiLoCo cannot run this job.*set sync.mode = 'local'"):
        config_of(BASE, Case(strategy="torchft-diloco"), Path("out"))
    with pytest.raises(ConfigError, match=r"8 steps do not hold whole rounds.*every 3 steps.*take 10"):
        config_of(LOCAL, Case(strategy="local", steps=8), Path("out"))
    with pytest.raises(ValueError, match="at least 3"):
        Case(strategy="host", steps=2)
    assert Case(strategy="host", steps=2, measure_memory=False).warmup_steps == 1
    with pytest.raises(ValueError, match="'zero3' is not known; there are fsdp2, "):
        Case(strategy="zero3")
    assert Case(strategy="local") == Case(strategy="local-steps"), "another name"


def test_what_a_case_keeps_of_its_job() -> None:
    """LoRA is a job of its own. A run that saves ends with its only checkpoint. A budget stays with its cache."""
    assert config_of(BASE, Case(strategy="host", job="lora"), Path("out")).lora.enabled
    saves = [config_of(BASE, Case(strategy="host", save=each), Path("out")).train.save_every for each in (True, False)]
    assert saves == [0, -1]
    budget = replace(BASE, shard=ShardConfig.of_keys({"device_budget_bytes": 10}))
    kept = [config_of(budget, Case(strategy=name), Path("out")).shard.policy.cache for name in ("host", "device")]
    assert [each.device_budget_bytes for each in kept] == [10, 0]


def test_islands_keep_the_jobs_syncs_and_the_others_sync_in_every_step() -> None:
    def sync(strategy: str) -> SyncConfig:
        return config_of(LOCAL, Case(strategy=strategy, steps=7), Path("out")).sync

    assert sync("local") == LOCAL.sync
    assert sync("torchft-diloco") == sync("local-fp32") == LOCAL.sync.with_keys(codec="fp32", error_feedback=False)
    assert sync("fsdp2") == sync("host") == SyncConfig()
