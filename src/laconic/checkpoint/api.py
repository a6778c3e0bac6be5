"""Save a training run so that it can be resumed exactly, and resume it. See [Note: Commit protocol] in commit.py."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.planner import SavePlanner

from laconic.checkpoint import commit, keys, outer_state, parts, sidecar, state, storage
from laconic.checkpoint.commit import CheckpointError, Manifest, reached
from laconic.checkpoint.fill import Differences, Source, fill
from laconic.checkpoint.parts import Assignment
from laconic.comm.agreement import RankGroup
from laconic.islands.local_steps import LocalSteps
from laconic.ragged.joined import joined


def save_checkpoint(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    keep: int = 2,
    local_steps: LocalSteps | None = None,
) -> Path:
    """Write `folder/step-N` so that a kill at any instant leaves it or the one before; all ranks call it.

    `extra` is this rank's own: dicts with string keys, lists, strings, numbers and tensors, such as `rng_state()`.
    Every rank gets its own back. Of the checkpoints committed in `folder` the newest `keep` remain: two or more, so
    that a damaged one can be survived.
    `step-N` is also an ordinary folder of torch.distributed.checkpoint, with the keys of `{"model":
    get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}`, which a program without laconic can load.
    A model with partial updates is written unsliced. With `local_steps` the model is what islands agreed on, and what
    each of them needs to go on is beside it ([Note: The layout of a checkpoint] in checkpoint/parts.py).
    Cost: each rank writes its shards and its share of what is replicated; names, sizes and hashes cross the wire,
    state does not. `AsyncSaver` does it while training goes on.
    Raises: CheckpointError on every rank if any rank cannot write; earlier checkpoints are then untouched.
    """
    check_keep(keep)
    ranks = RankGroup(error=CheckpointError)
    contents = Contents.of(model, optimizer, extra, local_steps, ranks)
    return write(Path(folder), step, contents, keep=keep, ranks=ranks)


def load_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool = True,
    local_steps: LocalSteps | None = None,
) -> dict[str, Any] | None:
    """Put the newest intact checkpoint of `folder` (or the one that `folder` itself is) into model and optimizer.

    All ranks call it; the number of ranks and the strategy may differ from those that saved. The model must have
    memory; the optimizer may be new. Returns this rank's `extra` with `step` added, or None if there is no checkpoint.
    Where there are more ranks than saved, the additional ones get rank 0's `extra`.
    With `local_steps`, whose inner optimizer this is, as many islands that train the same slices go on to the same
    bits. Any others start from the outer parameters, outer optimizer state included, with inner optimizer state as far
    as there is some for their slices; what was in flight is dropped. `islands` in the result, a sentence, then says so.
    A checkpoint that does not match its manifest is skipped with a warning.
    Without `strict`, what fits is loaded and the rest is left as it is; `skipped` in the result, a `Differences`, and a
    warning say what that was.
    Raises: CheckpointError if it is another model's or optimizer's, naming every tensor that differs, unless not
    `strict`; or if none is intact.
    """
    ranks = RankGroup(error=CheckpointError)
    folder = Path(folder)
    found = ranks.on_rank_0(lambda: commit.candidates(folder), f"the checkpoint folder {folder} is not readable")
    complaints: list[str] = []
    for candidate in found:
        problem = candidate.problem or _verify(candidate.folder, candidate.manifest, ranks)
        if not problem:
            own = _read_own_sidecar(candidate.folder, ranks)
            assert candidate.manifest is not None
            try:
                differences, why = _load(candidate, own, model, optimizer, local_steps, strict=strict, ranks=ranks)
            except storage.StorageError as error:
                problem = str(error)
            else:
                skipped = {} if strict else {"skipped": _told(differences, candidate.folder, ranks)}
                return {"step": candidate.manifest.step, **own["extra"], **skipped, **({"islands": why} if why else {})}
        complaints.append(f"{candidate.folder}: {problem}")
        if ranks.rank == 0:
            warnings.warn(f"checkpoint {candidate.folder} is damaged and is skipped: {problem}", stacklevel=2)
    if complaints:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is intact ({'; '.join(complaints)}); "
            "restore one from a backup, or start anew in another folder"
        )
    return None


def load_dcp(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> Differences:
    """Load a folder that any program wrote with `torch.distributed.checkpoint`, such as one that trains with FSDP2.

    The usual layouts are understood: a model's state dict at the top or under any keys, and an optimizer's as
    `get_optimizer_state_dict` gives it, flattened or not. Where several fit (a model and its moving average, say),
    `model_key` and `optimizer_key` say which: "app.model", or "" for the top. All ranks call it; their number is free.
    The optimizer takes no step. Unlike torch's own loader this runs no code that the folder contains. Nothing in such a
    folder tells when a bit has flipped; and its step and the like are the writer's own, for you to read.
    Returns what was not loaded: nothing, with `strict`.
    Raises: CheckpointError if `folder` is damaged or no such folder; with `strict`, also if anything differs, naming
    every tensor that does.
    """
    folder, ranks = Path(folder), RankGroup(error=CheckpointError)

    def read() -> Source:
        metadata = storage.read_metadata(folder)
        entries = storage.tensors_of(metadata)
        places = state.places(model)
        names, parameters = joined(state.model_tensors(model), places), joined(state.named_parameters(model), places)
        found = keys.Keys.found_in(
            metadata.state_dict_metadata,
            tensors=names,
            parameters=parameters,
            model=model_key,
            optimizer=optimizer_key,
            with_optimizer=optimizer is not None,
        )
        settings = keys.optimizer_settings(folder, metadata, found, model, optimizer) if optimizer is not None else None
        return Source(folder=folder, entries=entries, keys=found, settings=settings)

    source: list[Source] = []
    ranks.on_all(lambda: source.append(read()), f"{folder} could not be read")
    return _told(fill(source[0], model, optimizer, strict=strict), folder, ranks)


def _told(differences: Differences, folder: Path, ranks: RankGroup) -> Differences:
    """Warn, once in the job, of what was not loaded."""
    if differences and ranks.rank == 0:
        warnings.warn(f"{folder} does not fit, and only what fits was loaded ({differences})", stacklevel=3)
    return differences


# -- what the synchronous and the asynchronous way share ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank puts into a checkpoint."""

    tree: dict[str, Any]
    """Of tensors and hyper-parameters, as PyTorch nests them."""
    aliases: dict[storage.KeyPath, storage.KeyPath]
    sidecar: str | ValueError
    """This rank's JSON, or why there is none: to be raised where all ranks hear of it."""
    planner: SavePlanner | None = None
    """Holds the tensors, if `tree` is empty."""

    @staticmethod
    def of(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, Any],
        local_steps: LocalSteps | None,
        ranks: RankGroup,
    ) -> Contents:
        """References to the tensors, everything else as of now. Collective, with islands or slices."""
        assignment = _assignment(model, local_steps, ranks)
        tensors = state.model_tensors(model)
        rest: dict[str, Any] = {}
        own_states: parts.OptimizerStates = {}
        told: dict[str, Any] = {}
        settings = None
        if optimizer is not None:
            settings = state.optimizer_settings(model, optimizer)
            states, own_states = parts.optimizer_states(model, optimizer, assignment, ranks)
            rest[keys.OPTIMIZER] = {keys.STATE: states, keys.GROUPS: state.param_groups(model, optimizer)}
        if local_steps is not None:
            tensors, of_islands, progress = outer_state.tree(model, local_steps, assignment, tensors, own_states)
            rest |= of_islands
            told = {"islands": {**assignment.to_json(), **progress}}
        tree = {keys.MODEL: joined(tensors, state.places(model)), **rest}
        aliases: dict[storage.KeyPath, storage.KeyPath]
        aliases = {(keys.MODEL, alias): (keys.MODEL, name) for alias, name in state.tied_names(model).items()}
        text: str | ValueError
        try:
            text = sidecar.encode({"extra": extra, "optimizer": settings, **told})
        except ValueError as error:
            text = error
        return Contents(tree=tree, aliases=aliases, sidecar=text)


