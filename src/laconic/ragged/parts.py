"""Parameters that are parts of a named whole.

[Note: Parts of a whole]
A module may hold several parameters in place of one: `weight_slice0`, `weight_slice1`, ... in place of `weight`. Then
it has a `SlicedParameter` for each such weight, which `partial/` makes. The engine, checkpoints, islands and model
loading ask only the functions below about slices, so none of them imports `partial`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_laconic_sliced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of `length` indices in the cut dim, from index `start` of the whole and from index `offset` of `part`."""

    start: int
    length: int
    part: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class SlicedParameter:
    """A parameter that is cut into several: one part per slice, and a shared part if some elements are in no slice.

    `name` and `shape` describe the whole in its module, and `dim` is the dim that is cut. The parts and their shapes
    are the same on all islands, whichever slice an island trains.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    num_slices: int
    pieces: tuple[Piece, ...]
    """All runs, in the order of the whole."""
    is_factor: bool = True
    """True if inputs are multiplied with the parameter; False for a bias, which is added."""

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts in the module."""
        names = [f"{self.name}_slice{index}" for index in range(self.num_slices)]
        has_shared = any(piece.part == self.num_slices for piece in self.pieces)
        return tuple(names + [f"{self.name}_shared"] * has_shared)

    @property
    def dim_from_end(self) -> int:
        """The cut dim as a negative number: -1 is the last dim."""
        return self.dim - len(self.shape)

    def slice_of(self, part: int) -> int | None:
        """Return the slice of a part; None for the shared part, which every island trains."""
        return part if part < self.num_slices else None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts to the whole, in a new tensor. Differentiable.

        Shapes: the parts may lack leading dims of the whole (the weight of one expert), but not the cut dim.
        """
        dim = self.dim_from_end
        return torch.cat([parts[piece.part].narrow(dim, piece.offset, piece.length) for piece in self.pieces], dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Cut the whole into its parts. A part that is one run is a view."""
        return [self.take(whole, index, self.dim_from_end) for index in range(len(self.part_names))]

    def take(self, whole: Tensor, part: int, dim: int) -> Tensor:
        """Select the elements of `whole` that belong to one part, along `dim`: a view if the part is one run."""
        runs = [whole.narrow(dim, piece.start, piece.length) for piece in self.pieces if piece.part == part]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def add_sliced(module: nn.Module, sliced: SlicedParameter) -> None:
    """Register that `module` holds the parts of `sliced` as parameters."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[sliced.name] = sliced


def sliced_of(module: nn.Module) -> dict[str, SlicedParameter]:
    """Return the sliced parameters of one module by the names of the wholes in the module."""
    return module.__dict__.get(_ATTRIBUTE, {})


def walk_sliced(model: nn.Module) -> Iterator[tuple[str, nn.Module, SlicedParameter]]:
    """Yield (prefix of the names in the module, module, sliced parameter) for all sliced parameters of a model."""
    for name, module in model.named_modules():
        for sliced in sliced_of(module).values():
            yield f"{name}." if name else "", module, sliced


def sliced_parameters(model: nn.Module) -> dict[str, SlicedParameter]:
    """Return all sliced parameters by their names in the unsliced model. The names of parts begin with this name."""
    return {prefix + sliced.name: sliced for prefix, _, sliced in walk_sliced(model)}


def sliced_parts(model: nn.Module) -> dict[str, tuple[str, SlicedParameter, int]]:
    """Return (name of the whole, sliced parameter, index of the part) for every part by its name in the model."""
    return {
        prefix + name: (prefix + sliced.name, sliced, index)
        for prefix, _, sliced in walk_sliced(model)
        for index, name in enumerate(sliced.part_names)
    }


def slice_of_parameters(model: nn.Module) -> dict[str, int | None]:
    """Return the slice of every parameter of the model by name; None for a parameter that all islands train."""
    slices = {name: sliced.slice_of(index) for name, (_, sliced, index) in sliced_parts(model).items()}
    return {name: slices.get(name) for name, _ in model.named_parameters()}


def slice_of_parameter(module: nn.Module, name: str) -> int | None:
    """Return the slice of the parameter that a module has under `name`; None if all islands train it."""
    for sliced in sliced_of(module).values():
        if name in sliced.part_names:
            return sliced.slice_of(sliced.part_names.index(name))
    return None
