"""A signal to one rank: all stop at one step at once, islands too, and go on to the same bits."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.config import Config
from laconic.train import loop, stopping
from laconic.train.loop import Trainer
from laconic.train.stopping import StopSignals
from tests.support.jobs import job, train
from tests.support.launch import on_ranks, run_ranks

AHEAD, BEHIND = 9, 5
"""The steps in which islands are when the signal comes."""
STREAMED = {"mode": "local", "every": 12, "fragments": 2, "overlap": 4, "codec": "int4", "error_feedback": True}
"""Applies a fragment after step 10, and has the next one in flight after step 13."""
SYNCS = {"every step": {}, "whole": {"mode": "local", "every": 100}, "streamed": STREAMED}
_PATIENCE_S = 60.0


def train_signalled(first: Config, second: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Signal rank 0 in step AHEAD, while other islands are in step BEHIND; then go on to the end."""
    step, made = Trainer._step, []

    class Seen(StopSignals):
        def __enter__(self) -> Any:
            made.append(self)
            return super().__enter__()

    def held(self: Trainer, number: int) -> Any:
        is_ahead = self.ranks.rank == 0
        if number + 1 == (BEHIND if first.sync.is_local and not is_ahead else AHEAD):
            if is_ahead:
                os.kill(os.getpid(), signal.SIGTERM)
            made[0]._thread.join(_PATIENCE_S)  # until the ranks have agreed
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", held)
        patch.setattr(loop, "StopSignals", Seen)
        stopped = train(first)
    return stopped, train(second)


@pytest.mark.machine
@pytest.mark.parametrize("name", SYNCS)
def test_a_signal_to_one_rank_stops_all_where_the_furthest_is_and_no_bit_is_lost(tmp_path: Path, name: str) -> None:
    """An island stops at the end of its step; the other one catches up. Nobody waits for the next sync.

    Ranks that meet in every step are at one step. Their run goes on from another folder, too.
    """
    settings: dict[str, Any] = {"steps": 16, "save_every": 0, "log_every": 100, "resume": "auto"}

    def config(name: str, **changed: Any) -> Config:
        output = str(tmp_path / name)
        recovery = {"recovery": f"{output}/recovery"} if sync else {}
        return job(tmp_path, train={**settings, "output": output, **changed}, sync={**sync, **recovery})

    sync = SYNCS[name]
    unbroken = run_ranks(train, 2, config("whole"), local=1)[0]
    first = config("first")
    rest = first if sync else config("rest", resume=str(tmp_path / "first"))
    ends = run_ranks(train_signalled, 2, first, rest, local=1)
    for stopped, resumed in ends:
        assert stopped["stopped_by"] == "SIGTERM"
        assert len(stopped["losses"]) == resumed["start_step"] == AHEAD
        assert resumed["stopped_by"] is None
    stopped, resumed = ends[0]
    assert stopped["losses"] + resumed["losses"] == unbroken["losses"]


@on_ranks(2)
def test_a_signal_after_the_last_step_of_another_rank_lets_the_run_end() -> None:
    """Rank 1 takes its last step and leaves; then rank 0, in an earlier step, gets the signal."""
    done = dist.distributed_c10d._get_default_store()
    with StopSignals(1) as signals:
        for step in range(1, 7):
            if dist.get_rank() == 0 and step == 2:
                done.wait(["rank 1 has ended"])
                signals._received = signal.SIGTERM
                signals._thread.join(_PATIENCE_S)
            assert signals.end_step(step) is None
    if dist.get_rank() == 1:
        done.set("rank 1 has ended", "")
    else:
        assert signals._last == (7, signal.SIGTERM)


@on_ranks(3)
def test_ranks_that_never_meet_stop_at_the_same_step() -> None:
    """They take steps of random length, and overtake each other; one gets a signal."""
    stopping._LOOK_S = 0.001
    rank, ends = dist.get_rank(), []
    pauses = torch.rand(10_000, generator=torch.Generator().manual_seed(rank)) * 0.002
    for number in range(20):
        with StopSignals(1) as signals:
            for step in range(1, 10_000):
                threading.Event().wait(float(pauses[number * 100 + step]))
                if rank == number % 3 and step == 20 + 3 * number:
                    signals._received = signal.SIGTERM
                if signals.end_step(step):
                    break
        ends.append(step)
    by_rank: list[Any] = [None] * 3
    dist.all_gather_object(by_rank, ends)
    assert by_rank == [ends] * 3
    assert all(20 + 3 * number <= end < 9_999 for number, end in enumerate(ends))


@on_ranks(2)
def test_a_damaged_signal_is_told_in_one_line_and_the_run_goes_on() -> None:
    """A stranger writes a signal that is none."""
    with StopSignals(1) as signals, contextlib.redirect_stderr(io.StringIO()) as shown:
        signals._store.set(stopping._SIGNAL, b"TERM, now!")
        signals._thread.join(_PATIENCE_S)
        assert [signals.end_step(step) for step in range(1, 4)] == [None] * 3
    [line] = shown.getvalue().splitlines()
    assert "cannot agree with the others to stop" in line
    assert "does not match its checksum" in line