def check_keep(keep: int) -> None:
    """Raises: CheckpointError."""
    if keep < 2:
        raise CheckpointError(
            f"keep={keep} checkpoints, expected 2 or more: a damaged newest one needs an older one to fall back to"
        )


def write(folder: Path, step: int, contents: Contents, *, keep: int, ranks: RankGroup) -> Path:
    """[Note: Commit protocol], from the empty folder to the removal of the oldest one."""
    temporary = ranks.on_rank_0(lambda: commit.begin(folder, step), f"the checkpoint folder {folder} is not writable")
    reached("begun")
    storage.save(contents.tree, temporary, aliases=contents.aliases, planner=contents.planner, group=ranks.group)
    reached("shards_written")

    def write_own_files() -> list[commit.FileRecord]:
        own = sidecar.name(ranks.rank)
        if isinstance(contents.sidecar, ValueError):
            raise contents.sidecar
        sidecar.write(temporary / own, contents.sidecar)
        reached("sidecar_written")
        names = [own, *sorted(path.name for path in temporary.glob(f"__{ranks.rank}_*"))]
        names += [".metadata"] if ranks.rank == 0 else []
        return [commit.describe_file(temporary / name, name) for name in names]

    records = ranks.on_all(write_own_files, f"checkpoint {temporary} could not be written")

    def commit_all() -> Path:
        manifest = Manifest(
            step=step,
            sequence=commit.next_sequence(folder),
            world_size=ranks.size,
            versions=_versions(),
            files=tuple(record for rank_records in records for record in rank_records),
        )
        return commit.commit(folder, temporary, manifest, keep=keep)

    return ranks.on_rank_0(commit_all, f"checkpoint {temporary} could not be committed")


