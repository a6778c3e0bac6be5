"""A small training job for the tests of the trainer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.config import Config, JobError, from_dict, to_toml
from tests.support.launch import free_port, run_ranks
from tests.support.tiers import is_inside

SMALL_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
"""A transformers configuration without its vocabulary."""

TEXT = "".join(f"{n} bottles of beer on the wall, take one down, pass it around: {n - 1}.\n" for n in range(300, 0, -1))


def corpus(folder: Path) -> Path:
    """A text file of some 20 kB."""
    path = folder / "corpus.txt"
    path.write_text(TEXT)
    return path


def table(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A job in plain values: two small layers, four steps, output in `folder`/out; `sections` are laid over it."""
    job: dict[str, Any] = {
        "model": {"config": {"model_type": "llama", **SMALL_LLAMA}},
        "data": {
            "kind": "text",
            "path": str(folder / "corpus.txt"),
            "sequence_length": 16,
            "eval_fraction": 0.1,
            "cache": str(folder / "tokens"),
        },
        "optimizer": {"lr": 0.01, "lr_schedule": "constant"},
        "train": {"steps": 4, "micro_batch_size": 2, "device": "cpu", "output": str(folder / "out"), "save_every": -1},
        "log": {"tensorboard": False},
    }
    for section, values in sections.items():
        job[section] = {**job.get(section, {}), **values}
    return job


def job(folder: Path, **sections: dict[str, Any]) -> Config:
    """The same as a `Config`, with its corpus written."""
    if not (folder / "corpus.txt").exists():
        corpus(folder)
    return from_dict(Config, table(folder, **sections))


def train(config: Config) -> dict[str, Any]:
    """Run on this rank, or on one rank alone; top-level, so that `run_ranks` can send it."""
    from laconic.train.loop import run

    return run_ranks(run, 1, config)[0] if _needs_ranks() else run(config)


def _needs_ranks() -> bool:
    """True in a test of `make test` that is no rank: Gloo would leave the process."""
    return is_inside() and not dist.is_initialized()


def train_and_listen(configs: list[Config]) -> tuple[list[dict[str, Any]], str]:
    """Run several jobs; return their summaries and what this rank has printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return train_all(configs), printed.getvalue()


def interrupted(folder: Path, name: str, at: int, **sections: Any) -> list[Config]:
    """A job whole, below `name`-whole; and below `name` up to step `at`, and resumed from there."""
    given = sections.pop("train", {})

    def one(output: str, **settings: Any) -> Config:
        return job(folder, **sections, train={**given, "output": str(folder / output), **settings})

    return [one(f"{name}-whole"), one(name, steps=at, save_every=0), one(name, resume="auto")]


def assert_resumed(whole: dict[str, Any], start: dict[str, Any], rest: dict[str, Any]) -> None:
    """Assert that the summaries of `interrupted` have the same figures, to the bit."""
    assert rest["start_step"] == len(start["losses"]) > 0
    for key in ("losses", "grad_norms"):
        assert str(start[key] + rest[key]) == str(whole[key])  # norms may be NaN


def resumed_from(config: Config, step: int) -> Config:
    """The job resumed in a copy of its output, `...-resumed`, without the checkpoints after `step`. Collective."""
    output = Path(config.train.output)
    copy = output.with_name(f"{output.name}-resumed")
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(output, copy)
        for later in range(step + 1, config.train.steps + 1):
            shutil.rmtree(copy / "checkpoints" / f"step-{later}", ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()
    return replace(config, train=replace(config.train, output=str(copy), resume="auto"))


def train_and_resume(configs: list[Config], step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The summaries of each job, unbroken and resumed from its checkpoint after `step`."""
    return [(train(config), train(resumed_from(config, step))) for config in configs]


def metrics(output: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> Any:
    """A folder of TensorBoard, read."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def tags(folder: Path) -> set[str]:
    """The names of the figures in a folder of TensorBoard."""
    return set(events_of(folder).Tags()["scalars"])


def train_all(configs: list[Config]) -> list[dict[str, Any]]:
    """Run several jobs one after the other in the same processes, which start slowly."""
    return [train(config) for config in configs]


def refusal(config: Config) -> str:
    """The message with which this rank, or one rank alone, refuses the job."""
    if _needs_ranks():
        return run_ranks(refusal, 1, config)[0]
    try:
        train(config)
    except JobError as error:
        return str(error)
    return ""


def command(*arguments: str) -> list[str]:
    """A command line of `laconic train`."""
    return [sys.executable, "-m", "laconic.train.cli", *arguments]


def started(folder: Path, config: Config) -> list[subprocess.Popen[str]]:
    """The command on two nodes of one rank each, by torchrun's environment."""
    (folder / "job.toml").write_text(to_toml(config), encoding="utf-8")
    places = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **places, "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            command(str(folder / "job.toml")), env={**environment, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip


def said_after_kill(processes: list[subprocess.Popen[str]], steps: int) -> tuple[int, list[str], float]:
    """Kill rank 1 of `started` after some logged steps.

    Returns rank 0's exit code, its lines that name rank 1, and the seconds from the kill to its end.
    """
    first, second = processes
    assert first.stdout is not None
    try:
        for _ in zip(range(steps), (line for line in first.stdout if "| loss" in line), strict=False):
            pass
        second.kill()
        killed_s = time.monotonic()
        _, said = first.communicate()
        seconds = time.monotonic() - killed_s
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return first.returncode, [line for line in said.splitlines() if "rank 1" in line], seconds
