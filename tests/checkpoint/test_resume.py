"""Stopping and resuming changes nothing: strategies, numbers of ranks, and a kill at every instant of a save."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from laconic.store.folder import CrashPoint
from tests.checkpoint.job import Crash, Outcome, load_only, save_with_bad_extra_on_rank_1, train
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """Six steps under laconic on two ranks, saved after 2, 4 and 6, of which 4 and 6 are kept."""
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, run_ranks(train, 2, str(folder), "laconic", 6)


@pytest.mark.machine
@pytest.mark.parametrize("strategy", ["laconic", "fsdp2", "ddp"])
def test_resumed_run_equals_unbroken_run(strategy: str, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, str(tmp_path / "whole"), strategy, 4, 0)
    run_ranks(train, 2, str(tmp_path / "cut"), strategy, 2)
    resumed = run_ranks(train, 2, str(tmp_path / "cut"), strategy, 4)
    for rank in range(2):
        assert resumed[rank].started_from == 2
        assert resumed[rank].losses == whole[rank].losses[2:]
        assert resumed[rank].digest == whole[rank].digest


def overwrite(unbroken: Path, folder: Path, crash: Crash | None) -> list[Outcome]:
    """Go back to step 4 of a folder with steps 4 and 6, and save 6 again, over the old one."""
    shutil.copytree(unbroken, folder)
    return run_ranks(train, 2, str(folder), "laconic", 6, 2, str(folder / "step-4"), crash)


@pytest.fixture(scope="module")
def reached(unbroken: tuple[Path, list[Outcome]], tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The points that each rank passes when it overwrites a checkpoint."""
    return overwrite(unbroken[0], tmp_path_factory.mktemp("reached") / "run", None)


@pytest.mark.heavy
@pytest.mark.parametrize("point", CrashPoint)
def test_kill_during_save_resumes_bit_equal(
    point: CrashPoint, unbroken: tuple[Path, list[Outcome]], reached: list[Outcome], tmp_path: Path
) -> None:
    """Kill each rank that passes the point. Rank 0 passes all of them."""
    assert point in reached[0].reached
    for rank in [rank for rank, outcome in enumerate(reached) if point in outcome.reached]:
        folder = tmp_path / f"rank-{rank}"
        with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
            overwrite(unbroken[0], folder, Crash(rank=rank, step=6, point=point))
        resumed = run_ranks(train, 2, str(folder), "laconic", 6)
        for got, expected in zip(resumed, unbroken[1], strict=True):
            assert got.started_from in (4, 6)
            assert got.losses == expected.losses[got.started_from :]
            assert got.digest == expected.digest


def test_first_save_killed_starts_anew(tmp_path: Path) -> None:
    crash = Crash(rank=0, step=2, point=CrashPoint.LISTED)
    with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
        run_ranks(train, 2, str(tmp_path), "laconic", 2, 2, None, crash)
    again = run_ranks(train, 2, str(tmp_path), "laconic", 2)
    assert again[0].started_from == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


@pytest.mark.machine
def test_other_numbers_of_ranks_and_strategies_load_it(unbroken: tuple[Path, list[Outcome]]) -> None:
    folder, expected = unbroken
    reference, moments = run_ranks(load_only, 2, str(folder), "laconic")[0]
    assert reference.digest == expected[0].digest
    assert any(key.endswith("exp_avg_sq") and value.abs().sum() > 0 for key, value in moments.items())
    for world_size, strategy in [(1, "laconic"), (3, "laconic"), (2, "fsdp2"), (1, "ddp")]:
        for outcome, other_moments in run_ranks(load_only, world_size, str(folder), strategy):
            assert outcome.started_from == 6
            for name, value in expected[0].whole.items():
                assert torch.equal(outcome.whole[name], value), (world_size, strategy, name)
            assert moments.keys() == other_moments.keys()
            for key, value in moments.items():
                assert torch.equal(other_moments[key], value), (world_size, strategy, key)


def test_going_back_makes_the_new_future_the_one_to_resume(
    unbroken: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    """Back at step 4 of a run that has reached 6, step 5 is saved: the next resume goes on from 5."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    run_ranks(train, 1, str(folder), "laconic", 5, 5, str(folder / "step-4"))
    resumed = run_ranks(train, 1, str(folder), "laconic", 5)
    assert resumed[0].started_from == 5
    assert (folder / "latest").read_text() == "step-5\n"


def test_one_rank_that_cannot_write_fails_all(tmp_path: Path) -> None:
    for message in run_ranks(save_with_bad_extra_on_rank_1, 2, str(tmp_path)):
        assert "rank 1: extra['extra']['thing'] is a object" in message
    assert not (tmp_path / "step-1").exists()
