"""Partial parameter updates: an island trains its slice of every MLP, and all other tensors; of attention, if asked.

Forward and the gradients of inputs are those of the whole model, to the bit. Frozen slices have no gradient, no
optimizer state and no stored input. That saves at most a third of a layer's FLOPs, and most of its optimizer state.
Source: Partial Parameter Updates, arXiv 2509.22418. Which tensors are sliced, and where: [Note: Slices of a layer] in
partial/patterns.py. Reference: tests/reference/partial.py.

[Note: Slices are parameters]
A sliced parameter becomes one parameter for each slice (`weight_slice0`, ...). A matrix that fuses queries, keys and
values, whose keys are shared, has `weight_shared` too. Only the parts that the island trains require a gradient. So
code for parameters works without knowing of slices: optimizers step, decay and keep state for trained parts, clipping
and norms see trained parts only, and the engine puts the frozen parts into frozen buckets. On every island the
parameters have the same names, shapes and meaning. So each parameter is averaged over the islands that train it, and an
island can change its slice without moving any data.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.partial.patterns import SLICED_BY_DEFAULT, Cut, Kind, LayerPattern, find_cuts
from laconic.partial.sliced import SlicedTensor
from laconic.ragged.conversion import converts
from laconic.ragged.parts import SlicedParameter, add_sliced, sliced_of, sliced_parameters, sliced_parts, walk_sliced
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.sharded_module import reshard_all


def partial_updates(
    model: nn.Module,
    *,
    slice_index: int,
    num_slices: int,
    include: Collection[Kind] = SLICED_BY_DEFAULT,
    patterns: Sequence[LayerPattern] | None = None,
) -> nn.Module:
    """Make `model` train only one slice of its MLPs, and of other layers in `include`, in place, and return it.

    Call it before `fully_shard` and before making the optimizer. With one slice the model stays as it is.

    Args:
        model: a transformers model like Llama, Mistral, Qwen, GPT-2, GPT-NeoX, OPT or Phi, with experts or without, or
            a model whose layers `patterns` declare.
        slice_index: the slice to train, from 0. A slice that no island trains never changes.
        num_slices: 2 to 8. Quality falls with many slices, because each learns from 1 / num_slices of the tokens.
        include: the kinds of layers to slice: "mlp", "attention" or both. MLPs alone are what the paper's reviews name.
            Heads save half as much again, at several times the price in quality (docs/local-steps.md).
        patterns: the user's own layers, tried before the known ones; `sliced_layer` declares a class of modules.

    Raises:
        ValueError: `num_slices` does not divide the hidden units or heads; the model has no layer of a kind in
            `include`, has LoRA adapters, or is sliced or sharded already; or a tensor to slice is tied to another, or
            is a DTensor.
    """
    if num_slices < 1 or not 0 <= slice_index < num_slices:
        raise ValueError(
            f"slice_index={slice_index} and num_slices={num_slices}: num_slices must be positive, and slice_index 0 to "
            "num_slices - 1"
        )
    if unknown := set(include) - set(get_args(Kind)):
        raise ValueError(f"include has {', '.join(sorted(map(repr, unknown)))}; it takes 'mlp' and 'attention'")
    if not include:
        raise ValueError("include is empty, so nothing would be sliced; leave partial_updates out instead")
    if sliced_parameters(model):
        raise ValueError("the model is sliced already; assign_slice gives it another of its slices")
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise ValueError(
            "the model has LoRA adapters: only they train, and they are too small to slice. Leave partial_updates out"
        )
    cuts = find_cuts(model, include, patterns or ())
    wholes = _checked_parameters(model, cuts, num_slices)
    for name, (module, cut) in cuts.items():
        if num_slices > 1 and wholes[name].requires_grad and not cut.is_shared(num_slices):
            _slice_parameter(module, cut.apply(tuple(wholes[name].shape), num_slices), slice_index)
    return model


def assign_slice(model: nn.Module, *, slice_index: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Train another slice of `model`, which may be sharded, from now on. No values move.

    `optimizer` must have all of `model.parameters()`, the frozen ones too. It loses its state for the slice that the
    model has trained so far, and keeps all other state.

    Raises:
        ValueError: the model is not sliced, or has no such slice.
    """
    reshard_all(model)
    slices = list(walk_sliced(model))
    if not slices:
        raise ValueError("the model is not sliced; call partial_updates on it first")
    for _, module, sliced in slices:
        if not 0 <= slice_index < sliced.num_slices:
            raise ValueError(f"slice_index={slice_index} must be 0 to {sliced.num_slices - 1}")
        for index, part in enumerate(_parts_of(module, sliced).values()):
            part.requires_grad_(sliced.slice_of(index) in (slice_index, None))
            if not part.requires_grad:
                part.grad = None
                if optimizer is not None:
                    optimizer.state.pop(part, None)


