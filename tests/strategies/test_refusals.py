"""Settings of islands, schedules and optimizers that make no sense, and baselines that cut anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from laconic.codec import CODECS
from laconic.config import Config, ConfigError, ScheduleConfig, SyncConfig, from_dict
from laconic.cyclic.schedule import RULES
from laconic.policy import keys_of
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
        ("schedule", {"cache": "host"}, "schedule.cache = 'host' is for schedule.kind = 'cyclic'"),
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
        ("sync", {**LOCAL, "slice_include": ["attention"]}, "needs sync.slices of at least 2"),
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


@pytest.mark.parametrize("name", ["adamw8bit", "muon", "shampoo"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-hpz", "hsdp"])
def test_baselines_that_cut_anywhere_are_refused_by_name(tmp_path: Path, name: str, strategy: str) -> None:
    message = refusal(job(tmp_path, optimizer={"name": name}, shard={"strategy": strategy}))
    assert all(part in message for part in (f"optimizer.name = '{name}'", f"'{strategy}'", "'laconic'"))


def test_every_rule_and_every_codec_can_be_asked_for() -> None:
    assert set(get_args(get_type_hints(ScheduleConfig)["rule"])) == set(RULES)
    assert set(get_args(keys_of(SyncConfig)["codec"].hint)) == set(CODECS)
