"""Every client of the store is stopped at every crash point, and the power is cut there.

The newest version that was committed loads then, or the one that was being written. A crash point is tested by standing
in `CrashPoint`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.faults.crash_states import on_disk
from tests.faults.power_loss import State, crash_states
from tests.faults.recording import Recorder, Sync, attached
from tests.store.clients import CLIENTS, VERSIONS, Client

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


def cut_states(client: Client, root: Path, forgotten: str = "") -> list[tuple[Passed, State]]:
    """The states that a power cut may leave; or might, if the syncs of all "files" or "folders" were forgotten."""
    recorder, passed = Recorder(root, only=RUN), list[Passed]()

    def mark(point: Passed) -> None:
        passed.append(point)
        recorder.announce(mark=str(len(passed)))

    with attached(recorder.announce), writing(client, mark):
        for version in VERSIONS:
            client.write(root / RUN, version)
    kinds = {"files": lambda inode: inode not in recorder.folders, "folders": recorder.folders.__contains__}
    if forgotten:
        recorder.log = [op for op in recorder.log if not (isinstance(op, Sync) and kinds[forgotten](op.inode))]
    return [(passed[int(state.marks[-1]) - 1], state) for state in crash_states(recorder, limit=LIMIT) if state.marks]


@pytest.mark.parametrize("point", CrashPoint)
def test_a_power_cut_leaves_the_newest_version_or_the_one_before(
    point: CrashPoint, cut: dict[str, list[tuple[Passed, State]]]
) -> None:
    tried = 0
    for name, states in cut.items():
        for passed, state in states:
            if passed.point == point:
                tried += 1
                with on_disk(state) as folder:
                    assert loads(CLIENTS[name](), folder, passed.committed), (name, passed, state.folders)
    assert tried, "a client passes each point"


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("forgotten", ["files", "folders"])
def test_every_sync_is_needed(forgotten: str, name: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    states = cut_states(CLIENTS[name](), tmp_path, forgotten)
    assert any(is_lost(CLIENTS[name](), passed, state) for passed, state in states[::7])


def is_lost(client: Client, passed: Passed, state: State) -> bool:
    with on_disk(state) as folder:
        try:
            return not loads(client, folder, passed.committed)
        except (ValueError, AssertionError):
            return True
