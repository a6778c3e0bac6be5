"""Blocks of the global tensor that share a scale, and the panels in which a rank works on its blocks.

A block belongs to the *global* tensor, so the stored numbers do not depend on how many ranks share the tensor. A rank
that holds whole blocks quantises them without any message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from laconic import _compat

_PANEL_NUMEL = 2**18
"""Elements of a panel: about 1 MiB in fp32 for each temporary."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Which elements of a tensor share a scale.

    Raises:
        ValueError: a size is below 1.
    """

    tile: int | None = 32
    """The side of a matrix's square tiles, smaller at edges. All but the last dim are rows. None cuts like a vector."""
    flat: int = 256
    """The length of a vector's runs; the last run is shorter."""

    def __post_init__(self) -> None:
        for name, value in {"tile": self.tile, "flat": self.flat}.items():
            if value is not None and value < 1:
                raise ValueError(f"Tiling.{name}={value} must be at least 1")

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """The blocks of a tensor of this shape: the global one, or that of a box that cuts no block."""
        numel = math.prod(shape)
        if self.tile is None or len(shape) < 2:
            uncut, scales_shape = max(1, min(self.flat, numel)), (-(-numel // self.flat),)
            return Grid(height=1, width=self.flat, columns=None, uncut=uncut, scales_shape=scales_shape)
        columns = shape[-1]
        down = [-(-math.prod(shape[:-1]) // self.tile)]
        if not shape[-2] % self.tile:  # no tile reaches from one matrix of a stack into the next
            down = [*shape[:-2], shape[-2] // self.tile]
        return Grid(
            height=self.tile,
            width=self.tile,
            columns=columns,
            uncut=max(1, min(columns * self.tile, numel)),
            scales_shape=(*down, -(-columns // self.tile)),
        )

    def scales_along(self, shape: tuple[int, ...]) -> list[ScalesAlong | None]:
        """How scales lie along each dim of a tensor of this global shape; None for a dim between their blocks."""
        num_scale_dims, last = len(self.grid(shape).scales_shape), len(shape) - 1
        if self.tile is None or not last:
            first = ScalesAlong(dim=0, elements=math.prod(shape[1:]), block=self.flat)
            return [first, *[None] * last]
        columns = ScalesAlong(dim=num_scale_dims - 1, elements=1, block=self.tile)
        if num_scale_dims < len(shape):  # tiles reach from one matrix into the next
            first = ScalesAlong(dim=0, elements=math.prod(shape[1:-1]), block=self.tile)
            return [first, *[None] * (last - 1), columns]
        stack = [ScalesAlong(dim=dim, elements=1, block=1) for dim in range(last - 1)]
        return [*stack, ScalesAlong(dim=last - 1, elements=1, block=self.tile), columns]


@dataclass(frozen=True, kw_only=True)
class ScalesAlong:
    """The scales along one dim of a tensor."""

    dim: int
    """The dim of the tensor of scales."""
    elements: int
    """The rows, columns or flat elements of which each index of the tensor's dim has this many."""
    block: int
    """The rows, columns or flat elements of one block."""

    @property
    def unit(self) -> int:
        """The indices of the tensor's dim after which a block ends together with an index."""
        return self.block // math.gcd(self.block, self.elements)

    def first(self, index: int) -> int:
        """The first scale of the blocks that begin at or after an index of the tensor's dim."""
        return -(-index * self.elements // self.block)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One tensor's blocks of height x width elements."""

    height: int
    width: int
    columns: int | None
    """The columns of the matrix; None for a vector, whose blocks lie side by side in one row."""
    uncut: int
    """The elements that must lie on one rank: the flat run from a block's first element to its last."""
    scales_shape: tuple[int, ...]
    """The shape of the tensor of scales, one scale per block. It has the tensor's dims, or (down, across) where tiles
    reach from one matrix of a stack into the next, or one dim for a vector's blocks."""

    @property
    def scales_per_run(self) -> int:
        """The number of scales of one uncut run."""
        return 1 if self.columns is None else self.scales_shape[-1]

    def matrix(self, local: Tensor) -> Tensor:
        """A rank's whole blocks, (numel,), as a matrix, (rows, columns), or (1, numel) for a vector; a view."""
        return local.view(1, -1) if self.columns is None else local.view(-1, self.columns)

    def matrix_of_scales(self, local: Tensor) -> Tensor:
        """A rank's flat scales as a matrix with one element per block of `matrix`; a view."""
        return local.view(1, -1) if self.columns is None else local.view(-1, self.scales_per_run)

    def panels(self, scales: Tensor, *, is_whole: bool = False) -> Iterator[Panel]:
        """Cut the matrix whose blocks have these scales into panels of whole blocks and of bounded size.

        `is_whole` makes one panel of it, for devices on which many small operations take longer.
        """
        num_down, num_across = scales.shape
        most = scales.numel() if is_whole else max(1, _PANEL_NUMEL // (self.height * self.width))
        across = max(1, min(num_across, most))
        down = max(1, most // across)
        for top in range(0, num_down, down):
            for left in range(0, num_across, across):
                yield Panel(self, slice(top, min(top + down, num_down)), slice(left, min(left + across, num_across)))


class Panel:
    """Some neighbouring blocks of a matrix: `down` x `across` of its grid."""

    def __init__(self, grid: Grid, down: slice, across: slice) -> None:
        self.scales = (down, across)  # the index of the panel's scales in the matrix of scales
        self.elements = (
            slice(down.start * grid.height, down.stop * grid.height),
            slice(across.start * grid.width, across.stop * grid.width),
        )
        """The index of the panel's elements in the matrix; it may reach beyond the edges."""
        self.shape = (down.stop - down.start, grid.height, across.stop - across.start, grid.width)
        """(blocks down, height, blocks across, width)."""

    def read(self, matrix: Tensor, fill: int = 0) -> Tensor:
        """The panel's elements in its shape; blocks at an edge are filled up with `fill`. May be a view."""
        part = matrix[self.elements]
        missing = self.shape[0] * self.shape[1] - part.shape[0], self.shape[2] * self.shape[3] - part.shape[1]
        if any(missing):
            part = functional.pad(part, (0, missing[1], 0, missing[0]), value=fill)
        return part.reshape(self.shape)

    def write(self, matrix: Tensor, values: Tensor) -> None:
        """Copy values in the panel's shape back into the matrix: the reverse of `read`."""
        part = matrix[self.elements]
        if not _compat.share_storage(part, values):  # `read` may have returned a view
            part.copy_(values.reshape(self.shape[0] * self.shape[1], -1)[: part.shape[0], : part.shape[1]])
