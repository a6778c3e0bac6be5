"""Save a training run so that it can be resumed exactly, and resume it. See [Note: Commit protocol] in commit.py."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic.checkpoint import commit, sidecar, state, storage
from laconic.checkpoint.commit import CheckpointError, Manifest, reached


def save_checkpoint(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write `folder/step-N` so that a kill at any instant leaves it or the one before; all ranks call it.

    `extra` is this rank's own: dicts with string keys, lists, strings, numbers and tensors, such as `rng_state()`.
    Every rank gets its own back. Of the checkpoints committed in `folder` the newest `keep` remain: two or more, so
    that a damaged one can be survived.
    Cost: each rank writes its shards and its share of what is replicated; names, sizes and hashes cross the wire,
    state does not.
    Raises: CheckpointError on every rank if any rank cannot write; earlier checkpoints are then untouched.
    """
    if keep < 2:
        raise CheckpointError(
            f"keep={keep} checkpoints, expected 2 or more: a damaged newest one needs an older one to fall back to"
        )
    folder = Path(folder)
    begun = _on_rank_0(lambda: commit.begin(folder, step), f"the checkpoint folder {folder} is not writable")
    temporary = Path(begun)
    reached("begun")
    tensors = state.model_tensors(model)
    settings = None
    if optimizer is not None:
        tensors |= state.optimizer_tensors(model, optimizer)
        settings = state.optimizer_settings(model, optimizer)
    storage.save(tensors, temporary)
    reached("shards_written")

    def write_own_files() -> list[commit.FileRecord]:
        sidecar.write(temporary / sidecar.name(_rank()), {"extra": extra, "optimizer": settings})
        reached("sidecar_written")
        names = [sidecar.name(_rank()), *sorted(path.name for path in temporary.glob(f"__{_rank()}_*"))]
        names += [".metadata"] if _rank() == 0 else []
        return [commit.describe_file(temporary / name, name) for name in names]

    records = _on_all_ranks(write_own_files, f"checkpoint {temporary} could not be written")

    def commit_all() -> Path:
        manifest = Manifest(
            step=step,
            sequence=commit.next_sequence(folder),
            world_size=_world_size(),
            versions=_versions(),
            files=tuple(record for rank_records in records for record in rank_records),
        )
        return commit.commit(folder, temporary, manifest, keep=keep)

    return _on_rank_0(commit_all, f"checkpoint {temporary} could not be committed")


def load_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any] | None:
    """Put the newest intact checkpoint of `folder` (or the one that `folder` itself is) into model and optimizer.

    All ranks call it; the number of ranks and the strategy may differ from those that saved. The model must have
    memory; the optimizer may be new. Returns this rank's `extra` with `step` added, or None if there is no checkpoint.
    Where there are more ranks than saved, the additional ones get rank 0's `extra`.
    A checkpoint that does not match its manifest is skipped with a warning.
    Raises: CheckpointError if it is another model's or optimizer's, naming the differing tensors, or if none is intact.
    """
    folder = Path(folder)
    found = _on_rank_0(lambda: commit.candidates(folder), f"the checkpoint folder {folder} is not readable")
    complaints: list[str] = []
    for candidate in found:
        problem = candidate.problem or _verify(candidate.folder, candidate.manifest)
        if not problem:
            tensors = _destination(candidate.folder, model, optimizer)
            try:
                storage.load(tensors, candidate.folder)
            except CheckpointError as error:  # raised on all ranks: DCP agrees on it
                problem = str(error)
            else:
                return _finish(candidate.folder, candidate.manifest, model, optimizer)
        complaints.append(f"{candidate.folder}: {problem}")
        if _rank() == 0:
            warnings.warn(f"checkpoint {candidate.folder} is damaged and is skipped: {problem}", stacklevel=2)
    if complaints:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is intact ({'; '.join(complaints)}); "
            "restore one from a backup, or start anew in another folder"
        )
    return None


def _destination(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    metadata = storage.read_metadata(folder)
    tensors = state.model_tensors(model)
    state.refuse_another_model(tensors, metadata, str(folder))
    if optimizer is not None:
        settings = sidecar.read(_own_sidecar(folder))["optimizer"]
        if settings is None:
            raise CheckpointError(
                f"{folder} was saved without an optimizer, this run has {type(optimizer).__name__}; pass optimizer=None"
            )
        state.prepare_optimizer(model, optimizer, metadata)
        state.restore_optimizer_settings(model, optimizer, settings)
        tensors |= state.optimizer_tensors(model, optimizer)
    return tensors


def _finish(
    folder: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    extra = sidecar.read(_own_sidecar(folder))["extra"]
    return {"step": manifest.step, **extra}


def _verify(folder: Path, manifest: Manifest | None) -> str:
    """Every rank hashes its share of the files; the verdict is common. Empty if all is well."""
    assert manifest is not None
    mine = manifest.files[_rank() :: _world_size()]
    return "; ".join(problem for problems in _gather(commit.damage(folder, mine)) for problem in problems)


def _own_sidecar(folder: Path) -> Path:
    own = folder / sidecar.name(_rank())
    return own if own.exists() else folder / sidecar.name(0)


def _versions() -> dict[str, str]:
    try:
        laconic_version = version("laconic")
    except PackageNotFoundError:  # run from a source tree
        laconic_version = "unknown"
    return {"laconic": laconic_version, "torch": torch.__version__, "python": platform.python_version()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * _world_size()
    dist.all_gather_object(values, value)
    return values


def _on_all_ranks(action: Callable[[], Any], failure: str) -> list[Any]:
    """Every rank's result on every rank; if any rank fails, every rank raises with that rank's reason."""
    result, error = None, ""
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = str(caught)
    outcomes = _gather((result, error))
    errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text]
    if errors:
        raise CheckpointError(f"{failure} ({'; '.join(errors)})")
    return [result for result, _ in outcomes]


def _on_rank_0(action: Callable[[], Any], failure: str) -> Any:
    return _on_all_ranks(action if _rank() == 0 else lambda: None, failure)[0]
