"""The parts of a checkpoint's tensors that this rank holds, by their names there, and the share that it publishes.

[Note: Who publishes an element]
A rank holds runs or boxes of each tensor: the extent of a RaggedTensor, the chunk of a DTensor, all of a plain tensor.
Others may hold the same: replicas of DDP and of islands, adapters that are whole on each rank. Holders of an equal run
of a parameter cut it evenly among themselves, so each of them compares and writes its share, and all copies of what was
published last take the memory of one model. Buffers are those of the lowest rank that holds them, since they may differ
from rank to rank. All ranks compute the division alike, from the regions that all have told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from laconic.checkpoint import state
from laconic.errors import listing
from laconic.hf.hub_names import FolderRun, runs_of_folder
from laconic.hf.layers import base_model
from laconic.hf.lora import adapted_layers, adapters_put_aside, gathered
from laconic.hf.saving import adapter_tensors, is_peft_model
from laconic.islands.local_steps import LocalSteps
from laconic.layers.linear import quantized_layers
from laconic.publish.changes import region_of
from laconic.publish.versions import Names, Place, PublishError
from laconic.ragged.parts import BoxedTensor, joined
from laconic.ragged.tensor import RaggedTensor

_LEAST_SHARE = 1 << 12
"""Replicas do not cut a run into shares of fewer elements."""

Addends = Callable[[], Iterator[Tensor]]
"""Makes whole tensors that are added to one, such as the products of its adapters, one after the other."""


# -- the tensors of a checkpoint ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The tensors of a checkpoint, as this rank holds them."""

    tensors: dict[str, Tensor]
    buffers: frozenset[str] = frozenset()
    """The names of buffers, which may differ from rank to rank."""
    addends: Mapping[str, Addends] = field(default_factory=dict)
    """The products of adapters to add to some tensors, by the tensors' names."""
    model: nn.Module | None = None
    """The model whose names those are, if folders of the hub may have others."""


def contents_of(
    model: nn.Module, names: Names, *, merges: bool = False, local_steps: LocalSteps | None = None
) -> CheckpointContents:
    """Find the parameters and persistent buffers, tied ones once, under their names in a checkpoint.

    Sliced parameters are joined. With `local_steps` the parameters are those that islands have last agreed on. A model
    of peft has its adapters only, unless `names` is "model" or it `merges`. Units are resharded; no weight is gathered,
    and the next crossings stay as they are. Collective if it `merges`.

    Raises:
        PublishError: weights rest in few bits, which no checkpoint of the model has; or there is nothing to merge.
    """
    state.show_sharded(model)
    if merges:
        return _merged(model)
    tensors = state.shown_tensors(model)
    if local_steps is not None:
        agreed = {
            state.strip(name): part
            for fragment in local_steps.fragments
            for name, part in fragment.named(fragment.flat).items()
        }
        tensors = {name: agreed[name].to(t.dtype) if name in agreed else t for name, t in tensors.items()}
    tensors = joined(tensors, state.places(model))
    if names != "model" and is_peft_model(model):
        return CheckpointContents(tensors=_adapters(model, tensors))
    if names != "model" and any(quantized_layers(model)):
        raise PublishError(
            "the model has weights in few bits, which its checkpoint would have decoded; publish the adapters of a "
            'peft model, or the codes with names="model"; and read into a dict of tensors in the published dtype'
        )
    return CheckpointContents(tensors=tensors, buffers=_buffers(model), model=model)


def _buffers(model: nn.Module) -> frozenset[str]:
    return frozenset(state.strip(name) for name, _ in state.persistent_buffers(model))


