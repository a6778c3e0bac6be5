"""Reading a checkpoint in one process, tensor by tensor, without the model or the ranks that made it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from laconic.checkpoint import commit, sidecar, storage
from laconic.checkpoint.commit import CheckpointError


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """An intact checkpoint on disk."""

    folder: Path
    step: int
    extra: dict[str, Any]
    """What rank 0 had given to `save_checkpoint`."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of the model's tensors by name."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors of the model, put together from the ranks' shards, on the host."""
        wanted = {f"model.{name}": torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in names}
        storage.load(wanted, self.folder, offline=True)
        return {key.removeprefix("model."): tensor for key, tensor in wanted.items()}


def open_checkpoint(folder: str | Path) -> StoredCheckpoint:
    """The newest intact checkpoint in `folder`, or the one that `folder` is.

    Raises: CheckpointError if there is none.
    """
    complaints = []
    for candidate in commit.candidates(Path(folder)):
        manifest = candidate.manifest
        problem = candidate.problem if manifest is None else "; ".join(commit.damage(candidate.folder, manifest.files))
        if manifest is not None and not problem:
            metadata = storage.read_metadata(candidate.folder).state_dict_metadata
            return StoredCheckpoint(
                folder=candidate.folder,
                step=manifest.step,
                extra=sidecar.read(candidate.folder / sidecar.name(0))["extra"],
                tensors={
                    key.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
                    for key, entry in metadata.items()
                    if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
                },
            )
        complaints.append(f"{candidate.folder}: {problem}")
        warnings.warn(f"checkpoint {candidate.folder} is damaged and is skipped: {problem}", stacklevel=2)
    found = f"no intact checkpoint ({'; '.join(complaints)})" if complaints else "no checkpoint"
    raise CheckpointError(f"there is {found} in {folder}; give the output folder of a run or one of its step-N folders")
