"""Reads safetensors files into a model, sharded or not: each rank reads its own part of every tensor and no more.

A tensor of the folder is matched with a tensor of the model in one of three ways, tried in this order: by its name; by
its name with the base model's prefix ("transformer.") added or removed; by transformers' own conversion table, which
stacks the experts of a mixture, for example. Only tensors that are converted are read whole, one at a time. A weight
that rests in few bits is encoded while it is read: each rank reads the rows of the blocks whose codes or scales it has.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from laconic.checkpoint.state import persistent_buffers, reshard, strip
from laconic.errors import listing
from laconic.hf.folder import ModelFolder, ModelFolderError
from laconic.layers.linear import QuantizedLinear
from laconic.ragged.parts import JoinedTensor, joined, sliced_parts, whole_parameters

_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|position_ids|masked_bias)$")  # buffers that old folders store


def held_parts(tensor: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield each piece of `tensor` that this rank holds: a view to fill, and its place in the global tensor.

    RaggedTensor, JoinedTensor and DTensor list their pieces by DCP's protocol. A plain tensor is one piece.
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        yield tensor, tuple(slice(0, size) for size in tensor.shape)
        return
    for chunk in tensor.__create_chunk_list__():
        if 0 not in chunk.sizes:
            view = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))  # type: ignore[attr-defined]
            place = zip(chunk.offsets, chunk.sizes, strict=True)
            yield view, tuple(slice(offset, offset + size) for offset, size in place)


@dataclass(frozen=True, eq=False)
class EncodedWeight:
    """The weight of a `QuantizedLinear` as a loader sees it: with the shape and the dtype before it was encoded."""

    layer: QuantizedLinear

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return torch.Size((self.layer.out_features, self.layer.in_features))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded weight."""
        return self.layer.dtype

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The parameters that hold codes and scales."""
        return self.layer.weight_codes, self.layer.weight_scales

    def fill(self, read_rows: Callable[[slice], Tensor]) -> None:
        """Encode the blocks of which this rank holds codes or scales, from the rows that `read_rows` returns."""
        (rows, columns), codec = self.shape, self.layer.codec
        for index, (part, block_bytes) in enumerate(zip(self.parts, (codec.code_bytes(codec.block), 2), strict=True)):
            for view, (place,) in held_parts(part):
                first, stop = place.start // block_bytes, -(-place.stop // block_bytes)
                begin, end = first * codec.block, min(stop * codec.block, rows * columns)
                top, bottom = begin // columns, -(-end // columns)
                values = read_rows(slice(top, bottom)).to(self.dtype).reshape(-1)
                encoded = self.layer.encode(values[begin - top * columns : end - top * columns])[index]
                view.copy_(encoded[place.start - first * block_bytes : place.stop - first * block_bytes])


Whole = Tensor | EncodedWeight
"""A tensor of the model as a folder or an initialisation knows it."""


def whole_tensors(module: nn.Module) -> dict[str, Whole]:
    """The parameters that a module itself has, as transformers knows them: unsliced, and not encoded."""
    tensors: dict[str, Whole] = dict(whole_parameters(module))
    if isinstance(module, QuantizedLinear) and "weight_codes" in tensors:
        del tensors["weight_codes"], tensors["weight_scales"]
        tensors["weight"] = EncodedWeight(module)
    return tensors


@torch.no_grad()
def write_whole(tensor: Whole, whole: Tensor) -> None:
    """Copy this rank's part of `whole`, a plain tensor of the global shape, into `tensor`."""
    if isinstance(tensor, EncodedWeight):
        tensor.fill(lambda rows: whole[rows])
        return
    for view, place in held_parts(tensor):
        view.copy_(whole[place] if place else whole)


def is_held(tensor: Whole) -> bool:
    """Whether this rank holds a part of a tensor: one that another pipeline stage has alone is on the meta device."""
    return not any(part.is_meta for part in (tensor.parts if isinstance(tensor, EncodedWeight) else [tensor]))


