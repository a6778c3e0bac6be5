"""Save a run so that it can be resumed exactly, resume it, and read a checkpoint without the run.

See [Note: Commit protocol] in commit.py.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlanner

from laconic.checkpoint import commit, keys, sidecar, state, storage
from laconic.checkpoint.commit import CheckpointError, CheckpointManifest
from laconic.checkpoint.fill import Differences, Source, fill
from laconic.checkpoint.islands import (
    IslandSlices,
    OptimizerStates,
    local_steps_tree,
    optimizer_states,
    own_optimizer_prefix,
    restore_local_steps,
)
from laconic.checkpoint.keys import LACONIC_KEYS
from laconic.comm.agreement import RankGroup
from laconic.islands.local_steps import LocalSteps
from laconic.ragged.parts import joined
from laconic.store.files import sync, write_text
from laconic.store.folder import CrashPoint, FileRecord, damage, describe, reached


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
    """Write `folder/step-N` so that a kill at any instant leaves it or the checkpoint before. All ranks call it.

    Any program can load `step-N` with torch.distributed.checkpoint. It has the keys of `{"model":
    get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}`. Partial updates are written unsliced.
    With `local_steps` the model has the outer parameters: [Note: The layout of a checkpoint] in checkpoint/islands.py.

    All ranks share the file system of `folder`. The `keep` newest checkpoints remain in it, two or more, in case one is
    damaged. `extra` has this rank's own values, for `load_checkpoint` to return: dicts with string keys, lists,
    strings, numbers and small tensors, such as `rng_state()`. Returns the checkpoint's folder. See also `AsyncSaver`.

    Cost: each rank writes its shards and its share of replicated tensors. Only names, sizes and hashes cross the wire.

    Raises:
        CheckpointError: a rank cannot write, or `keep` is less than 2. Every rank raises it; earlier checkpoints stay.
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
    """Load the newest intact checkpoint of `folder`, or the checkpoint that `folder` itself is. All ranks call it.

    The run that saved may have had another number of ranks and another strategy. A damaged checkpoint is skipped with
    a warning. A run with as many islands and the same slices goes on to the same bits. In another run, islands start
    from the outer parameters and the outer optimizer's state, with the inner optimizer state that fits their slices; a
    fragment in flight is dropped. The model must have memory; the optimizer may be new; `local_steps` wraps the
    optimizer. Without `strict`, the tensors that fit are loaded and the others stay as they are, with a warning.

    Returns:
        None if there is no checkpoint. Otherwise this rank's `extra` (rank 0's, if fewer ranks saved), and the key
        `step`. Without `strict` there is `skipped`, a `Differences`. If islands start from the outer parameters there
        is `islands`, the reason as text.

    Raises:
        CheckpointError: no checkpoint is intact; or, with `strict`, the checkpoint belongs to another model or
            optimizer: the message names every tensor that differs; or its islands slice other layers into as many
            slices.
    """
    found = load_newest(folder, model=model, optimizer=optimizer, strict=strict, local_steps=local_steps)
    return None if found is None else found[1]


