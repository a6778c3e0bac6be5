"""The cyclic schedule in the trainer: refusals, training by the rule, checkpoints and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from laconic.checkpoint import load_dcp, open_checkpoint
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError
from laconic.cyclic import Rule
from laconic.data import tokens as data
from laconic.data.batches import Division, drawn_offsets
from laconic.hf.causal_lm import cut_causal_lm
from laconic.models.build import build_model
from laconic.models.export import export
from laconic.models.tokenizer import load_tokenizer
from laconic.strategies.checks import check_workers
from laconic.strategies.cyclic import num_workers
from laconic.strategies.optimizers import lr_at, make_stage_optimizer
from tests.hf.zoo import TINY, differing
from tests.reference.cyclic import Oracle
from tests.support.jobs import (
    job,
    metrics,
    refusal,
    resumed_from,
    train,
    train_all,
    train_and_listen,
    train_and_resume,
)
from tests.support.launch import run_ranks

MODEL = {**TINY["llama"], "num_hidden_layers": 3, "vocab_size": 256, "tie_word_embeddings": False}
STEPS = 4


def test_workers_come_from_the_launch(tmp_path: Path) -> None:
    def workers(launched: int, **schedule: Any) -> int:
        ranks = RankInfo(rank=0, world_size=launched, local_rank=0, num_local=1, num_nodes=launched)
        return num_workers(cyclic_job(tmp_path, "out", schedule=schedule).schedule, ranks)

    assert num_workers(job(tmp_path).schedule, RankInfo.from_environment()) == 0
    assert workers(4) == workers(4, workers=4) == 4
    assert workers(1, workers=3) == 3
    assert workers(10, states="shared") == workers(10, states="shared", workers=4) == 4
    with pytest.raises(JobError, match=r"schedule\.workers = 3, but there are 4 ranks"):
        workers(4, workers=3)
    with pytest.raises(JobError, match="start 15 ranks for 5 workers"):
        workers(12, states="shared")
    with pytest.raises(JobError, match="start 6 ranks, or leave"):
        workers(10, states="shared", workers=3)


# -- training ----------------------------------------------------------------------------------------------------------


def cyclic_job(folder: Path, name: str, **sections: Any) -> Config:
    """A job with a small Llama of five blocks."""
    given: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL},
        "schedule": {"kind": "cyclic", "cut_by": "parameters"},
        "optimizer": {"max_grad_norm": 0.0, "lr_schedule": "cosine", "warmup_steps": 1},
        "train": {"steps": STEPS, "output": str(folder / name), "save_every": 2},
    }
    return job(folder, **{key: {**given.get(key, {}), **sections.get(key, {})} for key in given | sections})


def trained(output: Path) -> dict[str, Tensor]:
    stored = open_checkpoint(output / "checkpoints")
    return stored.read(stored.tensors)


def by_oracle(config: Config, workers: int) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after the last step and the mean loss of each step, by the single-process oracle."""
    model: Any = build_model(config.model, device="cpu")
    stages = cut_causal_lm(model, workers, example=torch.zeros(2, 16, dtype=torch.int64), by="parameters")

    def loss_fn(logits: Tensor, rows: Tensor) -> Tensor:
        return model.loss_function(logits=logits, labels=rows, vocab_size=256)

    rule = Rule.named(config.schedule.rule, workers)
    clip = config.optimizer.max_grad_norm or None
    oracle = Oracle(stages, loss_fn, make_stage_optimizer(config.optimizer), rule, clip)
    assert config.data.cache is not None
    folder = data.prepare(config.data, load_tokenizer("bytes"), Path(config.data.cache))
    tokens = data.open_tokens(folder, config.data).train
    division = Division(num_workers=workers, micro_batch_size=2)
    losses = []
    for step in range(config.train.steps):
        oracle.set(lr=lr_at(step, config.optimizer, total_steps=config.train.steps))
        offsets = drawn_offsets(division, step, seed=0, num_starts=len(tokens) - 15)
        rows = torch.from_numpy(data.rows_at(tokens, offsets[0], 16))
        losses.append(float(np.mean([float(loss) for loss in oracle.step([(row, row) for row in rows])])))
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    newest = zip(names, oracle.newest, strict=True)
    return {name: value for pair in newest for name, value in zip(*pair, strict=True)}, losses


