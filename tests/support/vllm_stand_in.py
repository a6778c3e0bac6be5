"""A stand-in for the parts of vLLM and of verl that take weights, with the conditions that they state.

They are those of `model_executor/model_loader/checkpoint_weight_patch.py`, `model_executor/model_loader/reload` and
`distributed/weight_transfer`. A patch's values are flat; those of a whole tensor have as many elements as its shape.
Sparse patches are of a floating-point dtype, with indices of int32 or int64, one for each value, all different, inside
the shape, and without NaN among the values. Whole and sparse patches are not in one call. Whole patches come between
the begin and the end of a layerwise reload, and sparse ones do not.

verl's are those of `apply_delta` in `verl.workers.rollout.sglang_rollout.delta_loader` of verl 0.9.1. A flush has three
tensors by name. The checksum is `torch.hash_tensor` of the bytes of places, XOR twice that of the values. Each tensor's
run of places has four bytes a value, and is int32. Its values have the tensor's dtype.
"""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None


@dataclass
class SparseWeightPatch:
    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    """The whole model, declared once; each pass yields all of it, in that order."""

    def __init_subclass__(cls) -> None:
        if not isinstance(cls.__dict__["metadata"], functools.cached_property):
            raise TypeError("metadata is a cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


reloading: list[nn.Module] = []


def record_metadata_for_reloading(model: nn.Module) -> None:
    """As when vLLM loads a model first."""


def initialize_layerwise_reload(model: nn.Module) -> None:
    reloading.append(model)


def finalize_layerwise_reload(model: nn.Module, model_config: Any) -> None:
    reloading.remove(model)


def load_checkpoint_weight_patches(model: Any, patches: list[CheckpointWeightPatch]) -> set[str]:
    patches = list(patches)
    for patch in patches:
        _check(patch)
    if len({patch.indices is None for patch in patches}) > 1:
        raise ValueError("whole and sparse patches in one call")
    if not patches:
        return set()
    if (patches[0].indices is None) != (model in reloading):
        raise ValueError("whole patches belong into a layerwise reload, sparse ones do not")
    if patches[0].indices is None:
        model.load_weights([(patch.name, patch.values.to(patch.dtype).view(patch.shape)) for patch in patches])
    else:
        _load_masked(model, [(name, _spread(shape, indices, new)) for name, shape, _, new, indices in patches])  # type: ignore[arg-type]
    return {patch.name for patch in patches}


def _check(patch: CheckpointWeightPatch) -> None:
    numel = math.prod(patch.shape)
    if not patch.name or not isinstance(patch.dtype, torch.dtype) or patch.values.ndim != 1:
        raise ValueError("a name, a dtype and flat values")
    if patch.indices is None:
        if patch.values.numel() != numel:
            raise ValueError("all values of the tensor")
        return
    if not patch.dtype.is_floating_point or patch.indices.dtype not in (torch.int32, torch.int64):
        raise TypeError("sparse patches of a floating-point dtype, by int32 or int64")
    if patch.indices.ndim != 1 or patch.indices.numel() != patch.values.numel() or patch.values.isnan().any():
        raise ValueError("as many indices as values, and no NaN")
    if len(patch.indices.unique()) != len(patch.indices) or not ((patch.indices >= 0) & (patch.indices < numel)).all():
        raise ValueError("each index once, and inside")


def _spread(shape: tuple[int, ...], indices: Tensor, values: Tensor) -> Tensor:
    whole = torch.full((math.prod(shape),), math.nan, dtype=values.dtype)
    whole[indices.long()] = values
    return whole.view(shape)


def _load_masked(model: Any, weights: list[tuple[str, Tensor]]) -> None:
    """Give tensors to a model, in which NaN stands for what stays."""
    copy = Tensor.copy_

    def copy_what_is_new(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.shape != source.shape or not (self.is_floating_point() and source.is_floating_point()):
            raise NotImplementedError("a copy of the same shape, of floating-point numbers")
        return torch.where(source.isnan(), self, source.to(self.dtype), out=self)

    Tensor.copy_ = copy_what_is_new  # type: ignore[assignment, method-assign]
    try:
        model.load_weights(weights)
    finally:
        Tensor.copy_ = copy  # type: ignore[method-assign]


def check_sparse(patch: SparseWeightPatch) -> None:
    """The conditions of the engine `sparse_nccl`."""
    assert patch.indices.dtype == torch.int32
    assert patch.indices.ndim == patch.values.ndim == 1
    assert patch.indices.numel() == patch.values.numel()
    assert patch.full_shape is not None


def apply_delta(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Give a flush to a model as verl's loader does."""
    tensors = dict(named_tensors)
    assert tensors.keys() == {"__delta_spec__", "__positions__", "__values__"}
    spec = json.loads(bytes(tensors["__delta_spec__"].numpy().tobytes()).decode())
    places, values = tensors["__positions__"], tensors["__values__"]
    assert spec["encoding"] == "indices"
    assert spec["checksum"] == int(torch.hash_tensor(places).item()) ^ (int(torch.hash_tensor(values).item()) << 1)
    for entry in spec["params"]:
        own = values[entry["val_start"] : entry["val_end"]]
        run = places[entry["pos_start"] : entry["pos_end"]]
        assert entry["pos_width"] == 4
        assert len(run) == 4 * len(own)
        assert own.dtype == getattr(torch, entry["dtype"])
        _load_masked(model, [(entry["name"], _spread(tuple(entry["shape"]), run.view(torch.int32), own))])


def modules() -> dict[str, ModuleType]:
    """The stand-in as modules, by their names in vLLM."""
    loader, transfer = "vllm.model_executor.model_loader", "vllm.distributed.weight_transfer"
    reload = [record_metadata_for_reloading, initialize_layerwise_reload, finalize_layerwise_reload]
    contents: dict[str, list[Any]] = {
        "vllm.config": [set_current_vllm_config],
        f"{loader}.checkpoint_weight_patch": [CheckpointWeightPatch, load_checkpoint_weight_patches],
        f"{loader}.reload": reload,
        f"{transfer}.base": [WeightSource, ParamMeta],
        f"{transfer}.sparse_nccl_engine": [SparseWeightPatch],
    }
    found: dict[str, ModuleType] = {}
    for name, members in contents.items():
        for parent in [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]:
            found.setdefault(parent, ModuleType(parent))
        vars(found[name]).update({member.__name__: member for member in members})
    return found


def set_current_vllm_config(vllm_config: Any) -> Any:
    return nullcontext()
