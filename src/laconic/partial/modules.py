"""Modules with sliced parameters: the parts replace the parameter, and the parameter can replace the parts again."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from laconic.partial.sliced import SlicedTensor
from laconic.ragged.parts import SlicedParameter, add_sliced, sliced_of


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


def slice_parameter(module: nn.Module, sliced: SlicedParameter, slice_index: int) -> None:
    """Replace a module's parameter by its parts and make the module a `PartialModule`. Slice `slice_index` trains."""
    whole = module.get_parameter(sliced.name).detach()
    add_sliced(module, sliced)
    # Clones, because a view would keep the memory of the whole.
    values = [value.clone(memory_format=torch.contiguous_format) for value in sliced.split(whole)]
    parts = {
        name: nn.Parameter(value, requires_grad=sliced.slice_of(index) in (slice_index, None))
        for index, (name, value) in enumerate(zip(sliced.part_names, values, strict=True))
    }
    replace_parameters(module, {sliced.name: whole}, parts)
    # In `__mro__` a class of `_partial_class` comes first, then PartialModule, then the module's own class.
    base = type(module).__mro__[2] if isinstance(module, PartialModule) else type(module)
    module.__class__ = _partial_class(base, tuple(sliced_of(module)))


def parts_of(module: nn.Module, sliced: SlicedParameter) -> dict[str, nn.Parameter]:
    """Return the parts of a sliced parameter by their names in the module, in the order of `part_names`."""
    return {name: cast(nn.Parameter, module._parameters[name]) for name in sliced.part_names}


def replace_parameters(module: nn.Module, old: Mapping[str, Tensor], new: Mapping[str, nn.Parameter]) -> None:
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
        return SlicedTensor(tuple(parts_of(module, sliced).values()), sliced)

    return property(get)
