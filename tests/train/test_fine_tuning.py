"""What fine-tuning adds to the loop: float16, compiled layers, epochs, and Weights & Biases."""

from __future__ import annotations

import math
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from laconic.strategies import parallelize
from laconic.strategies.optimizers import lr_at
from laconic.strategies.simultaneous import LossScale
from tests.support.jobs import SMALL_LLAMA, assert_resumed, interrupted, job, metrics, refusal, train, train_all
from tests.support.launch import run_ranks

FP16 = {"param_dtype": "float16"}
ONE_LAYER = {"config": {"model_type": "llama", **SMALL_LLAMA, "num_hidden_layers": 1}}


@pytest.mark.heavy
def test_float16_skips_together_and_trains_as_float32(tmp_path: Path) -> None:
    """On 3 ranks: a scale that overflows at first, its schedule, its resume; and gradients clipped after unscaling."""
    optimizer = {"lr_schedule": "cosine", "warmup_steps": 4, "max_grad_norm": 0.1, "loss_scale_growth_steps": 2}
    high = {**optimizer, "loss_scale": 2.0**20}

    steps = {"steps": 6}
    low = {"model": ONE_LAYER, "optimizer": {**optimizer, "loss_scale": 64.0}, "train": steps}
    configs = [
        *(interrupted(tmp_path, name, 4, **low, shard=shard)[0] for name, shard in (("fp16", FP16), ("fp32", {}))),
        *interrupted(tmp_path, "broken", 4, model=ONE_LAYER, optimizer=high, shard=FP16, train=steps),
    ]
    fp16, fp32, *parts = run_ranks(train_all, 3, configs, local=1)[0]
    assert fp16["losses"] == pytest.approx(fp32["losses"], rel=2e-3)
    assert fp16["grad_norms"] == pytest.approx(fp32["grad_norms"], rel=2e-2)
    rows = metrics(tmp_path / "broken-whole")
    skipped = [row["skipped_steps"] for row in rows]
    assert 2 <= skipped[-1] < 6
    rule = LossScale(scale=2.0**20, growth_steps=2)
    for index, row in enumerate(rows):
        before = skipped[index - 1] if index else 0
        assert row["lr"] == lr_at(index - before, configs[2].optimizer, total_steps=6)
        assert math.isfinite(row["grad_norm"]) == (row["skipped_steps"] == before)
        assert row["loss_scale"] == rule.scale
        rule.update(overflowed=row["skipped_steps"] > before)
    assert_resumed(*parts)
    assert [row["loss_scale"] for row in metrics(tmp_path / "broken")] == [row["loss_scale"] for row in rows]


def test_a_loss_that_is_nan_ends_float16_training_too(tmp_path: Path) -> None:
    config = job(tmp_path, shard=FP16, optimizer={"lr": 1e30, "max_grad_norm": 0.0, "loss_scale": 4.0})
    assert "training stopped before the optimizer of step" in refusal(config)


@pytest.mark.heavy
def test_compiled_layers_train_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters on coded weights, by a compiler that makes no C++: tracing, and autograd ahead of time."""
    monkeypatch.setattr(parallelize, "compile_layers", partial(parallelize.compile_layers, backend="aot_eager"))
    lora = {"enabled": True, "rank": 2, "quantize": "nf4", "dora": True}
    settings = [{"steps": 2, "compile": on, "output": str(tmp_path / str(on))} for on in (False, True)]
    plain, compiled = (train(job(tmp_path, model=ONE_LAYER, lora=lora, train=each)) for each in settings)
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_epochs_become_steps(tmp_path: Path) -> None:
    """The corpus has 18,435 tokens to train on, and a step 2 x 16."""
    summary = train(job(tmp_path, train={"steps": 100, "epochs": 0.005}))
    assert len(summary["losses"]) == math.ceil(0.005 * math.ceil(18_435 / 32))
    assert summary["config"]["train"]["steps"] == 3


@pytest.mark.machine
def test_wandb_gets_the_scalars_and_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = {"wandb": True}
    monkeypatch.setenv("WANDB_PROJECT", "p")
    settings = {"steps": 2, "save_every": 0, "eval_every": 2}
    runs = [Mock(id="abc"), Mock(id="abc")]
    fake: Any = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)  # transformers looks at it
    fake.init = Mock(side_effect=runs)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(job(tmp_path, log=log, train=settings))
    train(job(tmp_path, log=log, train={**settings, "steps": 4, "resume": "auto"}))
    inits = [each.kwargs for each in fake.init.call_args_list]
    assert [(init["project"], init["id"]) for init in inits] == [("p", None), ("p", "abc")]
    assert inits[0]["config"]["train"]["steps"] == 2
    logged = [[(each.kwargs["step"], each.args[0]) for each in run.log.call_args_list] for run in runs]
    assert [[step for step, values in each if "train/loss" in values] for each in logged] == [[1, 2], [3, 4]]
    assert "eval/eval_perplexity" in logged[0][-1][1]
    assert all(run.finish.called for run in runs)
