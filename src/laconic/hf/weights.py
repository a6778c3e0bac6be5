"""Reading a Hugging Face model folder into a sharded model: each rank reads its own part of every tensor, no more.

Names are matched in three ways, in this order: as they are; with the base model's prefix ("transformer.") added or
removed; and through transformers' own conversion table, which for example stacks the experts of a mixture. Only tensors
of the last kind are read whole, one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from laconic.config.job import JobError
from laconic.ragged.joined import JoinedTensor, joined
from laconic.ragged.parts import sliced_parts

_INDEX = "model.safetensors.index.json"
_MAX_LISTED = 8
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|position_ids|masked_bias)$")  # buffers that old folders store


class ModelFolderError(JobError):
    """A model folder is unreadable or does not fit its own config.json."""


def parts(tensor: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The pieces of `tensor` this rank holds: a view to fill, and where it lies in the global tensor.

    One code for RaggedTensor, JoinedTensor, DTensor and plain tensors: all but the last answer the questions of
    torch.distributed.checkpoint, whose protocol this is.
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        yield tensor, tuple(slice(0, size) for size in tensor.shape)
        return
    for chunk in tensor.__create_chunk_list__():
        if 0 not in chunk.sizes:
            view = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))  # type: ignore[attr-defined]
            where = zip(chunk.offsets, chunk.sizes, strict=True)
            yield view, tuple(slice(offset, offset + size) for offset, size in where)


@torch.no_grad()
def write_whole(tensor: Tensor, whole: Tensor) -> None:
    """Keep this rank's part of `whole`, a plain tensor of the global shape."""
    for view, where in parts(tensor):
        view.copy_(whole[where] if where else whole)


class ModelFolder:
    """The safetensors files of a folder, opened when first needed. `bytes_read` counts what was asked of them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        self._handles: dict[str, Any] = {}
        if not self.folder.is_dir():
            raise ModelFolderError(
                f"model.path = {str(folder)!r} is not a folder; give a local folder with config.json"
            )
        if not (self.folder / "config.json").is_file():
            raise ModelFolderError(
                f"model.path = {str(folder)!r} has no config.json; is it a Hugging Face model folder?"
            )
        self._file_of = self._find_files()

    def keys(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def read(self, key: str, where: tuple[slice, ...] | None = None) -> Tensor:
        """The part of a tensor that `where` names, in the dtype of the file."""
        try:
            part = self._slice(key)[where] if where else self._handle(self._file_of[key]).get_tensor(key)
        except Exception as error:
            raise ModelFolderError(f"cannot read {key} from {self.folder / self._file_of[key]}: {error}") from error
        self.bytes_read += part.nbytes
        return part

    def _slice(self, key: str) -> Any:
        return self._handle(self._file_of[key]).get_slice(key)

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            from safetensors import safe_open

            try:
                self._handles[name] = safe_open(self.folder / name, framework="pt")
            except Exception as error:  # safetensors raises its own class, OSError and FileNotFoundError
                raise ModelFolderError(f"{self.folder / name} is not a readable safetensors file: {error}") from error
        return self._handles[name]

    def _find_files(self) -> dict[str, str]:
        index = self.folder / _INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ModelFolderError(f"{index} is not a readable index of safetensors files: {error!r}") from error
        files = sorted(path.name for path in self.folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
        if not files:
            others = sorted(path.name for path in self.folder.glob("*.bin"))
            remedy = (
                f"it has {', '.join(others)}, pickled files that laconic does not open: load it once with "
                "transformers and save_pretrained it"
                if others
                else "download the model with its .safetensors files"
            )
            raise ModelFolderError(f"model.path = {str(self.folder)!r} has no safetensors file; {remedy}")
        return {key: name for name in files for key in self._handle(name).keys()}  # noqa: SIM118


@dataclass
class _Plan:
    direct: dict[str, str] = field(default_factory=dict)
    """Tensor of the model -> tensor of the folder."""
    converters: dict[str, Any] = field(default_factory=dict)
    """First tensor made -> transformers' converter, filled with readers of its sources."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@torch.no_grad()
