"""The job's optimizers: parameter groups, exact resume, learning rates, what they ask of the wire, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.config import JobError, OptimizerConfig
from laconic.config.sections import ShardConfig
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import lr_at, make_optimizer, set_learning_rates
from laconic.strategies.parallelize import shard_policy
from laconic.strategies.simultaneous import LossScale
from laconic.strategies.zero1 import make_cut_optimizer
from tests.support.jobs import SMALL_LLAMA, assert_resumed, interrupted, job, refusal, train, train_all
from tests.support.launch import on_ranks, run_ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw8bit": {},
    "muon": {"lr": 0.02, "adamw_lr": 0.003, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    "shampoo": {"adamw_lr": 0.003, "update_every": 2, "block_size": 50},
}


def sections(name: str, **train: Any) -> dict[str, Any]:
    """Of a job with matrices large enough for 8 bits."""
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1}
    schedule = {"lr_schedule": "cosine", "warmup_steps": 1, "decay_steps": 5}
    return {
        "model": {"config": {"model_type": "llama", **SMALL_LLAMA, **sizes}},
        "optimizer": {"name": name, **schedule, **OPTIMIZERS[name]},
        "train": {"steps": 6, **train},
    }


@pytest.mark.heavy
def test_every_optimizer_trains_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """2 nodes x 1 rank, unbroken or resumed half way, train as one rank with the whole model does."""
    for name in OPTIMIZERS:
        configs = interrupted(tmp_path, name, 3, **sections(name))
        unbroken, *parts = run_ranks(train_all, 2, configs, local=1)[0]
        assert unbroken["losses"][-1] < unbroken["losses"][0] - 0.2, name
        assert_resumed(unbroken, *parts)
        output = str(tmp_path / f"{name}-alone")
        alone = train(job(tmp_path, **sections(name, micro_batch_size=4, output=output)))
        assert alone["losses"] == pytest.approx(unbroken["losses"], rel=2e-3), name


def test_blocks_follow_the_job(tmp_path: Path) -> None:
    """Matrices that stay whole train as matrices that are cut do."""
    blocks: list[Any] = [{}, {"granularity": "whole"}, {"granularity": {"*norm*": "1 row", "*": "whole"}}]
    configs = [
        job(tmp_path, shard=shard, **sections("muon", steps=3, output=str(tmp_path / str(index))))
        for index, shard in enumerate(blocks)
    ]
    cut, whole, by_pattern = run_ranks(train_all, 2, configs, local=1)[0]
    assert whole["losses"] == pytest.approx(cut["losses"], rel=1e-5)
    assert by_pattern["losses"] == pytest.approx(cut["losses"], rel=1e-5)
    unfit = job(tmp_path, shard={"granularity": "5 rows"}, **sections("adamw8bit"))
    for message in run_ranks(refusal, 2, unfit, local=2):
        assert "granularity=laconic.rows(32)" in message


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 5))


@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_hidden_matrices_and_the_rest(name: Any) -> None:
    """The optimizer takes hidden matrices, AdamW the rest at a rate of its own; only matrices decay."""
    config = OptimizerConfig(name=name, lr=0.1, adamw_lr=0.01, weight_decay=0.3, warmup_steps=2)
    optimizer = make_optimizer(model(), config)
    assert set_learning_rates(optimizer, 0, config, 4) == 0.05
    groups = [
        (group["algorithm"], group["lr"], group["weight_decay"], [tuple(p.shape) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert groups == [
        (name, 0.05, 0.3, [(3, 4)]),
        ("adamw", 0.005, 0.3, [(5, 4), (5, 3)]),
        ("adamw", 0.005, 0.0, [(3,), (3,), (3,), (5,)]),
    ]
    assert all(group["betas"] == config.betas for group in optimizer.param_groups[1:])


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"name": "muon", "nesterov": False, "ns_steps": 3}, [{"nesterov": False, "ns_steps": 3}]),
        ({"name": "shampoo", "grafting": "sgd", "eps": 0.1}, [{"grafting": "sgd", "grafting_eps": 0.1}, {"eps": 0.1}]),
        ({"name": "adamw8bit", "betas": (0.5, 0.6)}, [{"betas": (0.5, 0.6)}, {"betas": (0.5, 0.6)}]),
    ],
)
def test_settings_reach_the_optimizer(settings: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    optimizer = make_optimizer(model(), OptimizerConfig(**settings))
    for group, values in zip(optimizer.param_groups, groups, strict=False):
        assert values.items() <= group.items()


@pytest.mark.parametrize(("flat_blocks", "uncut"), [(False, 32 * 200), (True, 256)])
def test_blocks_of_moments_and_of_cuts_agree(flat_blocks: bool, uncut: int) -> None:
    config = OptimizerConfig(name="adamw8bit", flat_blocks=flat_blocks)
    weight = nn.Parameter(torch.zeros(100, 200))
    weight.grad = torch.ones_like(weight)
    assert shard_policy(ShardConfig(), config).granularity("weight", weight) == uncut
    optimizer = make_optimizer(nn.ParameterList([weight]), config)
    optimizer.step()
    scales = -(-100 * 200 // 256) if flat_blocks else 4 * 7
    assert optimizer.state[weight]["exp_avg_scale"].numel() == scales


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    model[2].requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3))
    shapes = {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups}
    assert shapes == {0.3: [(3, 2)], 0.0: [(3,), (3,), (3,)]}


def test_the_scale_moves_as_that_of_grad_scaler() -> None:
    """torch.amp.GradScaler in one process is the oracle, on a random row of overflows."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    ours = LossScale(scale=2.0**20, growth_steps=3)
    for overflowed in torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.3:
        oracle.scale(parameter.sum()).backward()
        if overflowed:
            parameter.grad.mul_(math.inf)  # type: ignore[union-attr]
        oracle.step(optimizer)
        oracle.update()
        optimizer.zero_grad()
        ours.update(overflowed=bool(overflowed))
        assert ours.scale == oracle.get_scale()
    assert ours.num_skipped > 10


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="has none that trains"):
        make_optimizer(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4)), OptimizerConfig(name="muon"))