def _adapters(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all adapters, under their names in peft's files; of others than the first with their own name."""
    found: dict[str, Tensor] = {}
    for adapter in model.peft_config:
        prefix = "" if adapter == "default" else f"{adapter}/"
        own = adapter_tensors(model, tensors, adapter, save_embedding_layers=False)
        found |= {prefix + name: tensor for name, tensor in own.items()}
    return found


def _merged(model: nn.Module) -> CheckpointContents:
    """The tensors of a peft model's base model, and what its adapters add to some of them. Collective.

    Each rank makes the product of one adapter at a time, as peft merges it. Nothing is merged in the model. Products
    are made on the host, as `laconic export` makes them: a GPU rounds them otherwise, and has less room.
    Cost: host memory for both factors of all adapters on every rank, and for one product at a time.
    """
    if not is_peft_model(model):
        raise PublishError(f'{type(model).__name__} has no adapters of peft to merge; leave adapters="merged" out')
    if state.is_held_in_part(model):
        raise PublishError('each rank of a pipeline holds some adapters only; publish them alone, without "merged"')
    addends: dict[int, Addends] = {}
    for _, name, layer in adapted_layers(model):
        base = layer.get_base_layer()
        if any(quantized_layers(base)):
            raise PublishError(f"{name} has weights in few bits, and no adapter is merged into them; publish it alone")
        factors = {adapter: _factors_of(name, layer, adapter) for adapter in layer.active_adapters}
        addends[id(base.weight)] = partial(_products, layer, factors)
    with adapters_put_aside(model):
        inner = base_model(model)
        return CheckpointContents(
            tensors=joined(state.shown_tensors(inner), state.places(inner)),
            buffers=_buffers(inner),
            addends={name: addends[id(p)] for name, p in state.named_parameters(inner).items() if id(p) in addends},
            model=inner,
        )


def _factors_of(name: str, layer: Any, adapter: str) -> list[tuple[nn.Module, Tensor]]:
    """The modules of both factors of an adapter, with their whole weights."""
    is_plain = hasattr(layer, "lora_A") and adapter in layer.lora_A and adapter not in layer.lora_variant
    if not is_plain or layer.lora_bias[adapter]:
        raise PublishError(
            f"the adapter {adapter!r} of {name} is more than a product of two matrices, such as DoRA; publish adapters "
            "alone, and merge them by peft"
        )
    factors = (layer.lora_A[adapter], layer.lora_B[adapter])
    return [(module, gathered(module.weight).detach().cpu()) for module in factors]


def _products(layer: Any, factors: Mapping[str, list[tuple[nn.Module, Tensor]]]) -> Iterator[Tensor]:
    """Yield what peft adds to the weight of a layer for each of its adapters."""
    for adapter, wholes in factors.items():
        kept = [(module, module._parameters["weight"]) for module, _ in wholes]
        try:
            for module, whole in wholes:
                module._parameters["weight"] = nn.Parameter(whole, requires_grad=False)
            yield layer.get_delta_weight(adapter)
        finally:
            for module, parameter in kept:
                module._parameters["weight"] = parameter


def in_folder(contents: CheckpointContents, names: Names) -> dict[str, FolderRun]:
    """Where the tensors of a folder lie in those of a checkpoint, by their names in the folder.

    Raises:
        JobError: see `runs_of_folder`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in contents.tensors.items()}
    return runs_of_folder(contents.model if names == "hub" else None, shapes)


# -- what a rank holds of them -----------------------------------------------------------------------------------------


class HeldRegion(NamedTuple):
    """A run or a box that this rank holds of a tensor."""

    place: Place
    view: Tensor
    """Its elements, in any shape of as many."""
    addends: Addends | None = None
    """The products of adapters that are added to the elements."""

    def values(self, begin: int, end: int) -> Tensor:
        """The present elements [begin, end) of the region, in its order, flat.

        They are a view, or on the host: device memory is taken for one region at most.
        """
        is_view = self.addends is None and self.view.is_contiguous()
        values = (self.view if is_view else self.view.cpu()).reshape(-1)[begin:end]
        for addend in self.addends() if self.addends is not None else ():
            added = region_of(addend, self.place).reshape(-1)[begin:end]
            values = (values + added.cpu()).to(values.dtype)
        return values


class Share(NamedTuple):
    """The elements of one region that this rank publishes, of those that it holds."""

    region: int
    """The region's index among those that this rank holds of the tensor."""
    begin: int
    end: int
    """The elements [begin, end) of the region, in its order."""
    place: Place
    """Their place in the tensor."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The part of one tensor that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[HeldRegion, ...]
    is_buffer: bool = False

    def run(self, start: int, shape: tuple[int, ...]) -> Holding:
        """The part that this rank holds of another tensor, which is a run of the flattened one from `start`.

        Raises:
            PublishError: the rank holds a box, which no run is part of.
        """
        if (start, shape) == (0, self.shape):
            return self
        regions = []
        for region in self.regions:
            starts, sizes = region.place
            if len(starts) > 1:
                raise PublishError(
                    f"a tensor of shape {list(self.shape)} is cut by another mesh axis, and folders of the hub have it "
                    'in pieces; use names="huggingface"'
                )
            first = starts[0]
            low, high = max(first, start), min(first + sizes[0], start + math.prod(shape))
            if low < high:
                view = region.view.reshape(-1)[low - first : high - first]
                addends = region.addends and partial(_runs_of, region.addends, start, shape)
                regions.append(HeldRegion(((low - start,), (high - low,)), view, addends))
        return Holding(shape=shape, dtype=self.dtype, regions=tuple(regions), is_buffer=self.is_buffer)


def _runs_of(addends: Addends, start: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
    for addend in addends():
        yield addend.reshape(-1)[start : start + math.prod(shape)].view(shape)


@torch.no_grad()
def holding_of(tensor: Tensor, addends: Addends | None = None, *, is_buffer: bool = False) -> Holding:
    """Find what this rank holds of a tensor. It is read, not written: what crosses next does not change."""
    shape = tuple(tensor.shape)
    regions = tuple(region._replace(addends=addends) for region in _regions(tensor, shape) if region.view.numel())
    return Holding(shape=shape, dtype=tensor.dtype, regions=regions, is_buffer=is_buffer)


def _regions(tensor: Tensor, shape: tuple[int, ...]) -> Iterable[HeldRegion]:
    if isinstance(tensor, RaggedTensor) and tensor.spec.dtensor is None:
        extent = tensor.extent
        if extent is not None:
            yield HeldRegion(((extent.start,), (extent.numel,)), tensor.to_local().detach())
    elif isinstance(tensor, BoxedTensor):
        for offset, box in tensor.held_boxes():
            yield _region(shape, offset, box.detach())
    elif isinstance(tensor, DTensor):
        for chunk in tensor.__create_chunk_list__():
            view = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            yield _region(shape, tuple(chunk.offsets), view.detach())
    else:
        yield HeldRegion(((0,), (tensor.numel(),)), tensor.detach())


def _region(shape: tuple[int, ...], offset: Sequence[int], box: Tensor) -> HeldRegion:
    """A box, as a run of the flattened tensor if it is one."""
    sizes = tuple(box.shape)
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if sizes[first + 1 :] != shape[first + 1 :]:
        return HeldRegion((tuple(offset), sizes), box)
    start = 0
    for index, size in zip(offset, shape, strict=True):
        start = start * size + index
    return HeldRegion(((start,), (box.numel(),)), box)


Told = Mapping[str, Sequence[Sequence[Sequence[int]]]]
"""The places of the regions that a rank holds, by tensor, as JSON has them."""


def shares_of(told: Sequence[Told], tensors: Mapping[str, Holding], rank: int) -> dict[str, list[Share]]:
    """Divide the elements of tensors among the ranks, by what each has told: [Note: Who publishes an element].

    Returns:
        The shares of one rank, by tensor.

    Raises:
        PublishError: the ranks together do not hold each element of a tensor.
    """
    holders: dict[tuple[str, Place], list[tuple[int, int]]] = defaultdict(list)
    held: dict[str, int] = defaultdict(int)
    for index, regions in enumerate(told):
        for name, places in regions.items():
            for number, (start, sizes) in enumerate(places):
                place = tuple(start), tuple(sizes)
                held[name] += 0 if holders[name, place] else math.prod(sizes)
                holders[name, place].append((index, number))
    if gaps := [name for name, tensor in tensors.items() if held[name] != math.prod(tensor.shape)]:
        numel = math.prod(tensors[gaps[0]].shape)
        raise PublishError(
            f"the ranks together hold {held[gaps[0]]} of the {numel} elements of {listing(gaps)}; "
            "publish a model whose tensors are each whole over all ranks, cut alike on all replicas"
        )
    shares: dict[str, list[Share]] = defaultdict(list)
    for (name, place), holding in holders.items():
        numel, (start, _) = math.prod(place[1]), place
        is_cut = not tensors[name].is_buffer and len(start) == 1 and numel >= 2 * _LEAST_SHARE
        num_shares = min(len(holding), numel // _LEAST_SHARE) if is_cut else 1
        borders = [numel * index // num_shares for index in range(num_shares + 1)]
        for (holder, number), (begin, end) in zip(holding, pairwise(borders), strict=False):
            if holder == rank:
                own = ((start[0] + begin,), (end - begin,)) if is_cut else place
                shares[name].append(Share(number, begin, end, own))
    return dict(shares)
