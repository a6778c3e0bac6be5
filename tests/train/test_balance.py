"""Rows by speed: the clock of layers, the rows that ranks derive from its figures, and jobs of unequal ranks."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from laconic.comm.launch import RankInfo
from laconic.config import Config, TrainConfig
from laconic.data.batches import LEAST_TOKENS
from laconic.rehearse.modes import accelerator
from laconic.rehearse.tape import Wait
from laconic.strategies import parallelize
from laconic.train import meter as meters
from laconic.train.balance import LayerClock, RowBalance, fastest_rows, is_compared
from tests.support.jobs import SMALL_LLAMA, job, metrics, train_all
from tests.support.launch import run_ranks


class FakeTime:
    """A clock that moves when it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        """The present moment."""
        return self.now


class Layer(nn.Module):
    """Takes a second for each token."""

    def __init__(self, clock: FakeTime, *, ends: bool = True) -> None:
        super().__init__()
        self.clock, self.ends = clock, ends

    def forward(self, other: str, x: torch.Tensor) -> torch.Tensor:
        """Work."""
        self.clock.now += x.shape[0] * x.shape[1]
        if not self.ends:
            raise RuntimeError("recomputed enough")
        return x


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(meters, "time", fake)
    return fake


def test_the_clock_sees_layers_without_the_waits_around_them(clock: FakeTime) -> None:
    """Hooks that were there first, such as the engine's, wait for other ranks: they take 100 s each."""
    layers = [Layer(clock), Layer(clock)]

    def wait(*_: Any) -> None:
        clock.now += 100

    for layer in layers:
        layer.register_forward_pre_hook(wait, prepend=True)
        layer.register_forward_hook(wait)
    measured = LayerClock(layers, torch.device("cpu"))

    def step(*rows: int, by: float = 1.0) -> None:
        for number in rows:
            for layer in layers:
                layer("x", torch.ones(number, 5, 3))
                clock.now += by
        clock.now += 1000

    step(7)
    assert measured.seconds_per_token() is None, "nothing counts before a step is measured"
    measured.begin_step()
    step(2, 1)
    measured.end_step()
    step(9)
    assert measured.seconds_per_token() == 1.0
    assert measured.seconds_per_token() is None, "each figure is read once"
    measured.begin_step()
    for layer in layers:
        layer("x", torch.ones(1, LEAST_TOKENS, 3))
    assert measured.seconds_per_token() is None, "a micro-batch without rows tells nothing of speed"
    measured.close()
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers] == [2, 2]


def test_a_forward_without_an_end_and_one_slow_step_of_three_do_not_count(clock: FakeTime) -> None:
    """Recomputation leaves a layer by an exception as soon as it has all that backward needs."""
    broken, layer = Layer(clock, ends=False), Layer(clock)
    measured = LayerClock([broken, layer], torch.device("cpu"))
    measured.begin_step()
    with pytest.raises(RuntimeError):
        broken("x", torch.ones(4, 5, 3))
    clock.now += 100
    layer("x", torch.ones(2, 5, 3))
    assert measured.seconds_per_token() == 1.0
    for stall_s in (0, 500, 0):
        measured.begin_step()
        handle = layer.register_forward_pre_hook(lambda *_, s=stall_s: setattr(clock, "now", clock.now + s))
        layer("x", torch.ones(4, 5, 3))
        handle.remove()
    assert measured.seconds_per_token() == 1.0


def test_on_an_accelerator_no_layer_waits_for_the_device() -> None:
    with accelerator() as machine, machine.recording():
        device = torch.device("cuda", 0)
        layer = nn.Linear(3, 3, device=device)
        measured = LayerClock([layer], device)
        measured.begin_step()
        layer(torch.ones(4, 5, 3, device=device))
        measured.end_step()
        threads = machine.tape.threads

        def waits() -> list[Wait]:
            return [each for each in machine.tape.entries if isinstance(each, Wait) and each.timeline in threads]

        assert waits() == []
        assert measured.seconds_per_token() == 0.0, "no time passes there"
        assert len(waits()) == 1


# -- what ranks make of it ---------------------------------------------------------------------------------------------


def balance_of(rank: int = 0, *, size: int = 4, lines: list[str] | None = None, **train: Any) -> RowBalance:
    settings = TrainConfig(**{"rows": "by-speed", "micro_batch_size": 3, "accumulation": 3, **train})
    ranks = RankInfo(rank=rank, world_size=4, local_rank=rank % 2, num_local=2, num_nodes=2)
    first = rank // size * size
    model = nn.ModuleList([nn.Linear(2, 2)])
    say = (lambda line: None) if lines is None else lines.append
    return RowBalance(model, settings, ranks, range(first, first + size), torch.device("cpu"), say)


