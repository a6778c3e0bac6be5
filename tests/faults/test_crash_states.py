"""A sample of the states that a power cut may leave of a save: the newest checkpoint, or the one before, loads.

`python -m tests.faults --rows crash-states` loads all of them.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from laconic.checkpoint import api, commit
from laconic.store import files
from laconic.store import folder as store
from laconic.store.files import remove, sync, write_text
from tests.faults import crash_states, saves
from tests.faults.crash_states import HARMS, tally
from tests.faults.power_loss import Recorder, attached, sampled_states
from tests.faults.power_loss import crash_states as states_of

KINDS = ("one rank", "overwrite", "async", "cyclic")
"""The kinds of saves that differ in their files; `crash_states.KINDS` are all."""
STATES_PER_KIND = 24


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorder]:
    return saves.record(list(KINDS), tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_loads_the_newest_checkpoint_or_the_one_before(kind: str, recorded: dict[str, Recorder]) -> None:
    found = tally(recorded[kind], sampled_states(recorded[kind], STATES_PER_KIND))
    assert found.num_states == STATES_PER_KIND
    assert found.harmed == {harm: [] for harm in HARMS}


def _sync_files_only(path: Path) -> None:
    if path.is_file():
        sync(path)


def _remove_at_once(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        (path / commit.MANIFEST).unlink(missing_ok=True)
        remove(path)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a rank's files are not synced": (api, "sync", lambda path: None),
    "folders are not synced": (store, "sync", _sync_files_only),
    "the folder of the run is not synced": (files, "sync", _sync_files_only),
    "files are not synced": (store, "write_text", lambda path, text: write_text(path, text, durable=False)),
    "a removal has no name": (store, "remove_folders", _remove_at_once),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_protocol_is_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = MISTAKES[mistake]
    monkeypatch.setattr(module, name, replacement)
    recorder = saves.record(["one rank"], tmp_path)["one rank"]
    monkeypatch.undo()
    found = tally(recorder, itertools.islice(states_of(recorder, limit=8), 0, None, 6), save_every=1000)
    assert any(found.harms.values()), found


def test_the_model_of_a_power_cut(tmp_path: Path) -> None:
    """A file is written, synced and renamed, and the folder is not synced: by hand, every state."""
    (tmp_path / "a").write_bytes(b"old!")
    recorder = Recorder(tmp_path)
    recorder.announce(synced=(tmp_path / "a").stat().st_ino)
    recorder.announce(synced=tmp_path.stat().st_ino)
    start = len(recorder.log)
    with attached(recorder.announce):
        (tmp_path / "b").write_bytes(b"new!")
        files.sync(tmp_path / "b")
        (tmp_path / "b").replace(tmp_path / "a")
    assert len(recorder.log) == start + 4, "a name, a write, a sync, a rename"
    found = {tuple(sorted(state.files.items())) for state in states_of(recorder, limit=1000)}
    a = ("a", b"old!")
    assert {
        (a,),
        (a, ("b", b"")),
        (a, ("b", b"ne")),
        (a, ("b", b"ne\0\0")),
        (a, ("b", b"new!")),
        (("a", b"new!"),),
    } <= found
    assert not any(("a", content) in state for state in found for content in (b"ne", b"ne\0\0")), "synced before"


def test_damage_is_harm() -> None:
    """The tally tells kinds of harm apart."""
    expected = {0: "", 1: "one", 2: "two"}
    loaded = crash_states.saves.Loaded
    cases = {
        "": loaded(1, "one"),
        "not loadable": loaded(0, ""),
        "loaded differing": loaded(2, "one"),
        "foreign errors": loaded(0, "", foreign="KeyError: 1"),
        "false alarms": loaded(1, "one", warned=("damaged",)),
    }
    assert {harm: crash_states.harm_of(found, expected, 1)[0] for harm, found in cases.items()} == {h: h for h in cases}
