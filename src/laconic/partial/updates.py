"""Partial parameter updates: an island trains its slice of every MLP and attention layer, and all of the rest.

Forward and the gradients of inputs are those of the whole model, to the bit. For what is frozen there is no gradient,
no optimizer state and no stored input; a third of a layer's FLOPs at most can go that way, and most of its state
(Partial Parameter Updates, arXiv 2509.22418). What a slice is: [Note: What a slice is] in partial/patterns.py.

[Note: Slices are parameters]
A sliced parameter becomes as many parameters as there are slices (`weight_slice0`, ...; fused queries, keys and values
whose keys are shared have `weight_shared` too), and only this island's requires a gradient. So whatever looks at
parameters does the right thing by itself: optimizers step, decay and keep state of what trains, clipping and norms see
it alone, and the engine puts the rest into frozen buckets. On every island the parameters are the same in name, shape
and meaning, so islands average them one by one, over the islands that train it, and giving an island another slice
moves no data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.partial.patterns import PATTERNS, Cut, Kind, LayerPattern
from laconic.partial.sliced import SlicedTensor
from laconic.ragged.parts import SlicedParameter, add_sliced, sliced_of, sliced_parameters, walk_sliced
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.api import ShardedModule


def partial_updates(
    model: nn.Module,
    *,
    slice: int,
    slices: int,
    include: Collection[Kind] = ("mlp", "attention"),
    patterns: Sequence[LayerPattern] | None = None,
) -> nn.Module:
    """Have `model` train only slice `slice` of `slices` of its MLP and attention layers, in place.

    Call it before `fully_shard` and before the optimizer is made. With one slice nothing is changed.

    Args:
        model: a transformers model like Llama, Mistral, Qwen, GPT-2, GPT-NeoX, OPT or Phi, with experts or without, or
            one whose layers are declared in `patterns`.
        slice: 0 ... slices - 1. Give islands all of them: what nobody trains does not move.
        slices: quality falls with many: a slice learns from 1 / slices of the tokens. 2 to 8.
        include: the kinds of layers to slice; MLPs alone save less and cost less quality.
        patterns: of one's own, tried before those known (`sliced_layer` declares a class of modules).

    Returns:
        `model`.

    Raises:
        ValueError: hidden units or heads cannot be dealt out to `slices`; a kind in `include` is found nowhere; the
            model is sliced or sharded already; a sliced parameter is tied to another or in parts of tensor parallelism.
    """
    _check_arguments(slice, slices, include)
    if sliced_parameters(model):
        raise ValueError("the model is sliced already; assign_slice gives it another of its slices")
    cuts = _find_cuts(model, include, (*(patterns or ()), *PATTERNS))
    for name, (_, cut) in cuts.items():
        cut.check(name, slices)
    _check_parameters(model, cuts)
    if slices == 1:
        return model
    for module, cut in cuts.values():
        parameter = module._parameters[cut.parameter]
        assert parameter is not None
        if parameter.requires_grad and len(cut.shared(slices)) < len(cut.segments):
            _slice(module, cut.applied(tuple(parameter.shape), slices), slice)
    return model


def assign_slice(model: nn.Module, *, slice: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Train slice `slice` from now on, and forget `optimizer`'s state of the one that was trained until now.

    No values move. An optimizer that was given frozen parameters too (`model.parameters()`) goes on as it is.

    Raises:
        ValueError: the model is not sliced, or has no such slice.
    """
    reshard(model)
    if not (everything := list(walk_sliced(model))):
        raise ValueError("the model is not sliced; call partial_updates on it first")
    for _, module, sliced in everything:
        if not 0 <= slice < sliced.slices:
            raise ValueError(f"slice={slice} must be 0 to {sliced.slices - 1}")
        for index, name in enumerate(sliced.part_names):
            part = module._parameters[name]
            assert part is not None
            part.requires_grad_(sliced.slice_of(index) in (slice, None))
            if not part.requires_grad:
                part.grad = None
                if optimizer is not None:
                    optimizer.state.pop(part, None)


# -- what is sliced ----------------------------------------------------------------------------------------------------


