"""Every client of the store is stopped at every crash point, and the power is cut there.

The newest version that was committed loads then, or the one that was being written. A crash point is tested by standing
in `CrashPoint`.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from laconic import checkpoint
from laconic.data import arrays
from laconic.integrations import trained_state
from laconic.islands import saved_state
from laconic.islands.saved_state import SavedState
from laconic.islands.state_folder import StateFolder
from laconic.publish import FolderSource, Publisher, Reader
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.faults.crash_states import on_disk
from tests.faults.power_loss import Recorder, attached, crash_states


class Client(ABC):
    """A kind of durable folder. A version is a number from 1; a folder without any has version 0."""

    commits_per_write = 1

    @abstractmethod
    def write(self, folder: Path, version: int) -> None:
        """Write a version after the one before."""

    @abstractmethod
    def read(self, folder: Path) -> int:
        """Return the newest version that loads, of which every value must be right."""


class Checkpoints(Client):
    """Two checkpoints are kept; each second version overwrites the step of the version before."""

    def write(self, folder: Path, version: int) -> None:
        model = nn.Linear(1, 1)
        model.weight.data.fill_(version)
        checkpoint.save_checkpoint(folder, version // 2, model=model, optimizer=None, extra={"version": version})

    def read(self, folder: Path) -> int:
        model = nn.Linear(1, 1)
        found = checkpoint.load_checkpoint(folder, model=model, optimizer=None)
        assert found is None or model.weight.item() == found["version"]
        return found["version"] if found else 0


class States(Client):
    """Two fragments, of which each version changes one; the state before is kept."""

    def __init__(self) -> None:
        self._states: dict[Path, StateFolder] = {}

    def write(self, folder: Path, version: int) -> None:
        if version == 1:
            self._states[folder] = StateFolder(folder=folder, run="run", layout="layout")
            self._states[folder].create()
        states = self._states[folder]
        parts = {index: {"version": torch.tensor(version)} for index in states.missing(version % 2, 2)}
        states.write(_state(version), parts, keep_from=version - 1)

    def read(self, folder: Path) -> int:
        states = StateFolder(folder=folder, run="run", layout="layout")
        found = states.find(1)
        assert not found.problems
        versions = []
        for state in found.states:
            values = states.parse(states.read(state), state)
            version = state.sync.steps
            assert values[version % 2]["version"] == version
            assert values[1 - version % 2]["version"] == max(version - 1, 1)
            versions.append(version)
        return max(versions, default=0)


def _state(version: int) -> SavedState:
    sync = saved_state.Sync(start=1, steps=version, token="token")
    return SavedState(sync=sync, island=0, shard=0, num_shards=1, slices=())


class Tokens(Client):
    """Each version is another corpus in the same folder."""

    def write(self, folder: Path, version: int) -> None:
        index = arrays.index_path(folder, version)
        with arrays.writing_to(folder):
            for name in ("train", "eval"):
                with arrays.array_file(index, name) as file:
                    file.write(np.full(5, version).data)
            arrays.write_index(index, dict.fromkeys(("train", "eval"), np.dtype(np.int64)), {"version": version})

    def read(self, folder: Path) -> int:
        version = 0
        with contextlib.redirect_stderr(io.StringIO()) as alarms:
            while arrays.is_whole(index := arrays.index_path(folder, version + 1)):
                version += 1
                assert arrays.read_index(index).summary == {"version": version}
                found = {name: array.tolist() for name, array in arrays.map_arrays(index).items()}
                assert found == {"train": [version] * 5, "eval": [version] * 5}
        assert not alarms.getvalue()
        return version


class TrainersFolders(Client):
    """A trainer's checkpoint folder for each version, with laconic's sharded tensors in it."""

    commits_per_write = 2

    def write(self, folder: Path, version: int) -> None:
        own = folder / f"checkpoint-{version}"
        own.mkdir(parents=True)
        (own / "trainer_state.json").write_text(str(version))
        model = nn.Linear(1, 1)
        model.weight.data.fill_(version)
        trained_state.save_trained(own, version, model, None)
        trained_state.mark_complete(own)

    def read(self, folder: Path) -> int:
        newest, _ = trained_state.newest_complete(sorted(folder.glob("checkpoint-*")))
        if newest is None:
            return 0
        model = nn.Linear(1, 1)
        trained_state.load_trained(newest, model)
        assert (newest / "trainer_state.json").read_text() == str(int(model.weight.item()))
        return int(model.weight.item())


class Versions(Client):
    """Published weights: a whole version, a patch, and a whole version that takes the place of both."""

    def __init__(self) -> None:
        self._publishers: dict[Path, tuple[nn.Module, Publisher]] = {}

    def write(self, folder: Path, version: int) -> None:
        if version == 1:
            model = nn.Linear(1, 8)
            model.bias.data.fill_(7)
            self._publishers[folder] = model, Publisher(model, folder, base_every=2, keep=1)
        model, publisher = self._publishers[folder]
        model.weight.data[0] = version
        assert publisher.publish() == version
        publisher.wait()

    def read(self, folder: Path) -> int:
        if not folder.is_dir() or not FolderSource(folder).versions():
            return 0
        state = {"weight": torch.zeros(8, 1, dtype=torch.bfloat16), "bias": torch.zeros(8, dtype=torch.bfloat16)}
        version = Reader(folder).update(state)
        assert state["weight"][0] == version
        assert state["bias"].tolist() == [7] * 8
        return version


CLIENTS: dict[str, Any] = {
    "checkpoints": Checkpoints,
    "states of islands": States,
    "token files": Tokens,
    "a trainer's folders": TrainersFolders,
    "published weights": Versions,
}
VERSIONS = (1, 2, 3)


# -- crash points ------------------------------------------------------------------------------------------------------

RUN = "run"
LIMIT = 4
"""States of one instant that are all built; see `power_loss.crash_states`."""


@contextmanager
def writing(client: Client, reached: Callable[[CrashPoint, int], None]) -> Iterator[None]:
    """Call `reached` with each point that is passed in the block, and the newest version that must survive there."""
    commits: list[int] = []

    def note(point: CrashPoint) -> None:
        commits.append(1) if point == CrashPoint.COMMITTED else None
        reached(point, len(commits) // client.commits_per_write)

    store.on_crash_point = note
    try:
        yield
    finally:
        store.on_crash_point = None


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def loads(name: str, folder: Path, committed: int) -> bool:
    """Whether the newest committed version loads, or the one that follows."""
    return CLIENTS[name]().read(folder / RUN) in (committed, committed + 1)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_kill_leaves_the_newest_version_or_the_one_before(name: str, tmp_path: Path) -> None:
    client, live, copies = CLIENTS[name](), tmp_path / "live", list[tuple[CrashPoint, int, Path]]()
    live.mkdir()
    with writing(client, lambda point, committed: copies.append((point, committed, _copy(live, len(copies))))):
        for version in VERSIONS:
            client.write(live / RUN, version)
    assert client.read(live / RUN) == VERSIONS[-1]
    prunes = {CrashPoint.PRUNED} if name != "token files" else set()
    assert {point for point, *_ in copies} >= {CrashPoint.WRITTEN, CrashPoint.SYNCED, CrashPoint.COMMITTED, *prunes}
    for point, committed, folder in copies:
        assert loads(name, folder, committed), (point, committed)


def _copy(live: Path, number: int) -> Path:
    return shutil.copytree(live, live.with_name(f"copy-{number}"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", CLIENTS)
def test_a_power_cut_leaves_the_newest_version_or_the_one_before(name: str, tmp_path: Path) -> None:
    client, recorder, passed = CLIENTS[name](), Recorder(tmp_path, only=RUN), list[tuple[CrashPoint, int]]()

    def mark(*point: Any) -> None:
        passed.append(point)
        recorder.announce(mark=str(len(passed)))

    with attached(recorder.announce), writing(client, mark):
        for version in VERSIONS:
            client.write(tmp_path / RUN, version)
    for state in crash_states(recorder, limit=LIMIT):
        if state.marks:
            point, committed = passed[int(state.marks[-1]) - 1]
            with on_disk(state) as folder:
                assert loads(name, folder, committed), (point, committed, state.folders)
