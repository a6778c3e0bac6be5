"""Changes of flat tensors: the places that change, and the bits there.

On a CPU, values of 16 bits go through loops of changes_numba.py, which take less time than torch's operations.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from laconic.codec.kernels import kernels_for

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_NUMEL = torch.iinfo(torch.int32).max


def bits_of(values: Tensor) -> Tensor:
    """View the bits of a flat tensor as whole numbers of the same size."""
    return values.view(_WORDS[values.element_size()])


def loops_for(*tensors: Tensor, values: Tensor | None = None) -> ModuleType | None:
    """The loops of numba, if they run for all these tensors and for published values; else None.

    They run for plain tensors on a CPU. Values have 16 bits: each further size would be compiled anew.
    """
    if values is not None and values.element_size() != 2:
        return None
    found = [kernels_for(each, "publish.changes_numba") for each in (*tensors, *([] if values is None else [values]))]
    return found[0] if None not in found else None


def take_over(held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Make bits equal to new ones, in one pass on a CPU: the places that change, ascending, and the bits before.

    Shapes: held and new (n,), of one type of whole numbers, on one device -> (c,), int32 or int64, and (c,).
    """
    loops = loops_for(held, values=new)
    if loops is not None and held.dtype == new.dtype and held.shape == new.shape and len(held) <= _MOST_NUMEL:
        changed: tuple[Tensor, Tensor] = loops.taken_over(held, new)
        return changed
    places = (held != new).nonzero().view(-1)
    before = held[places]
    held[places] = new[places]
    return places, before


@torch.no_grad()
def taken(tensor: Tensor, places: Tensor) -> Tensor:
    """The elements at places of the flattened tensor, (c,), on the host."""
    flat = tensor.detach().reshape(-1)
    if (loops := loops_for(places, values=flat)) is not None:
        found: Tensor = loops.values_at(bits_of(flat), places)
        return found.view(tensor.dtype)
    return flat[places.to(flat.device)].cpu()


@torch.no_grad()
def put(tensor: Tensor, places: Tensor, values: Tensor) -> None:
    """Write elements at places of the flattened tensor, (c,) each, bit by bit."""
    own = tensor.detach()
    if not own.is_contiguous():
        own[torch.unravel_index(places.to(own.device), own.shape)] = values.to(own.device)
    elif values.dtype == own.dtype and (loops := loops_for(places, values, values=own)) is not None:
        loops.set_values(bits_of(own.view(-1)), places, bits_of(values))
        if not own.is_inference():
            torch.autograd.graph.increment_version(own)  # numpy writes unnoticed
    else:
        bits_of(own.view(-1))[places.to(own.device)] = bits_of(values.to(own.device))
