"""Equal layers of a model, of which three stand for all in a trace.

[Note: Three layers for all]
A model has dozens of equal layers. A trace of the first, the second and the last tells what all of them compute and
keep: the first has another input (no gradient may flow to it, as under LoRA), the last another successor, and all in
between repeat the second. Layers are equal if their modules have the same classes, plain attributes, parameters and
buffers, up to their index, and if the model's configuration treats them alike. A test compares the repeated phases with
a trace of the whole model, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from laconic.plan.phase import Phase

_KEPT = 3
_INDEX_NAMES = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "block_idx"}


def list_of_equal(model: nn.Module, layers: Sequence[nn.Module]) -> nn.ModuleList | None:
    """The list that holds all of `layers` and nothing else, if they are equal: [Note: Three layers for all].

    None if there is none, or if there are too few layers to save anything.
    """
    if len(layers) <= _KEPT or _treats_apart(getattr(model, "config", None), len(layers)):
        return None
    found = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and list(m) == list(layers)), None)
    if found is None:
        return None
    first = _signature(layers[0])
    if any(_signature(layer) != first for layer in layers[1:]):
        return None
    parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return found if len(set(parameters)) == len(parameters) else None


@contextmanager
def only(container: nn.ModuleList, kept: Sequence[int]) -> Iterator[list[nn.Module]]:
    """Leave the modules with these places in a list, and yield them."""
    whole, layers = container._modules, [container[place] for place in kept]
    try:
        container._modules = {str(place): layer for place, layer in enumerate(layers)}
        yield layers
    finally:
        container._modules = whole


def repeat_middle(run: Sequence[Phase], num_layers: int) -> list[Phase] | None:
    """Repeat the second of three layers, units 0 to 2 of `run`; unit 3 becomes unit `num_layers`.

    None if the layers do not run one after the other, forward and then backward.
    """
    units = [0, 1, num_layers - 1, num_layers]
    places = [(each.unit, each.is_backward, place) for place, each in enumerate(run) if each.unit < _KEPT]
    if [place[:2] for place in places] != [(0, False), (1, False), (2, False), (2, True), (1, True), (0, True)]:
        return None
    begin, end, turn, stop = (places[index][2] for index in (1, 2, 4, 5))

    def renamed(part: Sequence[Phase], middle: int = 1) -> list[Phase]:
        return [replace(each, unit=middle if each.unit == 1 else units[each.unit]) for each in part]

    middles = range(1, num_layers - 1)
    return [
        *renamed(run[:begin]),
        *(each for middle in middles for each in renamed(run[begin:end], middle)),
        *renamed(run[end:turn]),
        *(each for middle in reversed(middles) for each in renamed(run[turn:stop], middle)),
        *renamed(run[stop:]),
    ]


def _treats_apart(config: Any, num_layers: int) -> bool:
    """Whether a configuration has a list with one value for each layer, and not all are equal."""
    configs = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))] if config else []
    for each in configs:
        for value in vars(each).values():
            is_list = isinstance(value, list | tuple) and len(value) == num_layers
            if is_list and any(item != value[0] for item in value):
                return True
    return False


def _signature(layer: nn.Module) -> list[Any]:
    return [(name, type(module), _plain(module), _tensors(module)) for name, module in layer.named_modules()]


def _plain(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if name not in _INDEX_NAMES and isinstance(value, bool | int | float | str | tuple | None)
    ]


def _tensors(module: nn.Module) -> list[Any]:
    tables: list[dict[str, Tensor | None]] = [module._parameters, module._buffers]  # type: ignore[list-item]
    return [
        (name, None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))
        for table in tables
        for name, tensor in table.items()
    ]
