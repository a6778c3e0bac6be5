"""A publisher that is killed at any instant, again and again, never leaves a version that is half or wrong."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from laconic.publish import FolderSource, Publisher, Reader
from laconic.publish.source import VanishedError
from laconic.publish.upkeep import verify
from tests.support.launch import started


def weights_of(version: int) -> dict[str, Tensor]:
    """The weights of a version, which differ from those of the one before in a few places."""
    torch.manual_seed(0)
    large, small = torch.randn(300, 70), torch.randn(9)
    for number in range(version % 7, version + 1, 7):
        large.view(-1)[number % 20_000 :: 997] += number
    small[version % 9] = version
    return {"large": large.bfloat16(), "small": small.bfloat16()}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.empty(300, 70)), nn.Parameter(torch.empty(9))


def publish_for_ever(folder: str) -> None:
    torch.set_num_threads(1)
    model = Weights()
    publisher = Publisher(model, folder, run="run", base_every=4, keep=2)
    version = max(FolderSource(folder).versions(), default=0)
    while True:
        version += 1
        for name, value in weights_of(version).items():
            model.get_parameter(name).data.copy_(value)
        assert publisher.publish(step=version) == version


def read_until(folder: Path, deadline_s: float, held: dict[str, Tensor]) -> int:
    """Read as fast as it goes. Each version that is read is right. Returns the number of updates."""
    reader, updates = Reader(folder, name="reader"), 0
    while time.monotonic() < deadline_s:
        try:
            version = reader.update(held)
        except VanishedError:
            continue
        updates += 1
        for name, wanted in weights_of(version).items():
            assert torch.equal(held[name], wanted), (version, name)
    return updates


def lives(folder: Path, num_kills: int) -> None:
    chance, updates = random.Random(0), 0
    held = {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}
    for _ in range(num_kills):
        process = started(publish_for_ever, str(folder))
        try:
            before = FolderSource(folder).versions() if folder.is_dir() else []
            while process.is_alive() and (FolderSource(folder).versions() if folder.is_dir() else []) == before:
                time.sleep(0.005)
            assert process.is_alive(), "it goes on from what the one before has left"
            updates += read_until(folder, time.monotonic() + chance.uniform(0.02, 0.3), held)
        finally:
            process.kill()
            process.join()
        problems = [verdict.problem for verdict in verify(FolderSource(folder)) if verdict.problem]
        assert not problems
        fresh = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
        version = Reader(folder).update(fresh)
        assert version == FolderSource(folder).versions()[-1]
        for name, wanted in weights_of(version).items():
            assert torch.equal(fresh[name], wanted), (version, name)
    assert updates >= num_kills


def test_a_few_kills(tmp_path: Path) -> None:
    lives(tmp_path / "versions", 6)


@pytest.mark.campaign
def test_many_kills(tmp_path: Path) -> None:
    lives(tmp_path / "versions", 150)
