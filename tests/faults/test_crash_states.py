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
from tests.faults import saves
from tests.faults.crash_states import tally
from tests.faults.power_loss import Recorder, crash_states, sampled_states

KINDS = ("one rank", "overwrite", "async", "cyclic")
"""The kinds of saves that differ in their files; `crash_states.KINDS` are all."""
STATES_PER_KIND = 24


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorder]:
    return saves.record(list(KINDS), tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_loads_the_newest_checkpoint_or_the_one_before(kind: str, recorded: dict[str, Recorder]) -> None:
    assert tally(recorded[kind], sampled_states(recorded[kind], STATES_PER_KIND)) == (STATES_PER_KIND, [])


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
    _, harmed = tally(recorder, itertools.islice(crash_states(recorder, limit=8), 0, None, 6), save_every=1000)
    assert harmed
