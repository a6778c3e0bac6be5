"""Every client of the store is stopped at every crash point, and the power is cut there.

The newest version that was committed loads then, or the one that was being written. A crash point is tested by standing
in `CrashPoint`.
"""

from __future__ import annotations

import contextlib
import io
import shutil
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
from laconic.islands.saved_state import SavedState, Sync
from laconic.islands.state_folder import StateFolder
from laconic.publish import FolderSource, Publisher, Reader
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.faults.crash_states import on_disk
from tests.faults.power_loss import Recorder, attached, crash_states

pytestmark = pytest.mark.filterwarnings("error")

# -- clients: `write` writes a version, from 1, after the one before; `read` returns the newest that loads, or 0 -------


class Checkpoints:
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


class States:
    """Two fragments, of which each version changes one; the state before is kept."""

    def write(self, folder: Path, version: int) -> None:
        if version == 1:
            self._states = StateFolder(folder=folder, run="run", layout="layout")
            self._states.create()
        parts = {index: {"version": torch.tensor(version)} for index in self._states.missing(version % 2, 2)}
        sync = Sync(start=1, steps=version, token="token")
        state = SavedState(sync=sync, island=0, shard=0, num_shards=1, slices=())
        self._states.write(state, parts, keep_from=version - 1)

    def read(self, folder: Path) -> int:
        states = StateFolder(folder=folder, run="run", layout="layout")
        found, problems = states.find(1)
        assert not problems
        versions = []
        for state in found:
            values = states.parse(states.read(state), state)
            version = state.sync.steps
            assert values[version % 2]["version"] == version
            assert values[1 - version % 2]["version"] == max(version - 1, 1)
            versions.append(version)
        return max(versions, default=0)


class Tokens:
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


class TrainersFolders:
    """A trainer's checkpoint folder for each version, with laconic's sharded tensors in it."""

    def write(self, folder: Path, version: int) -> None:
        own = folder / f"checkpoint-{version}"
        own.mkdir(parents=True)
        (own / "trainer_state.json").write_text(str(version))
        model = nn.Linear(1, 1)
        model.weight.data.fill_(version)
        trained_state.save_trained(own, version, model, None)
        trained_state.mark_complete(own)

    def read(self, folder: Path) -> int:
        newest, _ = trained_state.newest_complete(folder)
        if newest is None:
            return 0
        model = nn.Linear(1, 1)
        trained_state.load_trained(newest, model)
        assert (newest / "trainer_state.json").read_text() == str(int(model.weight.item()))
        return int(model.weight.item())


class Versions:
    """Published weights: a whole version, a patch, and a whole version that takes the place of both."""

    def write(self, folder: Path, version: int) -> None:
        if version == 1:
            self._model = nn.Linear(1, 8)
            self._model.bias.data.fill_(7)
            self._publisher = Publisher(self._model, folder, base_every=2, keep=1)
        self._model.weight.data[0] = version
        assert self._publisher.publish() == version
        self._publisher.wait()

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
def writing(name: str, reached: Callable[[CrashPoint, int], None]) -> Iterator[None]:
    """Call `reached` with each point that is passed in the block, and the newest version that must survive there."""
    commits, each = list[CrashPoint](), 2 if name == "a trainer's folders" else 1  # one for the tensors in it

    def note(point: CrashPoint) -> None:
        commits.extend([point] if point == CrashPoint.COMMITTED else [])
        reached(point, len(commits) // each)

    store.on_crash_point = note
    try:
        yield
    finally:
        store.on_crash_point = None


def loads(name: str, folder: Path, committed: int) -> bool:
    """Whether the newest committed version loads, or the one that follows."""
    return CLIENTS[name]().read(folder / RUN) in (committed, committed + 1)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_kill_leaves_the_newest_version_or_the_one_before(name: str, tmp_path: Path) -> None:
    client, live, copies = CLIENTS[name](), tmp_path / "live", list[tuple[CrashPoint, int, Path]]()
    live.mkdir()

    def copy(point: CrashPoint, committed: int) -> None:
        copies.append((point, committed, shutil.copytree(live, tmp_path / f"copy-{len(copies)}")))

    with writing(name, copy):
        for version in VERSIONS:
            client.write(live / RUN, version)
    assert client.read(live / RUN) == VERSIONS[-1]
    prunes = {CrashPoint.PRUNED} if name != "token files" else set()
    assert {point for point, *_ in copies} >= {CrashPoint.WRITTEN, CrashPoint.SYNCED, CrashPoint.COMMITTED, *prunes}
    for point, committed, folder in copies:
        assert loads(name, folder, committed), (point, committed)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CLIENTS)
def test_a_power_cut_leaves_the_newest_version_or_the_one_before(name: str, tmp_path: Path) -> None:
    client, recorder, passed = CLIENTS[name](), Recorder(tmp_path, only=RUN), list[tuple[CrashPoint, int]]()

    def mark(*point: Any) -> None:
        passed.append(point)
        recorder.announce(mark=str(len(passed)))

    with attached(recorder.announce), writing(name, mark):
        for version in VERSIONS:
            client.write(tmp_path / RUN, version)
    for state in crash_states(recorder, limit=LIMIT):
        if state.marks:
            point, committed = passed[int(state.marks[-1]) - 1]
            with on_disk(state) as folder:
                assert loads(name, folder, committed), (point, committed, state.folders)