def load_newest(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool = True,
    local_steps: LocalSteps | None = None,
) -> tuple[Path, dict[str, Any]] | None:
    """Do what `load_checkpoint` does. Returns the folder of the checkpoint that was loaded too."""
    ranks = RankGroup(error=CheckpointError)
    folder = Path(folder)

    def listed() -> list[Any]:
        return [[str(c.folder), c.manifest and c.manifest.to_json(), c.problem] for c in commit.candidates(folder)]

    found = [
        commit.Candidate(folder=Path(path), manifest=body and CheckpointManifest.from_json(body), problem=problem)
        for path, body, problem in ranks.on_rank_0(listed, f"the checkpoint folder {folder} is not readable")
    ]

    def load(candidate: Path, manifest: CheckpointManifest) -> tuple[Path, dict[str, Any]]:
        own = sidecar.read(candidate, ranks.rank if ranks.rank < manifest.world_size else 0)
        progress = own.get("islands")
        saved, islands = IslandSlices.saved(progress), IslandSlices.of(model, local_steps, ranks)
        if strict and progress is not None:
            islands.refuse_other_layers(saved)
        source = Source(
            folder=candidate,
            entries=storage.entries_of(storage.read_metadata(candidate)),
            keys=keys.LACONIC_KEYS,
            settings=own["optimizer"],
            own_prefix=own_optimizer_prefix(islands.island) if islands.has_own_state_in(saved) else None,
            has_same_slices=islands.has_slices_of(saved),
        )
        differences = fill(source, model, optimizer, strict=strict)
        why = islands.difference(saved)
        if local_steps is not None:
            island = None if why else islands.island
            restore_local_steps(source, model, local_steps, progress, step=manifest.step, island=island)
        skipped = {} if strict else {"skipped": _with_warning(differences, candidate, ranks, stacklevel=6)}
        why_islands = {"islands": why} if why else {}
        return candidate, {"step": manifest.step, **own["extra"], **skipped, **why_islands}

    find_damage = partial(damage_in_shares, ranks)
    return commit.use_newest(folder, found, load, find_damage=find_damage, warns=ranks.rank == 0, stacklevel=4)


def damage_in_shares(ranks: RankGroup, folder: Path, records: Sequence[FileRecord]) -> list[str]:
    """See `store.folder.damage`. Collective: each rank reads a part of the files."""
    own = damage(folder, records[ranks.rank :: ranks.size])
    return [problem for problems in ranks.gather(own) for problem in problems]


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

    All ranks call it, and any number of ranks may load. It understands the usual layouts: a model's state dict at the
    top or under any keys, and an optimizer's as `get_optimizer_state_dict` gives it, flattened or not. Unlike torch's
    own loader it runs no code from the folder, and no step of the optimizer. Such a folder has no hashes, so a flipped
    bit goes unnoticed. Other values, such as the step, are not read. Without `strict`, the tensors that fit are loaded
    and the others stay as they are, with a warning. If several keys fit, such as a model and its moving average,
    `model_key` and `optimizer_key` choose one: "app.model", or "" for the top. Returns all that was not loaded.

    Raises:
        CheckpointError: `folder` is damaged or no DCP folder; several keys fit; or, with `strict`, anything differs:
            the message names every tensor.
    """
    folder, ranks = Path(folder), RankGroup(error=CheckpointError)

    def read() -> Source:
        metadata = storage.read_metadata(folder)
        places = state.places(model)
        found = keys.Keys.found_in(
            metadata.state_dict_metadata,
            tensors=joined(state.model_tensors(model), places),
            parameters=joined(state.named_parameters(model), places),
            model=model_key,
            optimizer=optimizer_key,
            with_optimizer=optimizer is not None,
        )
        settings = keys.torch_settings(folder, metadata, found, model, optimizer) if optimizer is not None else None
        return Source(folder=folder, entries=storage.entries_of(metadata), keys=found, settings=settings)

    source: list[Source] = []  # a list, because `on_all` would gather a result, and this one is large
    ranks.on_all(lambda: source.append(read()), f"{folder} could not be read")
    return _with_warning(fill(source[0], model, optimizer, strict=strict), folder, ranks)


def _with_warning(differences: Differences, folder: Path, ranks: RankGroup, *, stacklevel: int = 3) -> Differences:
    """Warn of differences on rank 0, and return them. `stacklevel` leads to the caller of the public function."""
    if differences and ranks.rank == 0:
        warnings.warn(f"{folder} does not fit, and only what fits was loaded ({differences})", stacklevel=stacklevel)
    return differences


# -- shared with asynchronous saves ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contents:
    """One rank's part of a checkpoint."""

    tree: dict[str, Any]
    """Tensors and hyper-parameters, nested as PyTorch nests them."""
    aliases: dict[storage.KeyPath, storage.KeyPath]
    """The first key of each tied parameter by its further keys."""
    sidecar: str | ValueError
    """This rank's JSON; or the error of its encoding, which `write` then raises on all ranks."""
    planner: SavePlanner | None = None
    """The planner that holds copies of the tensors, if `tree` is empty."""

    @staticmethod
    def of(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, Any],
        local_steps: LocalSteps | None,
        ranks: RankGroup,
    ) -> Contents:
        """Collect references to the tensors, and copies of all other values. Collective with islands or slices."""
        islands = IslandSlices.of(model, local_steps, ranks)
        tensors = state.model_tensors(model)
        values: dict[str, Any] = {"extra": extra, "optimizer": None}
        rest: dict[str, Any] = {}
        own_states: OptimizerStates = {}
        if optimizer is not None:
            values["optimizer"] = state.optimizer_settings(model, optimizer)
            states, own_states = optimizer_states(model, optimizer, islands, ranks)
            rest[keys.OPTIMIZER] = {keys.STATE: states, keys.GROUPS: state.param_groups(model, optimizer)}
        if local_steps is not None:
            tensors, added, progress = local_steps_tree(model, local_steps, islands.island, tensors, own_states, ranks)
            rest |= added
            values["islands"] = {**islands.to_json(), **progress}
        text: str | ValueError
        try:
            text = sidecar.encode(values)
        except ValueError as error:
            text = error
        others = state.elsewhere(model)
        held = {name: tensor for name, tensor in tensors.items() if name not in others}
        return Contents(
            tree={keys.MODEL: joined(held, state.places(model)), **rest},
            aliases={(keys.MODEL, alias): (keys.MODEL, name) for alias, name in state.tied_names(model).items()},
            sidecar=text,
        )