def compared(balance: RowBalance, *seconds: float | None, taken: int = 4) -> bool:
    """Compare with ranks whose figures are given."""
    group: Any = SimpleNamespace(gather=lambda own: list(seconds))
    return balance.compare(taken, taken, group)


def test_slower_ranks_get_fewer_rows_and_the_user_a_line() -> None:
    lines: list[str] = []
    balance = balance_of(lines=lines)
    assert balance.own_rows() == (9, 9, 9, 9)
    assert compared(balance, 1e-5, 1e-5, 2e-5, 2e-5)
    assert balance.own_rows() == balance.rows == (12, 12, 6, 6)
    assert lines == [
        "rows by speed after step 4: 12, 12, 6, 6 for ranks 0 to 3, whose layers take 10, 10, 20, 20 us a token in "
        "forward; the last rank then computes for 67% of the time before"
    ]
    assert not compared(balance, 1e-5, 1e-5, 2e-5, 2e-5, taken=8), "the same speeds change nothing"
    assert not compared(balance, 1e-5, 1.1e-5, 2e-5, 2.04e-5, taken=16), "one row less would save 1 %"
    assert compared(balance, 1e-5, 1e-5, 1e-5, 1e-5, taken=32)
    assert balance.rows == (9, 9, 9, 9)
    assert len(lines) == 2


def test_ranks_compare_now_and_then_and_measure_just_before() -> None:
    balance = balance_of()
    assert [taken for taken in range(200) if is_compared(taken)] == [4, 8, 16, 32, 64, 128, 192]
    assert not compared(balance, 1.0, 2.0, 1.0, 1.0, taken=5)
    assert not compared(balance, 1.0, None, 1.0, 1.0), "a rank that had no row says nothing"
    assert balance.rows == (9, 9, 9, 9)
    clock: Any = balance._clock
    measured = []
    for taken in range(1, 66):
        balance.begin_step(taken)
        measured += [taken] if clock._is_on else []
        balance.end_step()
    assert measured == [*range(2, 33), *range(49, 65)], "never the first step"


def test_each_island_divides_its_own_rows_if_that_helps_it() -> None:
    """The first island's ranks are alike, if slow; those of the second are not."""
    for rank, own in enumerate([(9, 9), (9, 9), (12, 6), (12, 6)]):
        balance = balance_of(rank, size=2)
        assert compared(balance, 5.0, 5.1, 1.0, 2.0)
        assert balance.rows == (9, 9, 12, 6)
        assert balance.own_rows() == own


def test_a_saved_division_is_for_the_same_cluster_and_batch() -> None:
    balance = balance_of()
    compared(balance, 1.0, 1.0, 2.0, 2.0)
    saved = json.loads(json.dumps(balance.state()))
    for changes, expected in (
        ({}, (12, 12, 6, 6)),
        ({"size": 2}, (9, 9, 9, 9)),
        ({"micro_batch_size": 2}, (6, 6, 6, 6)),
        ({"micro_batch_size": 9, "accumulation": 1}, (12, 12, 6, 6)),
        ({"rows": (10, 10, 10, 6)}, (10, 10, 10, 6)),
    ):
        resumed = balance_of(**changes)
        resumed.load(saved)
        assert resumed.rows == expected, changes
        resumed.load({})
        assert resumed.rows == expected
    assert balance_of(rows=(10, 10, 10, 6)).state() == balance_of(rows="equal").state() == {}
    assert balance_of(rows="equal").own_rows() is None


# -- whole jobs --------------------------------------------------------------------------------------------------------

ONE_LAYER = {"config": {"model_type": "llama", **SMALL_LLAMA, "num_hidden_layers": 1}}
STREAM = {"micro_batch_size": 2, "accumulation": 2, "steps": 5}