@pytest.mark.heavy
def test_every_placement_trains_by_the_rule(tmp_path: Path) -> None:
    """Equal to the bit: as many ranks as workers, more ranks that share stages, and one rank that interleaves."""

    def of(rule: str, workers: int, states: str, name: str = "") -> Config:
        return cyclic_job(
            tmp_path,
            f"{name or states}-{rule}",
            schedule={"rule": rule, "states": states, "workers": workers},
            optimizer={"max_grad_norm": 0.5 if rule == "clip" else 0.0},
            train={"save_every": 0, "eval_every": STEPS},
        )

    three = [of("lag2", 3, "replicated"), of("lag2", 3, "sharded"), of("clip", 3, "sharded"), of("v2", 2, "shared")]
    two = [of("v2", 2, "replicated"), of("v2", 2, "sharded")]
    alone = [of("lag2", 3, "replicated", "alone")]
    summaries = [*run_ranks(train_all, 3, three)[0], *run_ranks(train_all, 2, two)[0], *train_all(alone)]
    expected = {rule: by_oracle(of(rule, workers, "replicated"), workers) for rule, workers in RULE_OF_TEST.items()}
    for config, summary in zip([*three, *two, *alone], summaries, strict=True):
        rule, name = config.schedule.rule, config.train.output
        weights, losses = expected[rule]
        assert differing(trained(Path(name)), weights) == [], name
        assert summary["losses"] == pytest.approx(losses, rel=1e-6), name
        assert summary["tokens_per_step"] == RULE_OF_TEST[rule] * 2 * 16
        assert summary["grad_norms"] == [None] * STEPS
        assert summary["evaluations"][0]["eval_loss"] < losses[0] - 0.1
    assert summaries[0]["evaluations"] == summaries[1]["evaluations"]


RULE_OF_TEST = {"lag2": 3, "clip": 3, "v2": 2}
"""Rules and their numbers of workers."""


# -- checkpoints -------------------------------------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    "lag2": {
        "schedule": {"cut_by": "time", "wire": {"weights": "int8", "gradients": "int8", "feedback": True}},
        "lora": {"enabled": True, "rank": 2, "dropout": 0.3},
    },
    "v2": {"schedule": {"rule": "v2", "states": "sharded", "cache": "host"}, "train": {"async_save": True}},
    "clip": {
        "schedule": {"rule": "clip", "states": "sharded"},
        "optimizer": {"name": "adamw8bit", "max_grad_norm": 0.5},
        "model": {"config": MODEL, "activation_checkpointing": True},
    },
    "dp": {"schedule": {"rule": "dp"}, "optimizer": {"max_grad_norm": 0.5}},
}


@pytest.mark.heavy
def test_a_resumed_run_repeats_the_unbroken_one(tmp_path: Path) -> None:
    """Equal to the bit, from a checkpoint with a pending gradient, and with copies of weights if they cross coded."""
    configs = [cyclic_job(tmp_path, name, **sections) for name, sections in RESUMED.items()]
    pairs = run_ranks(train_and_resume, 2, configs, 2, local=1)[0]
    for name, (unbroken, rest) in zip(RESUMED, pairs, strict=True):
        assert rest["start_step"] == 2, name
        assert rest["losses"] == unbroken["losses"][2:], name
        assert differing(trained(tmp_path / f"{name}-resumed"), trained(tmp_path / name)) == [], name
        assert has_state(tmp_path / name, 2, "pending_gradient") == (name != "dp"), name
        assert not has_state(tmp_path / name, STEPS, "pending_gradient"), name
        assert has_state(tmp_path / name, 2, "copy_of_weights") == (name == "lag2"), name
        assert [row["loss"] for row in metrics(tmp_path / f"{name}-resumed")] == unbroken["losses"], name


