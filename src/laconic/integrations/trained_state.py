"""The trained part of a model and its optimizer, in the checkpoint folder of another trainer.

[Note: Complete checkpoints]
A trainer writes its checkpoint folder file by file, so a kill leaves a folder that looks like a checkpoint. laconic
adds a list of the files with their sizes, after all ranks have written theirs. A folder without the list, or with a
file of another size, is not complete and is never resumed from. The sharded tensors have hashes of their own besides:
[Note: Commit protocol] in checkpoint/commit.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic import checkpoint
from laconic.checkpoint.state import persistent_buffers, reshard
from laconic.comm.agreement import RankGroup
from laconic.errors import JobError
from laconic.files import write_text
from laconic.islands.local_steps import LocalSteps

SHARDS = "laconic"
"""The folder, in the trainer's checkpoint, with the sharded tensors."""
FILES = "laconic_files.json"
"""The list of the checkpoint's files."""


class TrainedPart(nn.Module):
    """The trainable parameters and persistent buffers of a model, under their names in the model.

    Frozen weights do not change, so a checkpoint of a LoRA run need not have them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        reshard(model)  # after a forward without backward the root may still show gathered parameters
        # Dotted names, which register_parameter refuses: they are the names in the model.
        self._parameters.update({name: p for name, p in model.named_parameters() if p.requires_grad})
        self._buffers.update(persistent_buffers(model))


def save_trained(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    local_steps: LocalSteps | None = None,
) -> None:
    """Write the trained part and the optimizer's state to a trainer's checkpoint `folder`. All ranks call it.

    Raises:
        CheckpointError: see `laconic.checkpoint.save_checkpoint`.
    """
    checkpoint.save_checkpoint(
        Path(folder) / SHARDS, step, model=TrainedPart(model), optimizer=optimizer, extra={}, local_steps=local_steps
    )


def load_trained(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    local_steps: LocalSteps | None = None,
) -> None:
    """Load what `save_trained` wrote, on any number of ranks. All ranks call it.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or optimizer.
    """
    found = checkpoint.load_checkpoint(
        Path(folder) / SHARDS, model=TrainedPart(model), optimizer=optimizer, local_steps=local_steps
    )
    if found is None:
        raise checkpoint.CheckpointError(f"{folder} has no sharded tensors; it is no checkpoint of laconic")


def has_shards(folder: str | Path) -> bool:
    """Whether a trainer's checkpoint folder has sharded tensors of laconic."""
    return (Path(folder) / SHARDS).is_dir()


def mark_complete(folder: str | Path) -> None:
    """List the files of `folder`: [Note: Complete checkpoints]. All ranks call it, when their files are written."""
    folder, ranks = Path(folder), RankGroup(error=checkpoint.CheckpointError)

    def write() -> None:
        files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
        write_text(folder / FILES, json.dumps({"world_size": ranks.size, "files": files}, indent=1))

    ranks.gather(None)  # all ranks have written
    ranks.on_rank_0(write, f"checkpoint {folder} could not be completed")


def incomplete(folder: str | Path) -> str:
    """Say why `folder` is no complete checkpoint; empty if it is one."""
    folder = Path(folder)
    try:
        listed: dict[str, Any] = json.loads((folder / FILES).read_text())
    except (OSError, ValueError):
        return f"it has no list of its files ({FILES}): writing was cut off, or another trainer wrote it"
    for name, size in listed["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or damaged"
    return ""


def newest_complete(folders: list[Path]) -> tuple[Path | None, list[str]]:
    """Return the last complete one of `folders`, which are in order, and why later ones were skipped. Collective."""

    def find() -> tuple[Path | None, list[str]]:
        skipped: list[str] = []
        for folder in reversed(folders):
            reason = incomplete(folder)
            if not reason:
                return folder, skipped
            skipped.append(f"{folder}: {reason}")
        return None, skipped

    return RankGroup(error=JobError).on_rank_0(find, "the checkpoints are not readable")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES)