@torch.no_grad()
def unsliced_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return `model.state_dict()` as plain tensors, with the names and shapes of the unsliced model.

    `load_state_dict` loads it into a model with any slices or none. Cost: collective if the model is sharded; then
    every rank gets all tensors, in host memory. Tensors neither sliced nor sharded share the model's memory.
    """
    state, parts = model.state_dict(), sliced_parts(model)
    unsliced_state: dict[str, Tensor] = {}
    for name, value in state.items():
        whole_name, sliced, index = parts.get(name, (name, None, 0))
        if sliced is None:
            unsliced_state[name] = _whole(value)
        elif index == 0:
            prefix = whole_name.removesuffix(sliced.name)
            unsliced_state[whole_name] = sliced.join([_whole(state[prefix + part]) for part in sliced.part_names])
    return unsliced_state


@contextlib.contextmanager
def unsliced(module: nn.Module) -> Iterator[None]:
    """Make every sliced parameter below `module` one parameter again inside the `with` block, under its own name.

    Use it for code that finds parameters by name or writes them in place: initialisation, `save_pretrained`, other
    libraries. The parts keep values written inside. Do not train inside. Cost: collective if the model is sharded; then
    all sliced parameters below `module` are gathered in host memory at once. To save memory, take a layer at a time.
    """
    reshard_all(module)
    shown = []
    with torch.no_grad():
        for _, child, sliced in list(walk_sliced(module)):
            parts = _parts_of(child, sliced)
            whole = nn.Parameter(sliced.join([_whole(part) for part in parts.values()]), requires_grad=False)
            _replace_parameters(child, parts, {sliced.name: whole})
            shown.append((child, sliced, parts))
    try:
        yield
    finally:
        with torch.no_grad():
            for child, sliced, parts in shown:
                whole = child.get_parameter(sliced.name)
                _replace_parameters(child, {sliced.name: whole}, parts)
                for part, value in zip(parts.values(), sliced.split(whole), strict=True):
                    part.copy_(value)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().cpu() if isinstance(tensor, RaggedTensor) else tensor.detach()


def _checked_parameters(
    model: nn.Module, cuts: dict[str, tuple[nn.Module, Cut]], num_slices: int
) -> dict[str, nn.Parameter]:
    """Return the parameters to slice by name. Raise ValueError if one of them cannot be sliced."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    checked: dict[str, nn.Parameter] = {}
    for name, (module, cut) in cuts.items():
        whole = module._parameters.get(cut.parameter)
        if whole is None:
            raise ValueError(f"a pattern names {name}, which is no parameter; is the layer parametrised, or quantised?")
        if isinstance(whole, RaggedTensor):
            raise ValueError(f"{name} is sharded already; call partial_updates before fully_shard")
        if isinstance(whole, DTensor):
            raise ValueError(
                f"{name} is a DTensor, in parts already; partial updates slice whole tensors only. Leave out "
                "partial_updates, or the parallelism that has cut the tensor"
            )
        if converts(whole):
            raise ValueError(
                f"{name} is a {type(whole.data).__name__}, which is gathered in another form, and its slices would be "
                "plain: leave it out of convert_to_scaled_training (module_filter_fn) or of partial_updates (include)"
            )
        if len(names[id(whole)]) > 1:
            raise ValueError(f"{' and '.join(names[id(whole)])} are tied; a sliced parameter must have one place")
        cut.check(name, tuple(whole.shape), num_slices)
        checked[name] = whole
    return checked


# -- modules whose parameters are in parts -----------------------------------------------------------------------------


class PartialModule(nn.Module):
    """The base class that `partial_updates` adds to modules whose own parameters it slices."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state dict that has the sliced parameters whole, or in parts."""
        for sliced in sliced_of(self).values():
            whole = state_dict.get(prefix + sliced.name)
            if whole is not None and tuple(whole.shape) == sliced.shape:
                del state_dict[prefix + sliced.name]
                for name, value in zip(sliced.part_names, sliced.split(whole), strict=True):
                    state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)


def _slice_parameter(module: nn.Module, sliced: SlicedParameter, slice_index: int) -> None:
    """Replace a module's parameter by its parts and make the module a `PartialModule`. Slice `slice_index` trains."""
    whole = module.get_parameter(sliced.name).detach()
    add_sliced(module, sliced)
    # Clones, because a view would keep the memory of the whole.
    values = [value.clone(memory_format=torch.contiguous_format) for value in sliced.split(whole)]
    parts = {
        name: nn.Parameter(value, requires_grad=sliced.slice_of(index) in (slice_index, None))
        for index, (name, value) in enumerate(zip(sliced.part_names, values, strict=True))
    }
    _replace_parameters(module, {sliced.name: whole}, parts)
    # In `__mro__` a class of `_partial_class` comes first, then PartialModule, then the module's own class.
    base = type(module).__mro__[2] if isinstance(module, PartialModule) else type(module)
    module.__class__ = _partial_class(base, tuple(sliced_of(module)))


def _parts_of(module: nn.Module, sliced: SlicedParameter) -> dict[str, nn.Parameter]:
    """Return the parts of a sliced parameter by their names in the module, in the order of `part_names`."""
    return {name: cast(nn.Parameter, module._parameters[name]) for name in sliced.part_names}


def _replace_parameters(module: nn.Module, old: Mapping[str, Tensor], new: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters `old`, which are neighbours in the module's order, by the parameters `new`."""
    parameters: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if name not in old:
            parameters[name] = parameter
        elif not parameters.keys() & new.keys():
            parameters.update(new)
    module._parameters = parameters


def _partial_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    bases = PartialModule, cls
    for made in cls.__subclasses__():  # so Python forgets it with `cls`
        if made.__bases__ == bases and made.__dict__["_sliced_names"] == names:
            return made
    body: dict[str, Any] = {"_sliced_names": names, **{name: _sliced_attribute(name) for name in names}}
    # transformers recognises its own models by `__module__`, and initialises all other models differently.
    return type(f"Partial{cls.__name__}", bases, {"__module__": cls.__module__, **body})


def _sliced_attribute(name: str) -> property:
    def get(module: PartialModule) -> nn.Parameter | SlicedTensor | None:
        if name in module._parameters:  # inside `unsliced`
            return module._parameters[name]
        sliced = sliced_of(module)[name]
        return SlicedTensor(tuple(_parts_of(module, sliced).values()), sliced)

    return property(get)