def active_mask(model: nn.Module) -> dict[str, Tensor]:
    """For every parameter of the unsliced model, which coordinates train: bool, expanded to its shape, on the host."""
    masks: dict[str, Tensor] = {}
    parts = {
        prefix + name: (prefix + sliced.name, module, sliced)
        for prefix, module, sliced in walk_sliced(model)
        for name in sliced.part_names
    }
    for name, parameter in model.named_parameters():
        if name not in parts:
            masks[name] = torch.tensor(parameter.requires_grad).expand(parameter.shape)
            continue
        whole_name, module, sliced = parts[name]
        if whole_name not in masks:
            along = torch.zeros(sliced.shape[sliced.dim], dtype=torch.bool)
            for piece in sliced.pieces:
                part = module._parameters[sliced.part_names[piece.part]]
                assert part is not None
                along[piece.start : piece.start + piece.length] = part.requires_grad
            masks[whole_name] = along.view([-1] + [1] * (-sliced.dim_from_end - 1)).expand(sliced.shape)
    return masks


# -- the unsliced layout -----------------------------------------------------------------------------------------------


@torch.no_grad()
def unsliced_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` under the names and in the shapes of the unsliced model, as plain tensors.

    Collective if the model is sharded; then every rank gets all of it, in host memory. What is not sliced and not
    sharded shares memory with the model. Load it with `load_state_dict`, into any slice or into an unsliced model.
    """
    state = model.state_dict()
    whole_of = {
        prefix + name: (prefix, sliced) for prefix, _, sliced in walk_sliced(model) for name in sliced.part_names
    }
    unsliced: dict[str, Tensor] = {}
    for name, value in state.items():
        if name not in whole_of:
            unsliced[name] = _whole(value)
            continue
        prefix, sliced = whole_of[name]
        if prefix + sliced.name not in unsliced:
            unsliced[prefix + sliced.name] = sliced.join([_whole(state[prefix + part]) for part in sliced.part_names])
    return unsliced


@contextlib.contextmanager
def unsliced(module: nn.Module) -> Iterator[None]:
    """Have every sliced parameter below `module` be one again inside the block, under its own name.

    For what goes by names or writes parameters in place: initialisation, `save_pretrained`, other libraries. What is
    written there is kept. Collective if the model is sharded; then sliced parameters are gathered in host memory, all
    at once, so take a layer at a time. Do not train inside.
    """
    reshard(module)
    everything = list(walk_sliced(module))
    parts = {id(child): dict(child._parameters) for _, child, _ in everything}
    for _, child, sliced in everything:
        _show_whole(child, sliced)
    try:
        yield
    finally:
        wholes = [child._parameters[sliced.name] for _, child, sliced in everything]
        for _, child, _ in everything:
            child._parameters = parts[id(child)]
        with torch.no_grad():
            for (_, child, sliced), whole in zip(everything, wholes, strict=True):
                assert whole is not None
                for name, value in zip(sliced.part_names, sliced.split(whole), strict=True):
                    part = child._parameters[name]
                    assert part is not None
                    part.copy_(value)


@torch.no_grad()
def _show_whole(module: nn.Module, sliced: SlicedParameter) -> None:
    """Put one parameter in its parts' place, in order."""
    shown: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if name == sliced.part_names[0]:
            values = [_whole(cast(Tensor, module._parameters[part])) for part in sliced.part_names]
            shown[sliced.name] = nn.Parameter(sliced.join(values), requires_grad=False)
        elif name not in sliced.part_names:
            shown[name] = parameter
    module._parameters = shown


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().cpu() if isinstance(tensor, RaggedTensor) else tensor.detach()


# -- modules -----------------------------------------------------------------------------------------------------------


class PartialModule(nn.Module):
    """What `partial_updates` makes of the class of a module whose own parameters it slices."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the unsliced layout as well as the sliced one."""
        for sliced in sliced_of(self).values():
            whole = state_dict.get(prefix + sliced.name)
            if whole is not None and tuple(whole.shape) == sliced.shape:
                del state_dict[prefix + sliced.name]
                for name, value in zip(sliced.part_names, sliced.split(whole), strict=True):
                    state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)


def _slice(module: nn.Module, sliced: SlicedParameter, slice: int) -> None:
    """Replace a module's parameter by its parts, in order."""
    whole = module._parameters[sliced.name]
    assert whole is not None
    add_sliced(module, sliced)
    parts: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if name != sliced.name:
            parts[name] = parameter
            continue
        for index, (part_name, value) in enumerate(zip(sliced.part_names, sliced.split(whole.detach()), strict=True)):
            of = sliced.slice_of(index)
            value = value.clone(memory_format=torch.contiguous_format)  # a view would keep the whole
            part = nn.Parameter(value, requires_grad=of in (slice, None))
            parts[part_name] = part
    module._parameters = parts
    base = type(module).__mro__[2] if isinstance(module, PartialModule) else type(module)
    module.__class__ = _partial_class(base, tuple(sliced_of(module)))


@cache
def _partial_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    body: dict[str, Any] = {name: _sliced_attribute(name) for name in names}
    # The module's name too: transformers knows its own models by it, and initialises custom ones differently.
    return type(f"Partial{cls.__name__}", (PartialModule, cls), {"__module__": cls.__module__, **body})


def _sliced_attribute(name: str) -> property:
    def get(module: PartialModule) -> nn.Parameter | SlicedTensor | None:
        if name in module._parameters:  # inside `unsliced`
            return module._parameters[name]
        sliced = sliced_of(module)[name]
        return SlicedTensor(tuple(cast(Tensor, module._parameters[part]) for part in sliced.part_names), sliced)

    return property(get)


def reshard(model: nn.Module) -> None:
    """Let the modules show the parameters that are trained, not gathered ones."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.reshard()


# -- what can be sliced ------------------------------------------------------------------------------------------------


def _check_arguments(slice: int, slices: int, include: Collection[Kind]) -> None:
    if slices < 1 or not 0 <= slice < slices:
        raise ValueError(f"slice={slice} of slices={slices}: slices must be positive and slice 0 to slices - 1")
    if unknown := set(include) - set(get_args(Kind)):
        raise ValueError(f"include has {', '.join(sorted(map(repr, unknown)))}; it takes 'mlp' and 'attention'")
    if not include:
        raise ValueError("include is empty, so nothing would be sliced; leave partial_updates out instead")


def _find_cuts(
    model: nn.Module, include: Collection[Kind], patterns: Sequence[LayerPattern]
) -> dict[str, tuple[nn.Module, Cut]]:
    """By the tensor's name in the model: the module that holds it, and its cut by its name in that module."""
    found: dict[str, tuple[nn.Module, Cut]] = {}
    kinds: set[Kind] = set()
    for prefix, module in model.named_modules():
        for pattern in patterns:
            cuts = pattern.find(module) if pattern.kind in include else ()
            if not cuts:
                continue
            kinds.add(pattern.kind)
            for cut in cuts:
                path, _, name = cut.parameter.rpartition(".")
                full_name = ".".join(filter(None, (prefix, cut.parameter)))
                if full_name in found:
                    raise ValueError(f"two patterns slice {full_name}; give one that covers both layers")
                own = Cut(parameter=name, dim=cut.dim, segments=cut.segments, is_factor=cut.is_factor)
                found[full_name] = (module.get_submodule(path), own)
            break
    if missing := sorted(set(include) - kinds):
        raise ValueError(
            f"no {' and no '.join(missing)} layer of {type(model).__name__} is known; declare its class with "
            "patterns=[sliced_layer(...)], or leave it out of include"
        )
    return found


def _check_parameters(model: nn.Module, cuts: dict[str, tuple[nn.Module, Cut]]) -> None:
    places: dict[int, list[str]] = {}
    for name, shown in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(shown), []).append(name)
    for name, (module, cut) in cuts.items():
        parameter = module._parameters.get(cut.parameter)
        if parameter is None:
            raise ValueError(
                f"{name} is no parameter of the model (is it parametrised, or quantised?); a pattern names it"
            )
        if isinstance(parameter, RaggedTensor):
            raise ValueError(f"{name} is sharded already; call partial_updates before fully_shard")
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor, in parts already; partial updates slice whole tensors only")
        if len(places[id(parameter)]) > 1:
            raise ValueError(f"{' and '.join(places[id(parameter)])} are tied; a sliced parameter must have one place")
        if cut.is_factor and cut.dim < parameter.ndim - 2:
            raise ValueError(
                f"{name} of shape {tuple(parameter.shape)} is cut along dim {cut.dim}; slices go across the width of a "
                "layer, its last two dims"
            )
        ends = [0, *(segment.stop for segment in cut.segments)]
        if [segment.start for segment in cut.segments] != ends[:-1] or ends[-1] != parameter.shape[cut.dim]:
            raise ValueError(
                f"the segments of {name} do not cover dim {cut.dim} of {tuple(parameter.shape)} in order: "
                f"{[(segment.start, segment.stop) for segment in cut.segments]}"
            )