def train_at_speeds(configs: list[Config], seconds: list[list[float]]) -> list[dict[str, Any]]:
    """Run jobs; in each, the layers of a rank take its seconds for a token, on a clock of its own."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    rank, clock, forward = int(os.environ["RANK"]), FakeTime(), LlamaDecoderLayer.forward
    own = 0.0

    def sleep(layer: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        clock.now += own * hidden_states.shape[0] * hidden_states.shape[1]
        return forward(layer, hidden_states, *args, **kwargs)

    summaries = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaDecoderLayer, "forward", sleep)
        patch.setattr(meters, "time", clock)
        for config, each in zip(configs, seconds, strict=True):
            own = each[rank]
            summaries += train_all([config])
    return summaries


def rows_of(folder: Path) -> dict[int, list[int]]:
    """The rows of each rank, by step, as the metrics have them."""
    return {row["step"]: row["rows"] for row in metrics(folder) if "rows" in row}


@pytest.mark.machine
def test_jobs_with_unequal_ranks_train_as_one_process(tmp_path: Path) -> None:
    """Three ranks, by list and by speed, on three strategies; a resumed run keeps its rows until it measures."""
    speeds = [1.0, 3.0, 1.5]
    by_speed = list(fastest_rows(speeds, 12))
    assert by_speed == [6, 2, 4]

    def one(name: str, rows: Any, shard: dict[str, Any] | None = None, **sections: Any) -> Config:
        train = {**STREAM, "rows": rows, "output": str(tmp_path / name), **sections.pop("train", {})}
        return job(tmp_path, train=train, shard=shard or {}, **sections)

    measured = {
        "checkpointed": one("checkpointed", "by-speed", {"audit_every": 3}, model={"activation_checkpointing": True}),
        "fsdp2": one("fsdp2", "by-speed", {"strategy": "fsdp2"}),
        "broken": one("broken", "by-speed", train={"save_every": 0}),
    }
    configs = {
        "ddp": one("ddp", [1, 9, 2], {"strategy": "ddp"}, train={"steps": 2}),
        "list": one("list", [1, 9, 2], train={"steps": 2}),
        **measured,
        "resumed": one("broken", "by-speed", train={"steps": 10, "resume": "auto"}),
    }
    seconds = [[1.0] * 3 if name == "resumed" else speeds for name in configs]
    found = run_ranks(train_at_speeds, 3, list(configs.values()), seconds, local=3)[0]
    summaries = dict(zip(configs, found, strict=True))
    [alone] = train_all([one("alone", "equal", train={"accumulation": 6, "steps": 10})])
    for name, summary in summaries.items():
        first = 5 if name == "resumed" else 0
        expected = alone["losses"][first : first + len(summary["losses"])]
        assert summary["losses"] == pytest.approx(expected, rel=1e-5), name
    for name in measured:
        changed = {step: rows for step, rows in rows_of(tmp_path / name).items() if step <= 5}
        assert changed == {1: [4, 4, 4], 2: [4, 4, 4], 3: [4, 4, 4], 4: [4, 4, 4], 5: by_speed}, name
        assert summaries[name]["rows"] == by_speed
    resumed = {step: rows for step, rows in rows_of(tmp_path / "broken").items() if step > 5}
    assert resumed == {**dict.fromkeys(range(6, 10), by_speed), 10: [4, 4, 4]}
    assert summaries["list"]["rows"] == [1, 9, 2]
    assert alone["rows"] == []


@pytest.mark.machine
def test_islands_train_on_their_own_rows(tmp_path: Path) -> None:
    """Two islands of two ranks: the same losses and syncs with equal rows and with others."""
    sync = {"mode": "local", "every": 2}

    configs = [
        job(tmp_path, sync=sync, train={**STREAM, "rows": rows, "output": str(tmp_path / str(number))})
        for number, rows in enumerate(("equal", [1, 7, 5, 3], "by-speed"))
    ]
    equal, unequal, by_speed = run_ranks(train_at_speeds, 4, configs, [[1.0, 1.0, 1.0, 3.0]] * 3, local=2)[0]
    assert unequal["losses"] == pytest.approx(equal["losses"], rel=1e-5)
    assert by_speed["losses"] == pytest.approx(equal["losses"], rel=1e-5)
    assert by_speed["rows"] == [4, 4, 6, 2]
    assert [sync["drift_norm"] for sync in unequal["syncs"]] == pytest.approx(
        [sync["drift_norm"] for sync in equal["syncs"]], rel=1e-3
    )


@pytest.mark.heavy
def test_compiled_layers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(parallelize, "compile_layers", partial(parallelize.compile_layers, backend="aot_eager"))
    monkeypatch.setattr(RowBalance, "compare", lambda self, *_: seen.append(self._clock.seconds_per_token()))
    train_all([job(tmp_path, model=ONE_LAYER, train={"steps": 3, "rows": "by-speed", "compile": True})])
    assert seen[0] is None
    assert all(each > 0 for each in seen[1:])
