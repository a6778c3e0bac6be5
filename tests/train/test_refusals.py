"""Jobs that cannot work: parts that do not go together, or do not fit the launch, the data or the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hf.zoo import TINY
from tests.support.jobs import job, refusal

CYCLIC: dict[str, Any] = {"kind": "cyclic", "cut_by": "parameters"}
LOCAL: dict[str, Any] = {"mode": "local"}
TWO = {**CYCLIC, "workers": 2}
FOUR = {**CYCLIC, "workers": 4}
FREE = {"max_grad_norm": 0.0}
TIED = {**TINY["llama"], "num_hidden_layers": 3, "vocab_size": 256, "tie_word_embeddings": True}
ROUTED = {**TINY["mixtral"], "vocab_size": 256, "output_router_logits": True}


@pytest.mark.parametrize(
    ("part", "sections"),
    [
        ("sync.mode = 'local' and schedule.kind = 'cyclic'", {"schedule": TWO, "sync": LOCAL}),
        ("shard.strategy = 'ddp' and schedule.kind = 'cyclic'", {"schedule": TWO, "shard": {"strategy": "ddp"}}),
        ("shard.cache = 'none' and schedule.kind = 'cyclic'", {"schedule": TWO, "shard": {"cache": "none"}}),
        ("train.accumulation = 2 and schedule.kind = 'cyclic'", {"schedule": TWO, "train": {"accumulation": 2}}),
        ("optimizer.max_grad_norm = 1.0 (default: 1.0)", {"schedule": FOUR}),
        ("set optimizer.max_grad_norm = 0, or schedule.rule to 'clip' or 'v1' or 'dp'", {"schedule": FOUR}),
        ("under schedule.rule = 'v2' some stages are updated before", {"schedule": {**TWO, "rule": "v2"}}),
        ("schedule.cache = 'host' has nothing to keep", {"schedule": {**FOUR, "cache": "host"}, "optimizer": FREE}),
        (
            "under schedule.rule = 'dp' all are at the same",
            {"schedule": {**TWO, "rule": "dp", "states": "shared"}},
        ),
        ("set schedule.workers to the micro-batches to interleave", {"schedule": CYCLIC}),
        ("optimizer.name = 'muon' and schedule.kind = 'cyclic'", {"schedule": TWO, "optimizer": {"name": "muon"}}),
        (
            "schedule.wire: Wire(weights='int8') sends differences to the copies",
            {"schedule": {**TWO, "states": "sharded", "wire": "8bit"}, "optimizer": FREE},
        ),
        ("9 stages need at least as many blocks", {"schedule": {**TWO, "workers": 9}, "optimizer": FREE}),
        ("tie_word_embeddings=False", {"schedule": TWO, "optimizer": FREE, "model": {"config": TIED}}),
        (
            "model.config.output_router_logits = true",
            {"schedule": TWO, "optimizer": FREE, "model": {"config": ROUTED}},
        ),
        (
            "cannot be cut into 4 stages with a trainable parameter each",
            {"schedule": FOUR, "optimizer": FREE, "lora": {"enabled": True}},
        ),
        ("needs shard.strategy = 'laconic', got 'ddp'", {"sync": LOCAL, "shard": {"strategy": "ddp"}}),
        (
            "only adapters train, and adapters are not sliced",
            {"sync": {**LOCAL, "slices": 2}, "lora": {"enabled": True}},
        ),
        ("set train.resume = 'auto'", {"sync": {**LOCAL, "recovery": "x"}}),
        ("sync.islands = 2 does not divide the 1 nodes", {"sync": {**LOCAL, "islands": 2}}),
        (
            "sync.slices = 2 on 1 islands: no island trains slice 1 of 2; use at most as many",
            {"sync": {**LOCAL, "slices": 2}},
        ),
        (
            "fragments=3, but the model has 2 numbered layers",
            {"sync": {**LOCAL, "every": 6, "fragments": 3}},
        ),
        (
            "set shard.strategy to 'ddp' or 'laconic', or optimizer.name to 'adamw'",
            {"shard": {"strategy": "ddp-zero1"}, "optimizer": {"name": "adamw8bit"}},
        ),
        (
            "set train.save_every = -1 and train.resume = 'never'",
            {"shard": {"strategy": "ddp-zero1"}, "train": {"save_every": 0}},
        ),
        ("set model.config", {"model": {"config": None}}),
        ("train.output = '/dev/null/out' cannot be written", {"train": {"output": "/dev/null/out"}}),
        ("shorter than one sequence", {"data": {"sequence_length": 30_000}}),
        ("neither 'bytes' nor a folder", {"data": {"tokenizer": "nowhere"}}),
        ("holds nothing out", {"data": {"eval_fraction": 0.0}, "train": {"eval_every": 1}}),
        ("vocabulary has 100", {"model": {"config": {"model_type": "llama", "vocab_size": 100}}}),
        ("llama", {"model": {"config": {"model_type": "lama"}}}),
        ("at least 2 ranks per node", {"shard": {"strategy": "fsdp2-hpz"}}),
        ("each island has one rank", {"shard": {"audit_every": 5}}),
        ("train.rows = [2, 2] has rows for 2 ranks, and there are 1; give the rows of", {"train": {"rows": [2, 2]}}),
        ("adds up to 3; it must be 2: 1 ranks x train.micro_batch_size = 2 x train.accum", {"train": {"rows": [3]}}),
        (
            "set shard.device_bytes and shard.host_bytes, or give the rows of each rank as a list",
            {"train": {"rows": "by-speed"}, "shard": {"cache": "auto", "device_bytes": 5}},
        ),
        (
            "train.rows = (2,) and schedule.kind = 'cyclic': its messages have one size",
            {"train": {"rows": [2]}, "schedule": {"kind": "cyclic", "workers": 2}},
        ),
        (
            "train.compile = true and schedule.kind = 'cyclic'",
            {"train": {"compile": True}, "schedule": {"kind": "cyclic", "workers": 2}},
        ),
        (
            "sync.slices = 2 and train.compile = true",
            {"train": {"compile": True}, "sync": {"mode": "local", "slices": 2}},
        ),
        (
            "islands would skip different steps",
            {"shard": {"param_dtype": "float16"}, "sync": {"mode": "local", "every": 2}},
        ),
        ("nowhere' holds no checkpoint; give the output folder", {"train": {"resume": "/nowhere"}}),
        ("log.wandb = true needs the package wandb", {"log": {"wandb": True}}),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    tmp_path: Path, sections: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert part in refusal(job(tmp_path, **sections))
    assert "step 1/4" not in capsys.readouterr().out
