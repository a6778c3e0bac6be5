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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from tests.faults.power_loss import Recorder, State, attached, crash_states


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


@dataclass(frozen=True)
class Passed:
    """A client got to a point."""

    version: int
    """The version that it was writing."""
    point: CrashPoint
    committed: int
    """The newest version that must survive."""


@contextmanager
def writing(client: Client, reached: Any) -> Iterator[None]:
    """Call `reached` with what is passed, in the block, in which `write_all` writes."""
    commits: list[int] = []

    def note(point: CrashPoint) -> None:
        commits.append(1) if point == CrashPoint.COMMITTED else None
        committed = len(commits) // client.commits_per_write
        reached(Passed(min(committed + 1, VERSIONS[-1]), point, committed))

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


def loads(client: Client, folder: Path, committed: int) -> bool:
    """Whether the newest committed version loads, or the one that follows."""
    return client.read(folder / RUN) in (committed, committed + 1)


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Passed, Path]]]:
    """What a kill at each point leaves on the disk, by client: a copy of the folder at that instant."""
    found: dict[str, list[tuple[Passed, Path]]] = {}
    for name, make in CLIENTS.items():
        root, client = tmp_path_factory.mktemp("killed"), make()
        (root / "live").mkdir()
        copies = found[name] = []

        def keep(passed: Passed, root: Path = root, copies: list[Any] = copies) -> None:
            copies.append((passed, root / str(len(copies))))
            shutil.copytree(root / "live", copies[-1][1])

        with writing(client, keep):
            for version in VERSIONS:
                client.write(root / "live" / RUN, version)
        assert client.read(root / "live" / RUN) == VERSIONS[-1]
    return found


@pytest.mark.parametrize("point", CrashPoint)
def test_a_kill_leaves_the_newest_version_or_the_one_before(
    point: CrashPoint, killed: dict[str, list[tuple[Passed, Path]]]
) -> None:
    tried = 0
    for name, copies in killed.items():
        for passed, folder in copies:
            if passed.point == point:
                tried += 1
                assert loads(CLIENTS[name](), folder, passed.committed), (name, passed)
    assert tried, "a client passes each point"


# -- power cuts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Passed, State]]]:
    """What a power cut may leave between a point and the next one, by client."""
    return {name: cut_states(make(), tmp_path_factory.mktemp("cut")) for name, make in CLIENTS.items()}


def cut_states(client: Client, root: Path) -> list[tuple[Passed, State]]:
    """The states that a power cut may leave."""
    recorder, passed = Recorder(root, only=RUN), list[Passed]()

    def mark(point: Passed) -> None:
        passed.append(point)
        recorder.announce(mark=str(len(passed)))

    with attached(recorder.announce), writing(client, mark):
        for version in VERSIONS:
            client.write(root / RUN, version)
    return [(passed[int(state.marks[-1]) - 1], state) for state in crash_states(recorder, limit=LIMIT) if state.marks]


@pytest.mark.heavy
@pytest.mark.parametrize("point", CrashPoint)
def test_a_power_cut_leaves_the_newest_version_or_the_one_before(
    point: CrashPoint, cut: dict[str, list[tuple[Passed, State]]]
) -> None:
    for name, states in cut.items():
        for passed, state in states:
            if passed.point == point:
                with on_disk(state) as folder:
                    assert loads(CLIENTS[name](), folder, passed.committed), (name, passed, state.folders)
