"""Stopping and resuming changes nothing: strategies, numbers of ranks, and a kill at every instant of a save."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from laconic.checkpoint import CRASH_POINTS
from tests.checkpoint.job import Crash, Outcome, load_only, save_with_bad_extra_on_rank_1, train
from tests.support.launch import run_ranks

ONLY_RANK_0 = {"manifest_written", "old_set_aside", "renamed", "latest_moved", "pruned"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """Six steps under laconic on two ranks, saved after 2, 4 and 6, of which 4 and 6 are kept."""
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, run_ranks(train, 2, str(folder), "laconic", 6)


@pytest.mark.parametrize("strategy", ["laconic", "fsdp2", "ddp"])
def test_resumed_run_equals_unbroken_run(strategy: str, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, str(tmp_path / "whole"), strategy, 4, 0)
    run_ranks(train, 2, str(tmp_path / "cut"), strategy, 2)
    resumed = run_ranks(train, 2, str(tmp_path / "cut"), strategy, 4)
    for rank in range(2):
        assert resumed[rank].started_from == 2
        assert resumed[rank].losses == whole[rank].losses[2:]
        assert resumed[rank].digest == whole[rank].digest


@pytest.mark.parametrize(
    ("rank", "point"), [(r, p) for r in (0, 1) for p in CRASH_POINTS if r == 0 or p not in ONLY_RANK_0]
)
def test_kill_during_save_resumes_bit_equal(
    rank: int, point: str, unbroken: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    """The folder holds steps 4 and 6; a run that went back to 4 dies while it saves 6 again, over the old one."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    crash = Crash(rank=rank, step=6, point=point)
    with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
        run_ranks(train, 2, str(folder), "laconic", 6, 2, str(folder / "step-4"), crash)
    resumed = run_ranks(train, 2, str(folder), "laconic", 6)
    for got, expected in zip(resumed, unbroken[1], strict=True):
        assert got.started_from in (4, 6)
        assert got.losses == expected.losses[got.started_from :]
        assert got.digest == expected.digest


def test_first_save_killed_starts_anew(tmp_path: Path) -> None:
    crash = Crash(rank=0, step=2, point="manifest_written")
    with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
        run_ranks(train, 2, str(tmp_path), "laconic", 2, 2, None, crash)
    again = run_ranks(train, 2, str(tmp_path), "laconic", 2)
    assert again[0].started_from == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


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
