"""Whole jobs on conversations, against one process that has one row at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic.config import Config, load
from laconic.data import tokens as data
from laconic.data.batches import EpochSampler
from laconic.data.rows import RowFiles
from laconic.models.build import build_model
from laconic.models.tokenizer import ByteTokenizer
from laconic.strategies.optimizers import make_optimizer
from tests.reference import fine_tuning as naive
from tests.support.jobs import SMALL_LLAMA, job, train_all
from tests.support.launch import run_ranks

CHAT = Path(__file__).parents[2] / "examples" / "data" / "chat.jsonl"
CONVERSATIONS: list[Any] = [json.loads(line)["messages"] for line in CHAT.read_text().splitlines()[:12]]
RANKS, STEPS, LENGTH = 3, 3, 300


def chat_job(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    path = folder / "rows.jsonl"
    rows = [dict(zip(("input_ids", "assistant_masks"), naive.chatml(each), strict=True)) for each in CONVERSATIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {**SMALL_LLAMA, "max_position_embeddings": LENGTH, "vocab_size": 256}
    given: dict[str, dict[str, Any]] = {
        "data": {"kind": "datasets", "path": str(path), "sequence_length": LENGTH, "eval_fraction": 0.2},
        "train": {"steps": STEPS, "eval_every": STEPS, "output": str(folder / name)},
        "model": {"config": {"model_type": "llama", **sizes}},
    }
    return job(folder, **{key: {**given.get(key, {}), **sections.get(key, {})} for key in given | sections})


class Oracle:
    """One process with the documents of a job."""

    def __init__(self, config: Config) -> None:
        index = data.prepare(config.data, ByteTokenizer(), Path(str(config.data.cache)))
        self.config, self.files = config, cast("RowFiles", data.open_data(index, config.data))
        self.model = build_model(config.model, device="cpu")
        self.by_tokens = {tuple(naive.chatml(messages)[0]): messages for messages in CONVERSATIONS}

    def conversation(self, row: int) -> Any:
        return self.by_tokens[tuple(self.files.tokens[slice(*self.files.bounds[row : row + 2])].tolist())]

    def rows(self, step: int, rows_per_step: int) -> list[list[Any]]:
        """The conversation of each row of a global batch; none of a missing row."""
        sampler = EpochSampler(seed=0, num_rows=len(self.files.train), rows_per_step=rows_per_step)
        return [
            [self.conversation(self.files.train[row])] if row >= 0 else [] for row in sampler.global_rows(step).tolist()
        ]

    def train(self, rows_per_step: int) -> tuple[list[float], list[float], float]:
        """Losses, gradient norms, and the loss of the evaluation."""
        steps = [[c for row in self.rows(step, rows_per_step) for c in row] for step in range(STEPS)]
        limit = self.config.optimizer.max_grad_norm or 1e9
        losses, norms = naive.train(self.model, make_optimizer(self.model, self.config.optimizer), steps, limit)
        with torch.no_grad():
            held_out = naive.mean_loss(self.model, [*map(self.conversation, self.files.evaluation)])
        return losses, norms, float(held_out)


@pytest.mark.heavy
def test_every_strategy_takes_the_mean_over_the_tokens_of_the_global_batch(tmp_path: Path) -> None:
    """Three ranks; the last step of an epoch leaves ranks without a row, and so without a token that counts."""
    padded = {"train": {"micro_batch_size": 1, "accumulation": 2}}
    cyclic = {"schedule": {"kind": "cyclic", "rule": "dp", "cut_by": "parameters"}, "optimizer": {"max_grad_norm": 0.0}}
    jobs = {
        "padded": padded,
        "cyclic": {"train": {"micro_batch_size": 2}, **cyclic},
        "unequal rows": {"train": {"micro_batch_size": 2, "rows": [1, 3, 2]}},
    }
    configs = {name: chat_job(tmp_path, name, **sections) for name, sections in jobs.items()}
    islands = chat_job(tmp_path, "islands", **padded, sync={"mode": "local", "every": STEPS})
    *summaries, of_islands = run_ranks(train_all, RANKS, [*configs.values(), islands], local=1)[0]

    for (name, config), summary in zip(configs.items(), summaries, strict=True):
        losses, norms, held_out = Oracle(config).train(rows_per_step=RANKS * 2)
        assert summary["losses"] == pytest.approx(losses, rel=1e-5), name
        assert summary["evaluations"][0]["eval_loss"] == pytest.approx(held_out, rel=1e-5), name
        if "cyclic" not in name:
            assert summary["grad_norms"] == pytest.approx(norms, rel=1e-4), name

    oracle = Oracle(configs["unequal rows"])
    assert [len(row) for row in oracle.rows(1, RANKS * 2)] == [1, 1, 1, 1, 0, 0]  # so the last rank had no row
    oracle = Oracle(islands)
    rows = oracle.rows(0, RANKS * 2)  # micro-batches of one row: first one of each island, then another
    means = [float(naive.mean_loss(oracle.model, [*rows[i], *rows[i + RANKS]]).detach()) for i in range(RANKS)]
    assert of_islands["losses"][0] == pytest.approx(sum(means) / RANKS, rel=1e-5)


@pytest.mark.machine
def test_the_example_trains_adapters(tmp_path: Path) -> None:
    rows, script = tmp_path / "rows", CHAT.parents[1] / "chat_rows.py"
    subprocess.run([sys.executable, str(script), str(CHAT), str(rows)], check=True)
    example = load(CHAT.parents[1] / "chat.toml")
    changed = replace(example.train, output=str(tmp_path / "example"), steps=2, micro_batch_size=2)
    example = replace(
        example, data=replace(example.data, path=str(rows)), train=changed, log=replace(example.log, tensorboard=False)
    )
    (summary,) = run_ranks(train_all, 2, [example], local=1)[0]
    assert summary["losses"][-1] < summary["losses"][0]
    assert summary["num_trainable"] < summary["num_parameters"] / 4
