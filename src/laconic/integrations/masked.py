"""Patches for engines that mark the elements which stay by NaN: vLLM's checkpoint patches and verl's loader.

[Note: Masked patches]
Such an engine spreads a patch over a tensor of NaN in the checkpoint's shape, and gives it to the model's own loader,
which knows names, shards and packed weights. Where NaN arrives, the old value stays. So all tensors of an update come
with indices, no new value is NaN, and none is an integer. A tensor that came whole gets the indices of all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from laconic.publish import PublishError, WeightPatch


def masked(patches: Iterable[WeightPatch], *, most_numel: int | None = None) -> Iterator[WeightPatch]:
    """Give all patches of an update indices, and flat values: [Note: Masked patches].

    All are checked before the first is yielded. `most_numel` is the largest tensor that the engine's indices reach.

    Shapes: indices (c,), int64, ascending; values (c,). Cost: 8 bytes for each element of a tensor that came whole.

    Raises:
        PublishError: a patch has integers or NaN, or is of a larger tensor.
    """
    patches = list(patches)
    for patch in patches:
        reason = unmasked(patch)
        if most_numel is not None and math.prod(patch.shape) > most_numel:
            reason = f"has more than {most_numel} elements, which the engine's indices do not reach"
        if reason:
            raise PublishError(f"{patch.name} {reason}; let a new Reader give all values, and load them whole")
    return map(_with_indices, patches)


INT32_NUMEL = 1 << 31
"""The elements that indices of int32 reach."""


def unmasked(patch: WeightPatch) -> str:
    """Why no engine that marks by NaN takes a patch; empty if it does."""
    if not patch.dtype.is_floating_point:
        return f"is {str(patch.dtype).removeprefix('torch.')}, which has no NaN to mark what stays"
    if bool(patch.values.isnan().any()):
        return "has NaN among its new values, which stands for what stays"
    return ""


def _with_indices(patch: WeightPatch) -> WeightPatch:
    indices = torch.arange(math.prod(patch.shape)) if patch.indices is None else patch.indices
    return patch._replace(indices=indices, values=patch.values.reshape(-1))