def rates(total: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)
    return [lr_at(step, config, total_steps=total) for step in range(total)]


def test_learning_rates() -> None:
    assert rates(5, lr_schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    values = rates(10, lr_schedule="cosine", warmup_steps=2, min_lr_ratio=0.2)
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[6] == pytest.approx(0.6)  # half way down
    assert values[2:] == sorted(values[2:], reverse=True)
    assert min(values) > 0.2
    assert rates(12, lr_schedule="cosine", decay_steps=5, min_lr_ratio=0.2)[5:] == pytest.approx([0.2] * 7)
    values = rates(10, lr_schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(10, lr_schedule="wsd", min_lr_ratio=0.0) == pytest.approx([1] * 8 + [0.5, 0])  # a fifth by default
    for schedule in ("cosine", "wsd", "constant"):
        for total in (1, 2, 3):  # short runs
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


# -- ddp-zero1: DDP with states cut over the ranks ---------------------------------------------------------------------


def trained(make: Any, settings: OptimizerConfig) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Three steps of two micro-batches on odd sizes, clipped, with a learning rate that changes and a frozen weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 3), nn.Linear(3, 1))
    model[3].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make(model, settings)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for micro_batch in range(2):
            wrapped.require_backward_grad_sync = micro_batch == 1
            wrapped(torch.randn(2, 7)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


@pytest.mark.machine
@pytest.mark.parametrize("world_size", [3, pytest.param(9, marks=pytest.mark.campaign)])
@on_ranks("world_size")
def test_the_bits_are_those_of_ddp() -> None:
    """Nine ranks are more than parameters that train: some update nothing."""
    for fused in (True, False):
        settings = OptimizerConfig(lr=0.01, weight_decay=0.1, fused=fused)
        expected, whole = trained(make_optimizer, settings)
        found, cut = trained(make_cut_optimizer, settings)
        assert all(map(torch.equal, found, expected))
        assert not cut.state
        kept: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(kept, state_nbytes(cut.optim))  # type: ignore[attr-defined]
        assert sum(kept) == state_nbytes(whole)
        assert max(kept) < state_nbytes(whole)


@on_ranks(1)
def test_parameters_of_two_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16))
    with pytest.raises(JobError, match=r"2 dtypes, torch.bfloat16, torch.float32; use 'ddp'"):
        make_cut_optimizer(model, OptimizerConfig())


@pytest.mark.machine
def test_a_job_trains_as_under_ddp_with_fewer_states(tmp_path: Path) -> None:
    configs = [
        job(
            tmp_path,
            shard={"strategy": name},
            train={"accumulation": 2, "output": str(tmp_path / name)},
            log={"memory_step": 2},
        )
        for name in ("ddp", "ddp-zero1")
    ]
    whole, cut = run_ranks(train_all, 3, configs, local=3)[0]
    assert cut["losses"] == whole["losses"]
    assert cut["grad_norms"] == whole["grad_norms"]
    states = 8 * whole["num_parameters"]
    assert states / 2 < whole["resting_bytes"] - cut["resting_bytes"] < states
