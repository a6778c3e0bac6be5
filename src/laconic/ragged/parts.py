"""Parameters that are parts of a named whole.

[Note: Parts of a whole]
A module may hold several parameters in place of one: `weight_slice0`, `weight_slice1`, ... in place of `weight`. The
module then carries a `SlicedParameter` for each such weight. `partial/` makes them. The engine, checkpoints, islands
and model loading learn of slices from the functions below and from nothing else, so none of them imports `partial`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_laconic_sliced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of a whole's cut dim, [start, start + length), and where it lies in its part."""

    start: int
    length: int
    part: int
    """The index of the part."""
    offset: int
    """Where the run begins in the cut dim of the part."""


@dataclass(frozen=True, kw_only=True)
class SlicedParameter:
    """A parameter that became several: one for each slice, and one for the rest if some of it is in no slice.

    All islands have the same parts of the same shapes, whichever of them they train.
    """

    name: str
    """The whole's name in its module."""
    shape: tuple[int, ...]
    """The whole's shape."""
    dim: int
    """The dim that is cut."""
    slices: int
    """The number of slices."""
    pieces: tuple[Piece, ...]
    """All runs of the cut dim, in the order of the whole."""
    is_factor: bool = True
    """Inputs are multiplied with the parameter; a bias, which is added, is no factor."""

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """The parts' names in the module."""
        names = [f"{self.name}_slice{index}" for index in range(self.slices)]
        has_shared = any(piece.part == self.slices for piece in self.pieces)
        return tuple(names + [f"{self.name}_shared"] * has_shared)

    @property
    def dim_from_end(self) -> int:
        """The cut dim, counted from the last dim: -1 is the last."""
        return self.dim - len(self.shape)

    def slice_of(self, part: int) -> int | None:
        """The slice that a part is; None for the part that every island trains."""
        return part if part < self.slices else None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts to the whole: a new tensor. Differentiable.

        Shapes: the parts may lack leading dims of the whole (one expert's weight), but not the cut dim.
        """
        dim = self.dim_from_end
        return torch.cat([parts[piece.part].narrow(dim, piece.offset, piece.length) for piece in self.pieces], dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Cut the whole into its parts: views where a part is one run."""
        return [self.take(whole, index, self.dim_from_end) for index in range(len(self.part_names))]

    def take(self, whole: Tensor, part: int, dim: int) -> Tensor:
        """The elements of `whole` that belong to one part, along `dim`: a view if they are one run."""
        runs = [whole.narrow(dim, piece.start, piece.length) for piece in self.pieces if piece.part == part]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def add_sliced(module: nn.Module, sliced: SlicedParameter) -> None:
    """Note that `module` holds the parts of `sliced` as parameters."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[sliced.name] = sliced


def sliced_of(module: nn.Module) -> dict[str, SlicedParameter]:
    """The sliced parameters of one module, by the whole's name in the module."""
    return module.__dict__.get(_ATTRIBUTE, {})


def walk_sliced(model: nn.Module) -> Iterator[tuple[str, nn.Module, SlicedParameter]]:
    """(the module's name in the model with a dot behind it, module, sliced parameter) of all sliced parameters."""
    for name, module in model.named_modules():
        for sliced in sliced_of(module).values():
            yield f"{name}." if name else "", module, sliced


def sliced_parameters(model: nn.Module) -> dict[str, SlicedParameter]:
    """All sliced parameters by their names in the unsliced model. The names of the parts begin with that name."""
    return {prefix + sliced.name: sliced for prefix, _, sliced in walk_sliced(model)}


def sliced_parts(model: nn.Module) -> dict[str, tuple[str, SlicedParameter, int]]:
    """For every part by its name in the model: the whole's name, the sliced parameter, and the part's index."""
    return {
        prefix + name: (prefix + sliced.name, sliced, index)
        for prefix, _, sliced in walk_sliced(model)
        for index, name in enumerate(sliced.part_names)
    }


def slice_of_parameters(model: nn.Module) -> dict[str, int | None]:
    """For every parameter of the model, the slice it is a part of; None for a parameter that all islands train."""
    slices = {name: sliced.slice_of(index) for name, (_, sliced, index) in sliced_parts(model).items()}
    return {name: slices.get(name) for name, _ in model.named_parameters()}


def slice_of_parameter(module: nn.Module, name: str) -> int | None:
    """The same for the parameter `name` of one module."""
    for sliced in sliced_of(module).values():
        if name in sliced.part_names:
            return sliced.slice_of(sliced.part_names.index(name))
    return None
