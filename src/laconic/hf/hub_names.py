"""The names that a model's tensors have in the folders of the hub, where transformers holds them in another form.

transformers 5 stacks the experts of a mixture, and renames tensors, when it loads a folder; `save_pretrained` does the
reverse. Engines that serve models read the names of folders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laconic.errors import JobError, listing
from laconic.hf.saving import shown_plain


class FolderRun(NamedTuple):
    """Where a tensor of a folder lies in a tensor of the model."""

    name: str
    """The tensor of the model."""
    start: int
    """The place of its first element in the flattened tensor of the model."""
    shape: tuple[int, ...]


def runs_of_folder(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FolderRun]:
    """Return the tensors that `save_pretrained` would write, by their names in the folder.

    `shapes` are those of the model's tensors by name. transformers converts tensors without elements, and what comes
    out tells by its offset where it was taken from. A model that is not of transformers, or None, keeps its names.

    Raises:
        JobError: a tensor of the folder is no run of one tensor of the model, such as a transposed one.
    """
    runs = {name: FolderRun(name, 0, shape) for name, shape in shapes.items()}
    if model is None:
        return runs
    try:  # internals of transformers 5; earlier releases hold tensors as folders do
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return runs
    if not isinstance(model, PreTrainedModel):
        return runs
    empty = {name: torch.empty(shape, dtype=torch.uint8, device="meta") for name, shape in shapes.items()}
    with shown_plain(model), _Views():
        found: dict[str, Tensor] = revert_weight_conversion(model, dict(empty))
    name_of = {_storage(tensor): name for name, tensor in empty.items()}
    runs = {}
    for target, view in found.items():
        source = name_of.get(_storage(view))
        if source is None or not view.is_contiguous():
            raise JobError(
                f"{target} of a folder is no run of a tensor of {type(model).__name__}, which holds it in another "
                'order; use names="huggingface"'
            )
        runs[target] = FolderRun(source, int(view.storage_offset()), tuple(view.shape))
    covered = dict.fromkeys(shapes, 0)
    for run in runs.values():
        covered[run.name] += math.prod(run.shape)
    if lost := [name for name, shape in shapes.items() if covered[name] != math.prod(shape)]:
        raise JobError(f'a folder has only a part of {listing(lost)}; use names="huggingface"')
    return runs


class _Views(TorchFunctionMode):
    """Lets `contiguous()` return the view itself, so that its offset stays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
