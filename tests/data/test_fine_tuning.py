"""Whole jobs on conversations, against one process that has one document a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config import Config
from laconic.data import tokens as data
from laconic.data.documents import RowFiles
from laconic.data.sampler import EpochSampler
from laconic.hf.models import build_model
from laconic.hf.tokenizer import ByteTokenizer
from laconic.strategies.optimizers import make_optimizer
from tests.ranks import run_ranks
from tests.reference import fine_tuning as naive
from tests.train.jobs import SMALL_LLAMA, job, refusal, train, train_all

CHAT = Path(__file__).parents[2] / "examples" / "chat.toml"
CONVERSATIONS: list[Any] = [
    json.loads(line)["messages"] for line in (CHAT.parent / "data" / "chat.jsonl").read_text().splitlines()[:15]
]
RANKS, STEPS, LENGTH = 3, 3, 300


def chat_job(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CONVERSATIONS))
    table = {"kind": "jsonl", "path": str(path), "sequence_length": LENGTH, "eval_fraction": 0.2}
    sections["data"] = {**table, **sections.get("data", {})}
    sections["train"] = {"steps": STEPS, "eval_every": STEPS, "output": str(folder / name), **sections.get("train", {})}
    sections["model"] = {"config": {"model_type": "llama", **SMALL_LLAMA, "max_position_embeddings": LENGTH, "vocab_size": 256}}
    return job(folder, **sections)


def by_oracle(config: Config, rows_per_step: int) -> tuple[list[float], list[float], float, list[int]]:
    """Losses, gradient norms, the loss of the evaluation, and the rows of each step."""
    assert config.data.cache is not None
    index = data.prepare(config.data, ByteTokenizer(), Path(config.data.cache))
    files = data.open_data(index, config.data)
    assert isinstance(files, RowFiles)
    kept = [tuple(files.tokens[slice(*files.bounds[i : i + 2])].tolist()) for i in range(files.num_documents)]
    by_tokens = {tuple(naive.chatml(messages)[0]): messages for messages in CONVERSATIONS}
    sampler = EpochSampler(seed=0, num_rows=len(files.train), rows_per_step=rows_per_step)
    rows = [[row for row in sampler.global_rows(step) if row >= 0] for step in range(STEPS)]
    steps = [[by_tokens[kept[i]] for row in step for i in files.train.members(row)] for step in rows]
    model = build_model(config.model, device="cpu")
    losses, norms = naive.train(model, make_optimizer(model, config), steps, config.optimizer.max_grad_norm or 1e9)
    with torch.no_grad():
        held_out = naive.mean_loss(model.eval(), [by_tokens[kept[i]] for i in files.evaluation.documents])
    return losses, norms, float(held_out), [len(step) for step in rows]


def test_every_strategy_takes_the_mean_over_the_tokens_of_the_global_batch(tmp_path: Path) -> None:
    """Three ranks; the last step of an epoch leaves ranks without a row, and so without a token that counts."""
    packed, padded = {"data": {"packing": True}}, {"data": {"packing": False}}
    fixed = {"data": {"padding": "fixed"}, "train": {"micro_batch_size": 1, "accumulation": 2}}
    cyclic = {"schedule": {"kind": "cyclic", "rule": "dp", "cut_by": "parameters"}, "optimizer": {"max_grad_norm": 0.0}}
    jobs = {
        "packed": packed,
        "padded": padded,
        "padded ddp": {**padded, "shard": {"strategy": "ddp"}},
        "fixed fsdp2": {**fixed, "shard": {"strategy": "fsdp2"}},
        "cyclic packed": {**packed, **cyclic},
        "cyclic padded": {**padded, **cyclic},
    }
    configs = {name: chat_job(tmp_path, name, **sections) for name, sections in jobs.items()}
    summaries = run_ranks(train_all, RANKS, list(configs.values()), local=1)[0]
    for (name, config), summary in zip(configs.items(), summaries, strict=True):
        rows_per_step = RANKS * config.train.micro_batch_size * config.train.accumulation
        losses, norms, held_out, rows = by_oracle(config, rows_per_step)
        assert summary["losses"] == pytest.approx(losses, rel=1e-5), name
        assert summary["evaluations"][0]["eval_loss"] == pytest.approx(held_out, rel=1e-5), name
        if "cyclic" not in name:
            assert summary["grad_norms"] == pytest.approx(norms, rel=1e-4), name
        if name == "packed":
            assert min(rows) < rows_per_step // 2  # a rank had no row
