"""Whole jobs: the same numbers under every strategy, exact resume, and refusals before the first step."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from laconic import registry
from laconic.config import load, to_toml
from laconic.train.cli import main
from laconic.train.prepare import differences
from tests.support.jobs import assert_resumed, command, interrupted, job, metrics, refusal, train, train_all
from tests.support.launch import run_ranks

EACH = {
    name: each
    for name, each in registry.strategies().items()
    if each.in_plan
    and each.package is None
    and not each.has_islands
    and each.schedule is None
    and each.pipeline is None
}
"""The registered strategies that train in every step and need no other package."""
IN_HALF = {name: EACH.pop(name) for name in ("lossless", "lossless-4bit")}
"""Those that need half precision."""
CHECKED = {"cache": "host", "check_every": 1, "audit_every": 2, "on_damage": "regather"}


@pytest.mark.machine
def test_every_strategy_trains_the_same_model(tmp_path: Path) -> None:
    """2 nodes x 2 ranks, two micro-batches; and one rank alone with the same global batch."""
    configs = [
        job(tmp_path, shard=dict(shard), train={"steps": 3, "accumulation": 2, "output": str(tmp_path / str(index))})
        for index, shard in enumerate([*(each.shard for each in EACH.values()), CHECKED])
    ]
    alone = train(job(tmp_path, train={"steps": 3, "accumulation": 8}, shard={"strategy": "ddp"}))
    *summaries, checked = run_ranks(train_all, 4, configs, local=2)[0]
    found = dict(zip(EACH, summaries, strict=True))
    assert checked["losses"] == found["host"]["losses"]
    for name, summary in found.items():
        exact = not EACH[name].inexact
        assert summary["losses"] == pytest.approx(alone["losses"], rel=1e-5 if exact else 1e-2), name
        assert exact or summary["losses"] != found["device"]["losses"], name
        if exact:
            assert summary["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-4), name
        if not EACH[name].on_engine:
            assert summary["wire_bytes"] == [None] * 3, name
    assert alone["losses"][-1] < alone["losses"][0]
    wire = {name: found[name]["wire_bytes"][2] for name in EACH if EACH[name].on_engine}
    assert found["none"]["wire_bytes"][1] > found["host"]["wire_bytes"][1] == found["device"]["wire_bytes"][1] > 0
    assert wire["4bit"] < 0.6 * wire["8bit"] < 0.2 * wire["host"], "matrices and their steps; vectors stay exact"
    assert 2 < wire["zero++"] / wire["4bit"] < 4, "in each of two micro-batches, weights in 8 bits and gradients in 4"


@pytest.mark.heavy
def test_lossless_crossings_train_the_bits_of_exact_ones(tmp_path: Path) -> None:
    """2 nodes, two micro-batches, in bf16."""
    names = ("host", *IN_HALF)
    shards = [{**(EACH | IN_HALF)[name].shard, "param_dtype": "bfloat16"} for name in names]
    configs = [
        job(tmp_path, shard=shard, train={"steps": 3, "accumulation": 2, "output": str(tmp_path / str(index))})
        for index, shard in enumerate(shards)
    ]
    exact, lossless, coded = run_ranks(train_all, 2, configs, local=1)[0]
    assert (lossless["losses"], lossless["grad_norms"]) == (exact["losses"], exact["grad_norms"])
    assert coded["losses"] != exact["losses"]
    assert coded["losses"] == pytest.approx(exact["losses"], rel=1e-2)
    assert coded["wire_bytes"][2] < lossless["wire_bytes"][2] < exact["wire_bytes"][2]


@pytest.mark.heavy
def test_a_resumed_run_repeats_the_unbroken_one(tmp_path: Path) -> None:
    """Losses bit for bit under each strategy, with LoRA, dropout, a schedule and the metrics file carried on."""
    settings: dict[str, Any] = {
        "lora": {"enabled": True, "rank": 2, "dropout": 0.3},
        "optimizer": {"lr_schedule": "cosine", "decay_steps": 4, "warmup_steps": 1},
    }
    wholes = []
    for name in ("laconic", "fsdp2"):
        configs = interrupted(tmp_path, name, 2, shard={"strategy": name}, **settings)
        summaries = run_ranks(train_all, 2, configs, local=1)[0]
        assert_resumed(*summaries)
        rows = metrics(tmp_path / name)
        assert [row["loss"] for row in rows] == summaries[0]["losses"]
        assert [row["tokens"] for row in rows] == [64, 128, 192, 256]
        wholes.append(summaries[0])
    laconic, fsdp2 = wholes
    assert laconic["losses"] == pytest.approx(fsdp2["losses"], rel=1e-5)
    assert laconic["num_trainable"] < laconic["num_parameters"] / 4
    assert laconic["wire_bytes"][1] < laconic["wire_bytes"][0]  # the frozen weights crossed in the first step


def test_a_run_leaves_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(
        tmp_path,
        train={"eval_every": 2, "save_every": 2, "log_every": 2},
        log={"tensorboard": True, "memory_step": 3},
        model={"activation_checkpointing": True},
    )
    summary = train(config)
    out = tmp_path / "out"
    effective = load(out / "config.toml")
    assert effective.model.config == {**config.model.config, "vocab_size": 256}  # type: ignore[dict-item]
    assert effective.train == config.train
    printed = capsys.readouterr().out
    assert f"1 nodes x 1 ranks, cpu; configuration: {out / 'config.toml'}" in printed.splitlines()
    assert "[optimizer]" not in printed
    assert [line.split(" |")[0] for line in printed.splitlines() if line.startswith("step ")] == [
        *("step 1/4", "step 2/4", "step 2/4"),
        *("step 4/4", "step 4/4"),
    ]
    assert json.loads((out / "summary.json").read_text()) == summary
    rows = metrics(out)
    assert [row["loss"] for row in rows if "loss" in row] == summary["losses"]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4]
    assert summary["evaluations"][0]["eval_perplexity"] == math.exp(summary["evaluations"][0]["eval_loss"])
    assert AutoTokenizer.from_pretrained(out / "tokenizer")("é")["input_ids"] == list("é".encode())
    assert summary["evaluations"][1]["eval_loss"] < summary["evaluations"][0]["eval_loss"] < math.log(256) + 0.5
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == ["step-2", "step-4"]
    assert list((out / "tensorboard").glob("events.*"))
    assert len(summary["step_s"]) == len(summary["traffic_bytes"]) == 4
    assert summary["step_peak_bytes"] > 0
    assert summary["resting_bytes"] > 2 * 4 * summary["num_parameters"]  # two moments, and the weights
    assert summary["versions"]["torch"] == version("torch")


def test_every_rank_refuses_what_one_rank_finds(tmp_path: Path) -> None:
    """The corpus is read by one rank per node, the message reaches all of them."""
    (tmp_path / "corpus.txt").write_bytes(b"GIF8\0")
    messages = run_ranks(refusal, 3, job(tmp_path), local=3)
    assert len(set(messages)) == 1
    assert "is binary" in messages[0]


def test_another_runs_results_are_not_overwritten(tmp_path: Path) -> None:
    config = job(tmp_path, train={"steps": 1, "save_every": 0})
    train(config)
    assert "already holds checkpoints and metrics.jsonl and summary.json of a run; go on" in refusal(config)
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    (tmp_path / "out" / "summary.json").unlink()
    assert "already holds metrics.jsonl of a run" in refusal(config)
    (tmp_path / "out" / "metrics.jsonl").write_text("")  # of a run that was killed before its first step
    train(config)
    wider = job(
        tmp_path,
        train={"resume": "auto"},
        model={"config": {**config.model.config, "hidden_size": 32}},  # type: ignore[dict-item]
    )
    assert "layers" in refusal(wider)  # names the tensors that differ


@pytest.mark.machine
def test_ctrl_c_ends_with_one_line_and_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job(tmp_path, train={"steps": 100_000, "save_every": 0, "log_every": 1})))
    running = subprocess.Popen(command(str(path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        while " 2/100000 " not in running.stdout.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, err = running.communicate()
    finally:
        running.kill()
    assert running.returncode == 128 + signal.SIGINT
    assert err.splitlines()[-1] == (
        "laconic train: stopped by SIGINT, with a checkpoint; go on with --train.resume auto"
    )
    assert list((tmp_path / "out" / "checkpoints").glob("step-*"))


def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path: Path) -> None:
    """And the steps before it are on record."""
    messages = run_ranks(refusal, 2, job(tmp_path, optimizer={"lr": 1e30, "max_grad_norm": 0.0}), local=1)
    assert all("training stopped before the optimizer of step" in message for message in messages)
    assert metrics(tmp_path / "out")[0]["step"] == 1


def test_differences_between_configurations() -> None:
    saved = {"train": {"steps": 4, "resume": "never"}, "data": {"path": "a"}}
    current = {"train": {"steps": 5, "resume": "auto"}, "data": {"path": "a", "cache": "b"}}
    assert differences(saved, current) == ["data.cache: None -> b", "train.steps: 4 -> 5"]


@pytest.mark.machine
def test_the_command_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job(tmp_path)))
    assert main([str(path), "--train.steps", "2"]) == 0
    assert "step 2/2" in capsys.readouterr().out
    assert main([str(path), "--train.output", str(tmp_path / "other"), "--data.path", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("laconic train: data.path = ")
    assert err.count("\n") == 1
