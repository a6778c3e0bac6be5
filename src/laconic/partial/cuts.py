"""Where the tensors of a layer are cut into slices.

[Note: Slices of a layer]
A hidden unit of an MLP is one row of each matrix that computes it, with its entry of their biases, and one column of
the matrix that uses it. With S slices, slice i has the i-th of S equal runs of units. In attention the units are heads.
With grouped queries the units are the groups of heads that share keys and values. If S divides the heads but not the
groups, queries and outputs are sliced, and keys and values are shared: every slice trains them. All tensors without
such units are shared too: embeddings, norms, routers, the output layer, and the biases of layers that add to the
residual stream. Partial Parameter Updates (arXiv 2509.22418) slices across the width; the choice of tensors and the
rule for groups are our own.
"""

from dataclasses import dataclass

from laconic.ragged.parts import Piece, SlicedParameter


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The run [start, stop) of a dim. It consists of `units` units of equal width, and a unit stays in one slice."""

    start: int
    stop: int
    units: int
    may_be_shared: bool = False
    """If the slices cannot have equally many units: True lets every slice train the whole segment; False refuses it."""

    def is_shared(self, num_slices: int) -> bool:
        """True if every slice trains the whole segment."""
        return self.may_be_shared and self.units % num_slices != 0


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one tensor of a module is sliced."""

    parameter: str
    """The tensor's name in the module; dots lead to submodules."""
    dim: int
    """The dim of the tensor that is cut."""
    segments: tuple[Segment, ...]
    """All of `dim`, in order and without gaps. A tensor that fuses several matrices has a segment for each matrix."""
    is_factor: bool = True
    """True if inputs are multiplied with the tensor; False for a bias, which is added."""

    def is_shared(self, num_slices: int) -> bool:
        """True if every slice trains the whole tensor."""
        return all(segment.is_shared(num_slices) for segment in self.segments)

    def apply(self, shape: tuple[int, ...], num_slices: int) -> SlicedParameter:
        """Describe the parts of a tensor of `shape`. The parts of all slices have the same shape."""
        pieces: list[Piece] = []
        sizes = [0] * (num_slices + 1)  # each part's length so far; the last part is the shared one
        for segment in self.segments:
            parts = [num_slices] if segment.is_shared(num_slices) else range(num_slices)
            length = (segment.stop - segment.start) // len(parts)
            for index, part in enumerate(parts):
                start = segment.start + index * length
                pieces.append(Piece(start=start, length=length, part=part, offset=sizes[part]))
                sizes[part] += length
        return SlicedParameter(
            name=self.parameter,
            shape=shape,
            dim=self.dim,
            num_slices=num_slices,
            pieces=tuple(pieces),
            is_factor=self.is_factor,
        )

    def check(self, name: str, shape: tuple[int, ...], num_slices: int) -> None:
        """Raise ValueError if units, dim or segments of the cut do not fit the tensor `name` of the model."""
        for segment in self.segments:
            if segment.units % num_slices and not segment.may_be_shared:
                kind = "rows or columns" if segment.units == segment.stop - segment.start else "heads or other units"
                raise ValueError(
                    f"num_slices={num_slices} does not divide the {segment.units} {kind} of {name}; set num_slices "
                    f"(sync.slices in a job) to a divisor of {segment.units}, or leave such layers out of include "
                    "(sync.slice_include)"
                )
        if self.is_factor and self.dim < len(shape) - 2:
            raise ValueError(
                f"{name} of shape {shape} is cut along dim {self.dim}; slices go across the width of a layer, which is "
                "one of the last two dims"
            )
        ends = [0, *(segment.stop for segment in self.segments)]
        if [segment.start for segment in self.segments] != ends[:-1] or ends[-1] != shape[self.dim]:
            raise ValueError(
                f"the segments of {name} do not cover dim {self.dim} of {shape} in order: "
                f"{[(segment.start, segment.stop) for segment in self.segments]}"
            )