def _load(
    candidate: commit.Candidate,
    own: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    local_steps: LocalSteps | None,
    *,
    strict: bool,
    ranks: RankGroup,
) -> tuple[Differences, str]:
    """Fill all that is given from an intact checkpoint; returns what was not, and why islands start anew if they do."""
    assert candidate.manifest is not None
    told = own.get("islands")
    saved, ours = Assignment.saved(told), _assignment(model, local_steps, ranks)
    has_own = told is not None and local_steps is not None and saved.slice_of(ours.island) == ours.held[ours.island]
    has_same_slices = saved.has_slices_of(ours)
    source = Source(
        folder=candidate.folder,
        entries=storage.tensors_of(storage.read_metadata(candidate.folder)),
        keys=keys.OURS,
        settings=own["optimizer"],
        own=outer_state.own_optimizer(ours.island) if has_own and has_same_slices else None,
        has_same_slices=has_same_slices,
        is_uneven=local_steps is not None or bool(state.places(model)),
    )
    differences = fill(source, model, optimizer, strict=strict)
    why = outer_state.difference(saved, ours, had_islands=told is not None, has_islands=local_steps is not None)
    if local_steps is not None:
        island = None if why else ours.island
        outer_state.restore(source, model, local_steps, told, step=candidate.manifest.step, island=island)
    return differences, why


def _assignment(model: nn.Module, local_steps: LocalSteps | None, ranks: RankGroup) -> Assignment:
    if local_steps is None:
        return Assignment.of(model, ranks, island=0, islands=1)
    cluster = local_steps.cluster
    return Assignment.of(model, ranks, island=cluster.island_rank, islands=cluster.num_islands)


def _verify(folder: Path, manifest: Manifest | None, ranks: RankGroup) -> str:
    """Every rank hashes its share of the files; the verdict is common. Empty if all is well."""
    assert manifest is not None
    mine = manifest.files[ranks.rank :: ranks.size]
    return "; ".join(problem for problems in ranks.gather(commit.damage(folder, mine)) for problem in problems)


def _read_own_sidecar(folder: Path, ranks: RankGroup) -> dict[str, Any]:
    own = folder / sidecar.name(ranks.rank)
    return sidecar.read(own if own.exists() else folder / sidecar.name(0))


def _versions() -> dict[str, str]:
    try:
        laconic_version = version("laconic")
    except PackageNotFoundError:  # run from a source tree
        laconic_version = "unknown"
    return {"laconic": laconic_version, "torch": torch.__version__, "python": platform.python_version()}
