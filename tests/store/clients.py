"""The clients of the store, each as something that writes version 1, 2, 3, ... and tells which version loads."""

from __future__ import annotations

import contextlib
import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from laconic import checkpoint
from laconic.data import arrays
from laconic.integrations import trained_state
from laconic.islands.saved_state import SavedState, Sync
from laconic.islands.state_folder import StateFolder


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
    sync = Sync(start=1, steps=version, token="token")
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


CLIENTS: dict[str, Any] = {
    "checkpoints": Checkpoints,
    "states of islands": States,
    "token files": Tokens,
    "a trainer's folders": TrainersFolders,
}
VERSIONS = (1, 2, 3)
