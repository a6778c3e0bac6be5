"""Settings of islands, schedules and optimizers that make no sense, and jobs that cannot work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from laconic.codec import CODECS
from laconic.config import Config, ConfigError, ScheduleConfig, SyncConfig, from_dict
from laconic.cyclic.schedule import RULES
from laconic.policy import keys_of
from tests.hf.zoo import TINY
from tests.support.jobs import job, refusal

CYCLIC: dict[str, Any] = {"kind": "cyclic", "cut_by": "parameters"}
LOCAL: dict[str, Any] = {"mode": "local"}
MEETING: dict[str, Any] = {**LOCAL, "rendezvous": "127.0.0.1:29400", "run_id": "a", "islands": 2}
ALONE = {key: value for key, value in MEETING.items() if key not in ("rendezvous", "run_id")}
START = {key: value for key, value in MEETING.items() if key != "islands"}


@pytest.mark.parametrize(
    ("section", "values", "part"),
    [
        ("schedule", {"rule": "v2"}, "schedule.rule = 'v2' is for schedule.kind = 'cyclic', got 'simultaneous'"),
        ("schedule", {"states": "shared"}, "schedule.states = 'shared' is for schedule.kind = 'cyclic'"),
        ("schedule", {"workers": 4}, "schedule.workers = 4 is for schedule.kind = 'cyclic'"),
        ("schedule", {"cut_by": "memory"}, "schedule.cut_by = 'memory' is for schedule.kind = 'cyclic'"),
        ("schedule", {"stagger": 0.5}, "schedule.stagger = 0.5 is for schedule.kind = 'cyclic'"),
        ("schedule", {"wire": "8bit"}, "schedule.wire = '8bit' is for schedule.kind = 'cyclic'"),
        ("schedule", {"kind": "cyclical"}, '"simultaneous", "cyclic"'),
        ("schedule", {**CYCLIC, "rule": "v3"}, '"lag2"'),
        ("schedule", {**CYCLIC, "workers": 1}, "schedule.workers = 1 must lie in [2, 4096]"),
        ("schedule", {**CYCLIC, "stagger": 1.5}, "schedule.stagger = 1.5 must lie in [0, 1]"),
        ("sync", {"every": 50}, "sync.every = 50 is for sync.mode = 'local', got 'every-step'"),
        ("sync", {"slices": 2}, "sync.slices = 2 is for sync.mode = 'local'"),
        ("sync", {"recovery": "x"}, "sync.recovery = 'x' is for sync.mode = 'local'"),
        ("sync", {**LOCAL, "codec": "fp8"}, '"e2m1"'),
        ("sync", {**LOCAL, "codec": "fp32", "error_feedback": True}, "sync.codec = 'fp32' loses nothing"),
        ("sync", {**LOCAL, "error_feedback": "all"}, "`sync.error_feedback` must be true or false or a number"),
        ("sync", {**LOCAL, "outer_sliced_lr": 0.5}, "sync.outer_sliced_lr = 0.5 needs sync.slices of at least 2"),
        (
            "sync",
            {**LOCAL, "slices": 2, "outer_sliced_momentum": 1.0},
            "sliced_momentum = 1.0 must lie in [0, 1)",
        ),
        ("sync", {**LOCAL, "outer_lr": 0.0}, "sync.outer_lr = 0.0 must be a positive number"),
        ("sync", {**LOCAL, "outer_momentum": 1.0}, "sync.outer_momentum = 1.0 must lie in [0, 1)"),
        ("sync", {**LOCAL, "slices": 0}, "sync.slices = 0 must be at least 1"),
        ("sync", {**LOCAL, "slice_include": ["mlp"]}, "needs sync.slices of at least 2"),
        ("sync", {**LOCAL, "slices": 2, "slice_include": []}, "sync.slice_include is empty"),
        ("sync", {**LOCAL, "slices": 2, "slice_include": ["norms"]}, "`sync.slice_include` must be a list"),
        ("sync", START, "sync.islands = None must say with how many islands training starts"),
        ("sync", {**ALONE, "run_id": "a"}, "sync.run_id = 'a' needs sync.rendezvous"),
        ("sync", {**ALONE, "timeout_s": 9.0}, "sync.timeout_s = 9.0 needs sync.rendezvous"),
        ("sync", {**MEETING, "slices": 2}, "does not go with sync.rendezvous: a slice"),
        ("optimizer", {"momentum": 0.5}, "optimizer.momentum = 0.5 is for optimizer.name = 'muon', got 'adamw'"),
        ("optimizer", {"name": "muon", "update_every": 3}, "is for optimizer.name = 'shampoo', got 'muon'"),
        ("optimizer", {"name": "adamw8bit", "adamw_lr": 0.1}, "'muon' or 'shampoo', got 'adamw8bit'"),
        ("optimizer", {"flat_blocks": True}, "is for optimizer.name = 'adamw8bit', got 'adamw'"),
        ("optimizer", {"name": "muon", "fused": False}, "is for optimizer.name = 'adamw', got 'muon'"),
        ("optimizer", {"name": "muon", "momentum": 1.0}, "optimizer.momentum = 1.0 must lie in [0, 1)"),
        ("optimizer", {"name": "muon", "adamw_lr": 0.0}, "optimizer.adamw_lr = 0.0 must be a positive number"),
        ("optimizer", {"name": "shampoo", "update_every": 0}, "optimizer.update_every = 0 must be at least 1"),
        ("optimizer", {"name": "lion"}, '"adamw8bit", "muon", "shampoo"'),
        ("shard", {"granularity": {"*": 32}}, '32 is not a block; write "32 rows"'),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(section: str, values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict(Config, {section: values})
    assert part in str(refused.value)


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


@pytest.mark.parametrize("name", ["adamw8bit", "muon", "shampoo"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-hpz", "hsdp"])
def test_baselines_that_cut_anywhere_are_refused_by_name(tmp_path: Path, name: str, strategy: str) -> None:
    message = refusal(job(tmp_path, optimizer={"name": name}, shard={"strategy": strategy}))
    assert all(part in message for part in (f"optimizer.name = '{name}'", f"'{strategy}'", "'laconic'"))


def test_every_rule_and_every_codec_can_be_asked_for() -> None:
    assert set(get_args(get_type_hints(ScheduleConfig)["rule"])) == set(RULES)
    assert set(get_args(keys_of(SyncConfig)["codec"].hint)) == set(CODECS)