def check_keep(keep: int) -> None:
    """Raise CheckpointError if `keep` is less than 2."""
    if keep < 2:
        raise CheckpointError(f"keep={keep} must be 2 or more, so that an older checkpoint replaces a damaged one")


def write(folder: Path, step: int, contents: Contents, *, keep: int, ranks: RankGroup) -> Path:
    """Write a checkpoint, by [Note: Commit protocol]. Collective; arguments and errors as in `save_checkpoint`."""
    is_unwritable = f"the checkpoint folder {folder} is not writable"
    temporary = Path(ranks.on_rank_0(lambda: str(commit.begin(folder, step)), is_unwritable))
    reached(CrashPoint.BEGUN)
    storage.save(contents.tree, temporary, aliases=contents.aliases, planner=contents.planner, group=ranks.group)
    reached(CrashPoint.WRITTEN)

    def write_own_files() -> list[dict[str, Any]]:
        own = sidecar.name(ranks.rank)
        if isinstance(contents.sidecar, ValueError):
            raise contents.sidecar
        write_text(temporary / own, contents.sidecar)
        reached(CrashPoint.WRITTEN)
        names = [own, *sorted(path.name for path in temporary.glob(f"__{ranks.rank}_*"))]
        names += [".metadata"] if ranks.rank == 0 else []
        for name in names:
            sync(temporary / name)
        reached(CrashPoint.SYNCED)
        return [asdict(describe(temporary, name)) for name in names]

    records = ranks.on_all(write_own_files, f"checkpoint {temporary} could not be written")

    def commit_all() -> str:
        manifest = CheckpointManifest(
            step=step,
            sequence=commit.next_sequence(folder),
            world_size=ranks.size,
            versions=_versions(),
            files=tuple(FileRecord(**record) for rank_records in records for record in rank_records),
        )
        return str(commit.commit(folder, temporary, manifest, keep=keep))

    return Path(ranks.on_rank_0(commit_all, f"checkpoint {temporary} could not be committed"))


def _versions() -> dict[str, str]:
    try:
        laconic_version = version("laconic")
    except PackageNotFoundError:  # run from a source tree
        laconic_version = "unknown"
    return {"laconic": laconic_version, "torch": torch.__version__, "python": platform.python_version()}


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


def _open(folder: Path, manifest: CheckpointManifest) -> StoredCheckpoint:
    entries = LACONIC_KEYS.model_entries(storage.entries_of(storage.read_metadata(folder)))
    return StoredCheckpoint(
        folder=folder,
        step=manifest.step,
        extra=sidecar.read(folder)["extra"],
        tensors={name: (entry.shape, entry.dtype) for name, entry in entries.items()},
    )