def parameter_ids(tensor: Whole) -> set[int]:
    """Return the id of a parameter, or the ids of the parts of a sliced or encoded one."""
    return {id(part) for part in (tensor.parts if isinstance(tensor, JoinedTensor | EncodedWeight) else [tensor])}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a folder must have: tied tensors under all their names, sliced tensors whole.

    They are parameters and persistent buffers. Names lack the names of wrappers. Reshards gathered units.
    """
    reshard(model)
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    tensors = joined(dict(plain.named_parameters(remove_duplicate=False)), sliced_parts(plain))
    return {strip(name): tensor for name, tensor in (*tensors.items(), *persistent_buffers(plain))}


def wanted_tensors(model: nn.Module) -> dict[str, Whole]:
    """Return `named_tensors` as a folder of the plain model knows them: quantised weights are not encoded."""
    wanted: dict[str, Whole] = dict(named_tensors(model))
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            del wanted[strip(f"{name}.weight_codes")], wanted[strip(f"{name}.weight_scales")]
            wanted[strip(f"{name}.weight")] = EncodedWeight(layer)
    return wanted


@torch.no_grad()
def load_folder(model: Any, folder: ModelFolder, wanted: Mapping[str, Whole] | None = None) -> set[int]:
    """Fill this rank's part of every tensor in `wanted` (default: `wanted_tensors`).

    Returns the ids of the filled tensors, and of the filled parts of sliced tensors. A folder may leave out tensors
    that transformers declares optional.

    Raises:
        ModelFolderError: tensors are missing, unexpected or of a wrong shape. It lists all, and nothing is read yet.
    """
    wanted = wanted_tensors(model) if wanted is None else wanted
    plan = _match(model, wanted, folder)
    _refuse_mismatch(wanted, plan, folder)
    for name, key in plan.direct.items():
        tensor = wanted[name]
        if not is_held(tensor):
            continue
        if isinstance(tensor, EncodedWeight):
            tensor.fill(lambda rows, key=key: folder.read(key, (rows, slice(None))))  # type: ignore[misc]
            continue
        for view, place in held_parts(tensor):
            view.copy_(folder.read(key, place))
    for name, converter in plan.converters.items():
        if not any(is_held(wanted[target]) for target in _targets(name, converter, wanted)):
            continue
        for target, value in converter.convert(name, model=model, config=model.config).items():
            whole = value[0] if isinstance(value, list) else value
            if target not in wanted or tuple(whole.shape) != tuple(wanted[target].shape):
                raise ModelFolderError(
                    f"{folder.folder}: its tensors for {target} do not make the shape its config.json asks for"
                )
            if is_held(wanted[target]):
                write_whole(wanted[target], whole)
    filled = (wanted[name] for name in (*plan.direct, *_converted(plan, wanted)))
    return set().union(*map(parameter_ids, filled))


@dataclass
class _Plan:
    """Where the tensors of the model come from."""

    direct: dict[str, str] = field(default_factory=dict)
    """The name in the folder by the name in the model, for tensors that are read unconverted."""
    converters: dict[str, Any] = field(default_factory=dict)
    """transformers' converter, with functions that read its sources, by the first tensor that it makes."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def _match(model: Any, wanted: Mapping[str, Whole], folder: ModelFolder) -> _Plan:
    """Find a source for each tensor in `wanted`, and list the tensors that are missing or unexpected."""
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
    found = {id(wanted[name]) for name in (*plan.direct, *_converted(plan, wanted))}
    optional = _any_of(model, "_keys_to_ignore_on_load_missing")
    plan.missing = [name for name in wanted if id(wanted[name]) not in found and not optional.search(name)]
    ignored = _any_of(model, "_keys_to_ignore_on_load_unexpected")
    buffers = {name for name, _ in model.named_buffers()}
    plan.unexpected = [
        key
        for key in leftover
        if not ignored.search(key) and not _COMPUTED.search(key) and not {key, f"{prefix}.{key}"} & buffers
    ]
    return plan


def _convert(model: Any, wanted: Mapping[str, Whole], folder: ModelFolder, keys: list[str], plan: _Plan) -> list[str]:
    """Add the `keys` that transformers' conversion table knows to `plan`. Returns the keys that it does not know."""
    if not keys or not hasattr(model, "_no_split_modules"):  # all names fit, or no model of transformers
        return keys
    try:  # internals of transformers 5; without them, a folder that needs a conversion is refused as a mismatch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return keys
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    unknown = []
    for key in sorted(keys, key=_natural):  # experts in numerical order: 2 before 10
        name, pattern = rename_source_key(key, renamings, converters, prefix, dict(wanted))
        if name not in wanted or (pattern is None and name in plan.direct):
            unknown.append(key)
        elif pattern is None:
            plan.direct[name] = key
        else:
            converter = plan.converters.setdefault(name, deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, lambda key=key: folder.read(key))
    return unknown


def _converted(plan: _Plan, wanted: Mapping[str, Whole]) -> Iterator[str]:
    """Yield the names of the model's tensors that converters make."""
    for name, converter in plan.converters.items():
        yield from _targets(name, converter, wanted)


def _targets(name: str, converter: Any, wanted: Mapping[str, Whole]) -> Iterator[str]:
    """Yield the names of the model's tensors that a converter makes; `name` is the first."""
    for target in converter.target_patterns:
        full_name = name.replace(converter.target_patterns[0], target)
        if full_name in wanted:
            yield full_name


def _refuse_mismatch(wanted: Mapping[str, Whole], plan: _Plan, folder: ModelFolder) -> None:
    misshapen = [
        f"{key} is {list(folder.shape(key))}, expected {list(wanted[name].shape)}"
        for name, key in plan.direct.items()
        if folder.shape(key) != tuple(wanted[name].shape)
    ]
    complaints = {"missing": plan.missing, "unexpected": plan.unexpected, "wrong shape": misshapen}
    found = [f"{kind}: {listing(items)}" for kind, items in complaints.items() if items]
    if found:
        fitting = "its config.json" if folder.is_model else "the model"
        raise ModelFolderError(
            f"the weights in {folder.folder} do not fit {fitting} ({'; '.join(found)}); "
            f"use {fitting.replace('its', 'the')} that belongs to these weights"
        )


def _any_of(model: nn.Module, attribute: str) -> re.Pattern[str]:
    patterns = getattr(model, attribute, None) or ()
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def _natural(key: str) -> list[tuple[int, int | str]]:
    """A sort key that orders numbers between dots by their value."""
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in key.split(".")]
