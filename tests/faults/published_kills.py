"""Publishers and readers that are killed at any instant, again and again: no version is half or wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic.publish import FolderSource, Publisher, Reader
from laconic.publish.source import VanishedError
from laconic.publish.upkeep import verify
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.published_damage import MEASURES
from tests.support.launch import started
from tests.support.record import Row


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


def lives(folder: Path, num_kills: int) -> int:
    """Kill publishers, one after the other. Returns the number of updates of a reader meanwhile."""
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
    return updates


def lasting(folder: Path) -> dict[str, Tensor]:
    """Tensors like those of a version, in files, so that they outlive a process."""
    folder.mkdir(exist_ok=True)
    found = {}
    for name, tensor in weights_of(0).items():
        path = folder / name
        if not path.exists():
            path.write_bytes(bytes(tensor.nbytes))
        found[name] = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(
            tensor.shape
        )
    return found


def read_for_ever(folder: str, model: str) -> None:
    torch.set_num_threads(1)
    held, reader = lasting(Path(model)), Reader(folder, name="reader")
    while True:
        with contextlib.suppress(VanishedError):
            reader.update(held)


def lives_of_readers(folder: Path, num_kills: int) -> int:
    """Kill readers, one after the other, whose model outlives them. Returns how often that was no version any more."""
    chance, num_halves = random.Random(0), 0
    publisher = started(publish_for_ever, str(folder / "versions"))
    try:
        while not (folder / "versions").is_dir() or not FolderSource(folder / "versions").versions():
            time.sleep(0.01)
        held = lasting(folder / "model")
        for _ in range(num_kills):
            process = started(read_for_ever, str(folder / "versions"), str(folder / "model"))
            before = {name: tensor.clone() for name, tensor in held.items()}
            while process.is_alive() and all(torch.equal(held[name], before[name]) for name in held):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
            process.join()
            num_halves += not is_version(held)
            version = Reader(folder / "versions").update(held)
            for name, wanted in weights_of(version).items():
                assert torch.equal(held[name], wanted), (version, name)
    finally:
        publisher.kill()
        publisher.join()
    return num_halves


def is_version(held: dict[str, Tensor]) -> bool:
    """Whether the weights are those of some version, whose number bf16 has rounded."""
    newest = int(held["small"].float().max())
    return any(
        all(torch.equal(held[name], tensor) for name, tensor in weights_of(version).items())
        for version in range(max(1, newest - newest // 128 - 9), newest + newest // 128 + 10)
    )


@campaign_row("publish-kills", section="publish")
def kills(bench: Bench) -> Row:
    """Kill publishers while they write, and readers while they read and apply."""
    num_publishers, num_readers = (2, 2) if bench.quick else (300, 220)
    updates = lives(bench.out / "publishers", num_publishers)
    repaired = lives_of_readers(bench.out / "readers", num_readers)
    row = faults_row(
        claim="kills of publishers and readers at random instants; wrong or half versions served",
        tried=num_publishers + num_readers,
        at_least=500,
        harms={"wrong": 0},
        note=f"{num_publishers} kills of a publisher that writes without a pause. After each kill all versions are "
        f"whole and right, and the next publisher goes on. {updates} updates of a reader meanwhile. {num_readers} "
        f"kills of a reader, whose model is in memory that outlives it; {repaired} left a model that is no version, "
        "and the next reader found that out and brought it to the newest. Each value of each version was compared. "
        "Crash points: tests/publish.",
    )
    return dataclasses.replace(row, measures=MEASURES)
