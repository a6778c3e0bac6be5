"""The layers of a transformers model, with or without peft's adapters: the modules to shard one by one; masks."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def base_model(model: nn.Module) -> Any:
    """Return the transformers model inside peft's wrapper, or the model itself."""
    wrapped: Any = model
    return wrapped.get_base_model() if has_adapters(model) else model


def has_adapters(model: nn.Module) -> bool:
    """True if peft has wrapped the model."""
    return hasattr(model, "peft_config")


def layers_to_shard(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in forward order: the modules to give to `fully_shard` one by one.

    transformers names their classes in `_no_split_modules`. Without it they are the modules of the longest ModuleList.
    """
    base = base_model(model)
    found = layers_of_classes(base, getattr(base, "_no_split_modules", None) or ())
    if not found:
        lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
        found = list(max(lists, key=lambda modules: len(modules), default=[]))
    return [layer for layer in found if next(layer.parameters(), None) is not None]


def layers_of_classes(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return the outermost modules below `model` whose class, or a base class of theirs, has one of the names."""
    found = []
    for child in model.children():
        is_one = any(has_class(child, name) for name in names)
        found += [child] if is_one else layers_of_classes(child, names)
    return found


def has_class(module: nn.Module, name: str) -> bool:
    """True if the module's class, or a base class of it, has this name. Sharding changes the class to one below it."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


@contextmanager
def without_packed_rows(*, reads: bool = True) -> Iterator[None]:
    """Tell transformers that no row holds several documents, which it otherwise reads out of the elements of positions.

    Without elements it assumes several, and builds a mask of (rows, tokens, tokens) that most jobs do not have. Tensors
    on meta have no elements that it might read: then `reads` is False.
    """
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is None:  # older releases of transformers build no such mask
        yield
        return

    def find_none(*args: Any, **kwargs: Any) -> None:
        if reads:
            find(*args, **kwargs)  # what it computes takes time

    masking_utils.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
