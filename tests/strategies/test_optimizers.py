"""The job's optimizers: parameter groups, exact resume, learning rates, what they ask of the wire, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.config import Config, ConfigError, OptimizerConfig, from_dict
from laconic.config.sections import ShardConfig
from laconic.strategies.optimizers import lr_at, make_optimizer, set_learning_rates
from laconic.strategies.parallelize import shard_policy
from tests.support.jobs import job, refusal, table, train, train_all
from tests.support.launch import run_ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw8bit": {},
    "muon": {"lr": 0.02, "adamw_lr": 0.003, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    "shampoo": {"adamw_lr": 0.003, "update_every": 2, "block_size": 50},
}


def optimizer_job(folder: Path, name: str, shard: dict[str, Any] | None = None, **train: Any) -> Config:
    """A job with matrices large enough for 8 bits."""
    model = table(folder)["model"]["config"] | {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1}
    return job(
        folder,
        model={"config": model},
        optimizer={
            "name": name,
            "lr_schedule": "cosine",
            "warmup_steps": 1,
            "decay_steps": 5,
            **OPTIMIZERS.get(name, {}),
        },
        shard=shard or {},
        train={"steps": 6, **train},
    )


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_every_optimizer_trains_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """2 nodes x 1 rank, unbroken or resumed half way, train as one rank with the whole model does."""
    configs = []
    for name in OPTIMIZERS:
        whole, broken = str(tmp_path / f"{name}-whole"), str(tmp_path / name)
        configs += [
            optimizer_job(tmp_path, name, output=whole),
            optimizer_job(tmp_path, name, output=broken, steps=3, save_every=0),
            optimizer_job(tmp_path, name, output=broken, resume="auto"),
        ]
    summaries = run_ranks(train_all, 2, configs, local=1)[0]
    for index, name in enumerate(OPTIMIZERS):
        unbroken, start, rest = summaries[3 * index : 3 * index + 3]
        assert unbroken["losses"][-1] < unbroken["losses"][0] - 0.2, name
        assert rest["start_step"] == 3
        assert start["losses"] + rest["losses"] == unbroken["losses"], name
        output = str(tmp_path / f"{name}-alone")
        alone = train(optimizer_job(tmp_path, name, micro_batch_size=4, output=output))
        assert alone["losses"] == pytest.approx(unbroken["losses"], rel=2e-3), name


def test_blocks_follow_the_job(tmp_path: Path) -> None:
    """Matrices that stay whole train as matrices that are cut do."""
    configs = [
        optimizer_job(tmp_path, "muon", {"granularity": blocks} if blocks else {}, output=str(tmp_path / str(index)))
        for index, blocks in enumerate([None, "whole", {"*norm*": "1 row", "*": "whole"}])
    ]
    cut, whole, by_pattern = run_ranks(train_all, 2, configs, local=1)[0]
    assert whole["losses"] == pytest.approx(cut["losses"], rel=1e-5)
    assert by_pattern["losses"] == pytest.approx(cut["losses"], rel=1e-5)


def test_blocks_that_the_optimizer_cannot_use_are_refused(tmp_path: Path) -> None:
    config = optimizer_job(tmp_path, "adamw8bit", {"granularity": "5 rows"})
    for message in run_ranks(refusal, 2, config, local=2):
        assert "granularity=laconic.rows(32)" in message


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-hpz", "hsdp"])
def test_baselines_that_cut_anywhere_are_refused_by_name(tmp_path: Path, name: str, strategy: str) -> None:
    message = refusal(optimizer_job(tmp_path, name, {"strategy": strategy}))
    assert f"optimizer.name = '{name}'" in message
    assert f"'{strategy}'" in message
    assert "'laconic'" in message


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"optimizer": {"momentum": 0.5}}, "optimizer.momentum = 0.5 is for optimizer.name = 'muon', got 'adamw'"),
        ({"optimizer": {"name": "muon", "update_every": 3}}, "is for optimizer.name = 'shampoo', got 'muon'"),
        ({"optimizer": {"name": "adamw8bit", "adamw_lr": 0.1}}, "'muon' or 'shampoo', got 'adamw8bit'"),
        ({"optimizer": {"flat_blocks": True}}, "is for optimizer.name = 'adamw8bit', got 'adamw'"),
        ({"optimizer": {"name": "muon", "fused": False}}, "is for optimizer.name = 'adamw', got 'muon'"),
        ({"optimizer": {"name": "muon", "momentum": 1.0}}, "optimizer.momentum = 1.0 must lie in [0, 1)"),
        ({"optimizer": {"name": "muon", "adamw_lr": 0.0}}, "optimizer.adamw_lr = 0.0 must be a positive number"),
        ({"optimizer": {"name": "shampoo", "update_every": 0}}, "optimizer.update_every = 0 must be at least 1"),
        ({"optimizer": {"name": "lion"}}, '"adamw8bit", "muon", "shampoo"'),
        ({"shard": {"granularity": "32 columns"}}, "'32 columns' is not a block"),
        ({"shard": {"granularity": "0 rows"}}, "'0 rows' is not a block"),
        ({"shard": {"granularity": {"*": 32}}}, '32 is not a block; write "32 rows"'),
    ],
)
def test_settings_that_make_no_sense_are_refused(section: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict(Config, section)
    assert part in str(refused.value)


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 5))


@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_hidden_matrices_and_the_rest(tmp_path: Path, name: str) -> None:
    """The optimizer takes hidden matrices, AdamW the rest at a rate of its own; only matrices decay."""
    settings: dict[str, Any] = {"name": name, "lr": 0.1, "adamw_lr": 0.01, "weight_decay": 0.3, "warmup_steps": 2}
    config = job(tmp_path, optimizer=settings)
    optimizer = make_optimizer(model(), config.optimizer)
    assert set_learning_rates(optimizer, 0, config.optimizer, config.train.steps) == 0.05
    groups = [
        (group["algorithm"], group["lr"], group["weight_decay"], [tuple(p.shape) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert groups == [
        (name, 0.05, 0.3, [(3, 4)]),
        ("adamw", 0.005, 0.3, [(5, 4), (5, 3)]),
        ("adamw", 0.005, 0.0, [(3,), (3,), (3,), (5,)]),
    ]
    assert all(group["betas"] == config.optimizer.betas for group in optimizer.param_groups[1:])


def test_settings_reach_the_optimizer(tmp_path: Path) -> None:
    muon = make_optimizer(
        model(), job(tmp_path, optimizer={"name": "muon", "nesterov": False, "ns_steps": 3}).optimizer
    )
    assert (muon.param_groups[0]["nesterov"], muon.param_groups[0]["ns_steps"]) == (False, 3)
    shampoo = make_optimizer(
        model(), job(tmp_path, optimizer={"name": "shampoo", "grafting": "sgd", "eps": 1e-4}).optimizer
    )
    assert (shampoo.param_groups[0]["grafting"], shampoo.param_groups[0]["grafting_eps"]) == ("sgd", 1e-4)
    assert shampoo.param_groups[1]["eps"] == 1e-4
    eight = make_optimizer(model(), job(tmp_path, optimizer={"name": "adamw8bit", "betas": [0.5, 0.6]}).optimizer)
    assert [group["betas"] for group in eight.param_groups] == [(0.5, 0.6)] * 2


@pytest.mark.parametrize(("flat_blocks", "uncut"), [(False, 32 * 200), (True, 256)])
def test_blocks_of_moments_and_of_cuts_agree(tmp_path: Path, flat_blocks: bool, uncut: int) -> None:
    config = job(tmp_path, optimizer={"name": "adamw8bit", "flat_blocks": flat_blocks})
    weight = nn.Parameter(torch.zeros(100, 200))
    weight.grad = torch.ones_like(weight)
    assert shard_policy(config.shard, config.optimizer).granularity("weight", weight) == uncut
    optimizer = make_optimizer(nn.ParameterList([weight]), config.optimizer)
    optimizer.step()
    scales = -(-100 * 200 // 256) if flat_blocks else 4 * 7
    assert optimizer.state[weight]["exp_avg_scale"].numel() == scales


def test_a_model_without_hidden_matrices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has none that trains"):
        make_optimizer(
            nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4)), job(tmp_path, optimizer={"name": "muon"}).optimizer
        )


def rates(total: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)
    return [lr_at(step, config, total_steps=total) for step in range(total)]


def test_constant_after_warmup() -> None:
    assert rates(5, lr_schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    values = rates(10, lr_schedule="cosine", warmup_steps=2, min_lr_ratio=0.2)
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[6] == pytest.approx(0.6)  # half way down
    assert values[2:] == sorted(values[2:], reverse=True)
    assert min(values) > 0.2
    assert rates(12, lr_schedule="cosine", decay_steps=5, min_lr_ratio=0.2)[5:] == pytest.approx([0.2] * 7)


def test_wsd() -> None:
    values = rates(10, lr_schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(10, lr_schedule="wsd", min_lr_ratio=0.0) == pytest.approx([1] * 8 + [0.5, 0])  # a fifth by default


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_positive_rates(schedule: str, total: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(total, lr_schedule=schedule, warmup_steps=1))


@pytest.mark.parametrize(
    ("optimizer", "wire", "expected"),
    [
        ("adamw", "4bit", {"weights": "int4", "gradients": "int4"}),
        ("muon", "4bit", {"weights": "int4", "gradients": "int8"}),
        ("shampoo", "4bit", {"weights": "int4", "gradients": "int8"}),
        ("muon", {"weights": "int4", "gradients": "int4"}, {"weights": "int4", "gradients": "int4"}),
        ("muon", "8bit", {"weights": "int8", "gradients": "int8"}),
        ("shampoo", None, {}),
    ],
)
def test_matrix_optimizers_get_gradients_in_eight_bits(optimizer: Any, wire: Any, expected: dict[str, Any]) -> None:
    shard = ShardConfig.of_keys({"wire": wire})
    assert shard_policy(shard, OptimizerConfig(name=optimizer)).wire == laconic.Wire(**expected)
