"""Stopping and resuming changes nothing: strategies, numbers of ranks, and a kill at every instant of a save."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic import checkpoint
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.checkpoint.zoo import make_small, whole
from tests.support.launch import run_ranks


class Crash(NamedTuple):
    """Kills one rank (SIGKILL) at a crash point of the writer while it saves a step."""

    point: CrashPoint
    rank: int
    step: int


class Outcome(NamedTuple):
    """The results of one rank."""

    started_from: int
    losses: list[float]
    whole: dict[str, Tensor]
    """Parameters and optimizer state."""
    reached: set[CrashPoint]
    """The points that this rank passed in its saves."""


def spread(model: nn.Module, strategy: str) -> nn.Module:
    match strategy:
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
        case "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for unit in [*model, model]:  # type: ignore[misc]
                fully_shard(unit, mesh=mesh)
        case "laconic":
            for unit in [*model, model]:  # type: ignore[misc]
                laconic.fully_shard(unit, mesh=laconic.init_mesh("cpu"), cache="host")
    return model


def train(
    folder: str,
    strategy: str,
    steps: int,
    save_every: int = 1,
    start_from: str | None = None,
    crash: Crash | None = None,
) -> Outcome:
    """Resume from the newest checkpoint if there is one, train to `steps` and save on the way. Runs on each rank."""
    model = spread(make_small(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    torch.manual_seed(1 + dist.get_rank())
    loaded = checkpoint.load_checkpoint(start_from or folder, model=model, optimizer=optimizer)
    if loaded:
        checkpoint.set_rng_state(loaded["rng"])
    started_from = loaded["step"] if loaded else 0
    outcome = Outcome(started_from, [], {}, set())
    for step in range(started_from + 1, steps + 1):
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(loss.item())

        def pass_or_die(point: CrashPoint, step: int = step) -> None:
            outcome.reached.add(point)
            if crash == Crash(point, dist.get_rank(), step):
                os.kill(os.getpid(), signal.SIGKILL)

        if save_every and step % save_every == 0:
            store.on_crash_point = pass_or_die
            extra = {"rng": checkpoint.rng_state()}
            checkpoint.save_checkpoint(folder, step, model=model, optimizer=optimizer, extra=extra)
    return outcome._replace(whole=whole(model, optimizer))


def assert_resumed(found: list[Outcome], expected: list[Outcome], started_from: tuple[int, ...]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.started_from in started_from
        assert got.losses == wanted.losses[got.started_from :]
        torch.testing.assert_close(got.whole, wanted.whole, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.machine)])
def test_resumed_run_equals_unbroken_run(strategy: str, tmp_path: Path) -> None:
    expected = run_ranks(train, 2, str(tmp_path / "whole"), strategy, 4, 0)
    run_ranks(train, 2, str(tmp_path / "cut"), strategy, 2)
    assert_resumed(run_ranks(train, 2, str(tmp_path / "cut"), strategy, 4), expected, (2,))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """Three steps under laconic on two ranks, each saved, of which 2 and 3 are kept."""
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, run_ranks(train, 2, str(folder), "laconic", 3)


def overwrite(unbroken: Path, folder: Path, crash: Crash | None) -> list[Outcome]:
    """Go back to step 2 of a folder with steps 2 and 3, and save 3 again, over the old one."""
    shutil.copytree(unbroken, folder)
    return run_ranks(train, 2, str(folder), "laconic", 3, 1, str(folder / "step-2"), crash)


@pytest.fixture(scope="module")
def reached(unbroken: tuple[Path, list[Outcome]], tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The points that each rank passes when it overwrites a checkpoint."""
    return overwrite(unbroken[0], tmp_path_factory.mktemp("reached") / "run", None)


@pytest.mark.parametrize("point", CrashPoint)
def test_kill_during_save_resumes_bit_equal(
    point: CrashPoint, unbroken: tuple[Path, list[Outcome]], reached: list[Outcome], tmp_path: Path
) -> None:
    """Kill each rank that passes the point. Rank 0 passes all of them."""
    assert point in reached[0].reached
    for rank in [rank for rank, outcome in enumerate(reached) if point in outcome.reached]:
        folder = tmp_path / f"rank-{rank}"
        with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
            overwrite(unbroken[0], folder, Crash(rank=rank, step=3, point=point))
        assert_resumed(run_ranks(train, 2, str(folder), "laconic", 3), unbroken[1], (2, 3))


def test_going_back_makes_the_new_future_the_one_to_resume(tmp_path: Path) -> None:
    """Back at step 2 of a run that has reached 4, step 3 is saved: the next resume goes on from 3."""
    run_ranks(train, 1, str(tmp_path), "laconic", 4, 2)
    run_ranks(train, 1, str(tmp_path), "laconic", 3, 1, str(tmp_path / "step-2"))
    assert run_ranks(train, 1, str(tmp_path), "laconic", 3)[0].started_from == 3
    assert (tmp_path / "latest").read_text() == "step-3\n"
