"""Modules with sliced parameters: parts take the place of a parameter, and give it back."""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from laconic.partial.sliced import SlicedTensor
from laconic.ragged.parts import SlicedParameter, add_sliced, sliced_of


class PartialModule(nn.Module):
    """The base class that `partial_updates` adds to modules whose own parameters it slices."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the unsliced layout as well as the sliced one."""
        for sliced in sliced_of(self).values():
            whole = state_dict.get(prefix + sliced.name)
            if whole is not None and tuple(whole.shape) == sliced.shape:
                del state_dict[prefix + sliced.name]
                for name, value in zip(sliced.part_names, sliced.split(whole), strict=True):
                    state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)


def slice_parameter(module: nn.Module, sliced: SlicedParameter, slice_index: int) -> None:
    """Replace a module's parameter by its parts, of which slice `slice_index` trains. Makes it a `PartialModule`."""
    whole = module.get_parameter(sliced.name).detach()
    add_sliced(module, sliced)
    # Clones, because a view would keep the whole.
    values = [value.clone(memory_format=torch.contiguous_format) for value in sliced.split(whole)]
    parts = {
        name: nn.Parameter(value, requires_grad=sliced.slice_of(index) in (slice_index, None))
        for index, (name, value) in enumerate(zip(sliced.part_names, values, strict=True))
    }
    replace_parameters(module, {sliced.name: whole}, parts)
    base = type(module).__mro__[2] if isinstance(module, PartialModule) else type(module)
    module.__class__ = _partial_class(base, tuple(sliced_of(module)))


def parts_of(module: nn.Module, sliced: SlicedParameter) -> dict[str, nn.Parameter]:
    """The parts of a sliced parameter, by their names in the module and in order."""
    return {name: cast(nn.Parameter, module._parameters[name]) for name in sliced.part_names}


def replace_parameters(module: nn.Module, old: Mapping[str, Tensor], new: Mapping[str, nn.Parameter]) -> None:
    """Put the parameters `new` in the place of the parameters `old`, which follow one another in the module."""
    parameters: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if name not in old:
            parameters[name] = parameter
        elif not parameters.keys() & new.keys():
            parameters.update(new)
    module._parameters = parameters


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
        return SlicedTensor(tuple(parts_of(module, sliced).values()), sliced)

    return property(get)
