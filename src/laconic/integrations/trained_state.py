"""The trained part of a model and its optimizer, in the checkpoint folder of another trainer.

[Note: Complete checkpoints]
A trainer writes its checkpoint folder file by file and syncs none, so a kill leaves a folder that looks like a
checkpoint, and a power cut leaves files of zeros. When all ranks have written theirs, laconic syncs the files and adds
their manifest ([Note: A store] in store/folder.py). A folder without the manifest, or with a file that differs from it,
is not complete and is never resumed from. Hashes of the sharded tensors come from their own manifest. Lists of earlier
releases have no checksum of themselves, and those of the earliest no hashes, but sizes only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic import checkpoint
from laconic.checkpoint import commit
from laconic.checkpoint.api import damage_in_shares
from laconic.checkpoint.state import persistent_buffers, reshard
from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo
from laconic.errors import JobError
from laconic.islands.local_steps import LocalSteps
from laconic.store.files import sync
from laconic.store.folder import CrashPoint, FileRecord, Manifest, commit_in_place, describe, reached
from laconic.store.series import numbered

SHARDS = "laconic"
"""The folder, in the trainer's checkpoint, with the sharded tensors."""
FILES = "laconic_files.json"
"""The list of the checkpoint's files."""


@dataclass(frozen=True, kw_only=True)
class TrainersFiles(Manifest):
    """The list of a trainer's files."""

    FORMAT = "laconic-trainer-1"

    world_size: int


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
    """Sync and list the files of `folder`: [Note: Complete checkpoints]. All ranks call it, after they wrote theirs.

    The first rank of each node syncs, because the others' files may be in the memory of their node only. Cost: rank 0
    reads all files but the sharded tensors.

    Raises:
        CheckpointError: on all ranks, if a file cannot be synced, read or written.
    """
    folder, ranks = Path(folder), RankGroup(error=checkpoint.CheckpointError)
    failure = f"checkpoint {folder} could not be completed"

    def write() -> None:
        commit_in_place(folder / FILES, TrainersFiles(files=_records(folder), world_size=ranks.size))

    ranks.gather(None)  # all ranks have written
    ranks.on_all(lambda: _sync_all(folder) if RankInfo.from_environment().is_first_on_node else None, failure)
    reached(CrashPoint.SYNCED)
    ranks.on_rank_0(write, failure)


def incomplete(folder: str | Path) -> str:
    """Say why `folder` is no complete checkpoint; empty if it is one. All ranks call it, and read a part each."""
    folder, ranks = Path(folder), RankGroup(error=JobError)
    listed: list[dict[str, Any]] | str = ranks.on_rank_0(lambda: _listed(folder), f"{folder} is not readable")
    if isinstance(listed, str):
        return listed
    return "; ".join(damage_in_shares(ranks, folder, [FileRecord(**record) for record in listed]))


def newest_complete(output: str | Path) -> tuple[Path | None, list[str]]:
    """Return the last `checkpoint-N` in a folder that is complete, and why later ones were skipped. Collective."""
    skipped: list[str] = []
    found = sorted(numbered(Path(output), r"checkpoint-(\d+)"), key=lambda each: int(each[1][1]), reverse=True)
    for name in RankGroup(error=JobError).broadcast([str(path) for path, _ in found]):
        if not (reason := incomplete(name)):
            return Path(name), skipped
        skipped.append(f"{name}: {reason}")
    return None, skipped


def _records(folder: Path) -> tuple[FileRecord, ...]:
    """Describe each file. Hashes of sharded tensors are not computed again."""
    known = {
        path.parent / record.name: record.sha256
        for path in folder.glob(f"{SHARDS}/*/{commit.MANIFEST}")
        for record in commit.CheckpointManifest.read(path).files
    }
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES)
    return tuple(describe(folder, str(path.relative_to(folder)), sha256=known.get(path)) for path in files)


def _sync_all(folder: Path) -> None:
    """Make the files, their names and the name of the folder survive a power cut."""
    for path in (*filter(Path.exists, folder.rglob("*")), folder, folder.parent):
        sync(path)


def _listed(folder: Path) -> list[dict[str, Any]] | str:
    """Return the records of the folder's manifest, or what is wrong with it."""
    try:
        data = (folder / FILES).read_bytes()
        body = json.loads(data)
        files = TrainersFiles.parse(data, FILES).files if "format" in body else _of_earlier_release(body)
        return [asdict(record) for record in files]
    except FileNotFoundError:
        return f"it has no list of its files ({FILES}): writing was cut off, or another trainer wrote it"
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        return f"its list of files ({FILES}) is damaged: {error}"


def _of_earlier_release(body: dict[str, Any]) -> list[FileRecord]:
    hashes = body.get("sha256", {})
    return [FileRecord(name=name, size_bytes=size, sha256=hashes.get(name)) for name, size in body["files"].items()]