def load_folder(model: Any, folder: ModelFolder) -> set[int]:
    """Fill this rank's part of every parameter and persistent buffer of a transformers model.

    Returns the ids of the tensors filled (of a sliced one, of its parts): all, but for those that transformers lets a
    folder leave out.
    Raises: ModelFolderError, before anything is read, listing every missing, unexpected and wrongly shaped tensor.
    """
    wanted = _tensors(model)
    plan = _match(model, wanted, folder)
    _refuse_mismatch(wanted, plan, folder)
    for name, key in plan.direct.items():
        tensor = wanted[name]
        for view, where in parts(tensor):
            view.copy_(folder.read(key, where))
    for name, converter in plan.converters.items():
        made = converter.convert(name, model=model, config=model.config)
        for target, value in made.items():
            whole = value[0] if isinstance(value, list) else value
            if target not in wanted or tuple(whole.shape) != tuple(wanted[target].shape):
                raise ModelFolderError(
                    f"{folder.folder}: its tensors for {target} do not make the shape its config.json asks for"
                )
            write_whole(wanted[target], whole)
    filled = [wanted[name] for name in (*plan.direct, *_made_by(plan, wanted))]
    return {id(part) for tensor in filled for part in (tensor.parts if isinstance(tensor, JoinedTensor) else [tensor])}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Everything a folder must provide, tied tensors under each of their names, sliced ones as wholes."""
    tensors = joined(dict(model.named_parameters(remove_duplicate=False)), sliced_parts(model))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def _match(model: Any, wanted: Mapping[str, Tensor], folder: ModelFolder) -> _Plan:
    plan = _Plan()
    prefix = getattr(model, "base_model_prefix", "")
    leftover = []
    for key in folder.keys():  # noqa: SIM118
        names = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
        name = next((name for name in names if name in wanted), None)
        if name is None or name in plan.direct:
            leftover.append(key)
        else:
            plan.direct[name] = key
    leftover = _convert(model, wanted, folder, leftover, plan)
    found = {id(wanted[name]) for name in (*plan.direct, *_made_by(plan, wanted))}
    optional = _pattern(model, "_keys_to_ignore_on_load_missing")
    plan.missing = [name for name in wanted if id(wanted[name]) not in found and not optional.search(name)]
    ignored = _pattern(model, "_keys_to_ignore_on_load_unexpected")
    buffers = {name for name, _ in model.named_buffers()}
    plan.unexpected = [
        key
        for key in leftover
        if not ignored.search(key) and not _COMPUTED.search(key) and not {key, f"{prefix}.{key}"} & buffers
    ]
    return plan


def _convert(model: Any, wanted: Mapping[str, Tensor], folder: ModelFolder, keys: list[str], plan: _Plan) -> list[str]:
    """Let transformers' conversion table claim `keys`; returns those it does not know."""
    try:  # internals of transformers 5; without them such a folder is refused as mismatching
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return keys
    mapping = get_model_conversion_mapping(model) if keys else []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    unknown = []
    for key in sorted(keys, key=_natural):  # experts in numerical order: 2 before 10
        name, pattern = rename_source_key(
            key, renamings, converters, getattr(model, "base_model_prefix", ""), dict(wanted)
        )
        if name not in wanted or (pattern is None and name in plan.direct):
            unknown.append(key)
        elif pattern is None:
            plan.direct[name] = key
        else:
            converter = plan.converters.setdefault(name, deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, lambda key=key: folder.read(key))
    return unknown


def _made_by(plan: _Plan, wanted: Mapping[str, Tensor]) -> Iterator[str]:
    for name, converter in plan.converters.items():
        for target in converter.target_patterns:
            full = name.replace(converter.target_patterns[0], target)
            if full in wanted:
                yield full


def _refuse_mismatch(wanted: Mapping[str, Tensor], plan: _Plan, folder: ModelFolder) -> None:
    complaints = []
    if plan.missing:
        complaints.append(f"missing: {_listing(plan.missing)}")
    if plan.unexpected:
        complaints.append(f"unexpected: {_listing(plan.unexpected)}")
    misshapen = [
        f"{key} is {list(folder.shape(key))}, expected {list(wanted[name].shape)}"
        for name, key in plan.direct.items()
        if folder.shape(key) != tuple(wanted[name].shape)
    ]
    if misshapen:
        complaints.append(f"wrong shape: {_listing(misshapen)}")
    if complaints:
        raise ModelFolderError(
            f"the weights in {folder.folder} do not fit its config.json ({'; '.join(complaints)}); "
            "use the config.json that belongs to these weights"
        )


def _pattern(model: nn.Module, attribute: str) -> re.Pattern[str]:
    patterns = getattr(model, attribute, None) or ()
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def _natural(key: str) -> list[tuple[int, int | str]]:
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in key.split(".")]


def _listing(items: list[str]) -> str:
    shown = ", ".join(items[:_MAX_LISTED])
    return shown if len(items) <= _MAX_LISTED else f"{shown} and {len(items) - _MAX_LISTED} more"