def has_state(output: Path, step: int, state: str) -> bool:
    """Whether a checkpoint has a state of the optimizer with this name."""
    metadata = torch.distributed.checkpoint.FileSystemReader(output / "checkpoints" / f"step-{step}").read_metadata()
    return any(key.endswith(f".{state}") for key in metadata.state_dict_metadata)


def test_one_rank_resumes_and_refuses_other_checkpoints(tmp_path: Path) -> None:
    whole, resume = cyclic_job(tmp_path, "whole", schedule={"workers": 3}), {"resume": "auto"}
    unbroken, resumed = train(whole), resumed_from(whole, 2)
    other = cyclic_job(tmp_path, "whole-resumed", schedule={"workers": 2}, train=resume)
    assert "the checkpoint of step 2 has 3 stages, and this launch 2 workers" in refusal(other)
    assert train(resumed)["losses"] == unbroken["losses"][2:]
    assert differing(trained(tmp_path / "whole-resumed"), trained(tmp_path / "whole")) == []
    train(job(tmp_path, model={"config": MODEL}, train={"save_every": 0, "output": str(tmp_path / "plain")}))
    plain = cyclic_job(tmp_path, "plain", schedule={"workers": 2}, train=resume)
    assert "was written with schedule.kind = 'simultaneous'" in refusal(plain)


def test_checkpoints_are_of_the_model(tmp_path: Path) -> None:
    """Export and load_dcp read a checkpoint, with a pending gradient or without."""
    run_ranks(train, 2, cyclic_job(tmp_path, "out", schedule={"states": "sharded"}))
    export(tmp_path / "out", tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    weights = trained(tmp_path / "out")
    assert differing(dict(exported.state_dict()), weights) == []
    checkpoints = tmp_path / "out" / "checkpoints"
    assert not load_dcp(checkpoints / "step-2", model=exported)
    assert differing(dict(exported.state_dict()), weights) != []
    optimizer = torch.optim.AdamW(exported.parameters())
    load_dcp(checkpoints / f"step-{STEPS}", model=exported, optimizer=optimizer, strict=False)
    assert all(int(optimizer.state[p]["step"]) == STEPS for p in exported.parameters())


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_schedule_is_logged(tmp_path: Path) -> None:
    config = cyclic_job(tmp_path, "out", train={"save_every": -1})
    [summary], printed = run_ranks(train_and_listen, 3, [config])[0]
    assert "3 workers one after the other by lag2" in printed
    assert "cut into stages of [" in printed
    assert summary["strategy"] == "cyclic"
    assert summary["cache"] is None
    rows = metrics(tmp_path / "out")
    assert all("grad_norm" not in row for row in rows)


def test_memory_is_measured_on_one_rank(tmp_path: Path) -> None:
    log = {"memory_step": 4}  # by when all stages have been updated
    summary = train(cyclic_job(tmp_path, "one", schedule={"workers": 2}, log=log, train={"save_every": -1}))
    assert summary["step_peak_bytes"] > 0
    assert summary["resting_bytes"] > 3 * 4 * summary["num_parameters"]  # weights, two moments
    job = cyclic_job(tmp_path, "two", log=log)
    ranks = RankInfo(rank=0, world_size=2, local_rank=0, num_local=2, num_nodes=1)
    with pytest.raises(JobError, match=r"log\.memory_step = 4 and schedule\.kind = 'cyclic' on 2 ranks"):
        check_workers(job.schedule, job.optimizer, job.log, ranks)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    message = refusal(cyclic_job(tmp_path, "out", schedule={"workers": 2}, optimizer={"lr": 1e30}))
    assert "training stopped before the optimizer of step" in message
    assert "on rank 0. The weights are lost: gradients of steps" in message
