"""Losses at every k-th instant, on ranks that take turns: nobody waits for a lost rank, and runs end with their bits.

`python -m tests.faults --rows waits,kills` does the same to real processes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic import rehearse
from laconic.rehearse.in_process import Kill, Letter
from tests.faults import waits
from tests.faults.victims import STRATEGIES, TWO_NODES, Run, Strategy, difference


def told_by(strategy: str, folder: Path, **faults: object) -> dict[int, str]:
    """What the ranks end with that end by themselves: the texts of their errors, or "" where they have done all."""
    told = dict[int, str]()

    def live() -> None:
        try:
            waits.live(strategy, folder, 6.0, None, num_steps=2)
            told[dist.get_rank()] = ""
        except Exception as error:
            told[int(os.environ["RANK"])] = str(error)
            os._exit(1)  # as a process would end, with its threads

    with contextlib.redirect_stderr(io.StringIO()):
        rehearse.ranks(live, local=waits.NUM_RANKS, goes_on=True, **faults)  # type: ignore[arg-type]
    return told


@pytest.mark.parametrize("strategy", waits.STRATEGIES)
def test_no_rank_waits_for_one_that_dies(strategy: str, tmp_path: Path) -> None:
    """At every 41st turn."""
    for turn in range(0, 1000, 41):
        rank = turn % waits.NUM_RANKS
        told = told_by(strategy, tmp_path / f"{turn}", faults=[Kill(rank=rank, turn=turn)])
        assert told.keys() >= {*range(waits.NUM_RANKS)} - {rank}
        assert all("is gone" in text for text in told.values() if text), (turn, told)
        if len(told) == waits.NUM_RANKS:  # it ended before
            assert not any(told.values())
            assert turn > 0
            return


@pytest.mark.parametrize("strategy", waits.STRATEGIES)
def test_no_rank_waits_longer_than_the_timeout_for_one_that_stands_still(strategy: str, tmp_path: Path) -> None:
    """At every 83rd message of a rank, and at another rank each time."""
    for number in range(0, 1000, 83):
        rank, passed = number % waits.NUM_RANKS, itertools.count()

        def stand(
            letter: Letter, rank: int = rank, number: int = number, passed: itertools.count[int] = passed
        ) -> None:
            if letter.source == rank and next(passed) == number:
                time.sleep(1e6)

        told = told_by(strategy, tmp_path / f"{number}", on_message=stand)
        assert len(told) == waits.NUM_RANKS, "the rank that stood still goes on when the others have ended"
        assert all("imed out" in text or "is gone" in text for text in told.values() if text), (number, told)
        if next(passed) <= number:  # it has not sent so many
            assert not any(told.values())
            assert number > 0
            return


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["cache host", "cyclic"])
def test_a_run_killed_at_any_turn_ends_with_the_undisturbed_bits(name: str, tmp_path: Path) -> None:
    """At every 9th turn."""

    def start(run: Run, *faults: Kill) -> list[int | None]:
        from laconic.train import cli

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return rehearse.ranks(cli.main, run.arguments, nodes=2, faults=faults)

    def made(folder: str) -> Run:
        strategy = Strategy(sections=STRATEGIES[name].sections, place=TWO_NODES)
        return Run(strategy, tmp_path / folder, steps=2, save_every=1, eval_every=2)

    whole = made("undisturbed")
    assert start(whole) == [0, 0]
    for turn in itertools.count(9, 9):
        run, rank = made(f"{turn}"), turn // 9 % 2
        codes = start(run, Kill(rank=rank, turn=turn))
        if codes == [0, 0]:
            break
        assert codes[rank] is None
        assert codes[1 - rank] == 0 or "is gone" in str(codes[1 - rank]), "it may have done all of its work"
        run.newest_step()
        assert start(run) == [0, 0]
        assert difference(run.end_state(), whole.end_state()) == ""
    assert turn > 9
