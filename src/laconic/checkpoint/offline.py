"""Reading a checkpoint in one process, tensor by tensor, without the model or the ranks that made it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.checkpoint import commit, sidecar, storage
from laconic.checkpoint.commit import CheckpointError, Manifest
from laconic.checkpoint.keys import LACONIC_KEYS


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """An intact checkpoint on disk."""

    folder: Path
    step: int
    extra: dict[str, Any]
    """Rank 0's `extra` of `save_checkpoint`."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of the model's tensors by name."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read whole tensors of the model by name, joined from the ranks' shards, on the host.

        Raises:
            StorageError: the folder is unreadable.
        """
        tensors = {name: torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in names}
        storage.load({f"{LACONIC_KEYS.model}{name}": t for name, t in tensors.items()}, self.folder, offline=True)
        return tensors


def open_checkpoint(folder: str | Path) -> StoredCheckpoint:
    """Open the newest intact checkpoint in `folder`, or `folder` itself if it is one. Cost: hashes all its files.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    stored = commit.use_newest(Path(folder), commit.candidates(Path(folder)), _open)
    if stored is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; give the output folder of a run or one of its step-N folders"
        )
    return stored


def _open(folder: Path, manifest: Manifest) -> StoredCheckpoint:
    entries = LACONIC_KEYS.model_entries(storage.tensors_of(storage.read_metadata(folder)))
    return StoredCheckpoint(
        folder=folder,
        step=manifest.step,
        extra=sidecar.read(folder)["extra"],
        tensors={name: (entry.shape, entry.dtype) for name, entry in entries.items()},
    )
