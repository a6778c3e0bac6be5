"""What must not be cut: the block of each parameter, from what a user asks `fully_shard(granularity=)` for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

from laconic.layout.bucket import row_block


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of a tensor's elements that stays on one rank; made by `rows`, `elements` and `whole`.

    Blocks are counted from the tensor's beginning, and the last may be partial. A block larger than the tensor is the
    tensor.
    """

    unit: Literal["rows", "elements", "whole"]
    count: int = 1
    """Rows or elements."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a block of {self.count} {self.unit} cuts nothing; it needs at least 1")

    def numel(self, shape: Sequence[int]) -> int:
        """Elements per block of a tensor of this shape; at least 1."""
        whole = max(1, math.prod(shape))
        if self.unit == "whole":
            return whole
        if self.unit == "elements":
            return min(self.count, whole)
        return min(self.count * row_block(shape), whole) if len(shape) > 1 else 1


def rows(count: int) -> Block:
    """Blocks of `count` rows: `count` times the last dimension, leading dimensions taken together.

    Tiles of k x k elements need rows(k), the least contiguous run that holds them. A vector has no rows: it may be cut
    anywhere.
    """
    return Block(unit="rows", count=count)


def elements(count: int) -> Block:
    """Blocks of `count` elements, of matrices and vectors alike."""
    return Block(unit="elements", count=count)


def whole() -> Block:
    """The whole tensor on one rank."""
    return Block(unit="whole")


Granularity = Callable[[str, Tensor], int] | Block | Mapping[str, Block]
"""What `fully_shard(granularity=)` takes.

A callable from a parameter's name in its unit and the parameter to elements per block; a block for all parameters; or
blocks by pattern (as in `fnmatch`, such as "*.weight") of the parameter's name in its unit, where the first match
counts and parameters that match none get one row.
"""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of one unit's parameters, and which patterns gave them."""

    numels: tuple[int, ...]
    """Elements per block, for each parameter."""
    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    """All that the user gave."""
    used: frozenset[str] = frozenset()
    """Those that decided about a parameter."""


def resolve(granularity: Granularity | None, parameters: Sequence[tuple[str, Tensor]]) -> Blocks:
    """The blocks of a unit's parameters (name in the unit, parameter); None asks for one row each.

    Raises:
        ValueError: a callable's block has no element or more than the parameter; a mapping's value is no `Block`;
            `granularity` is something else.
    """
    names = tuple(name for name, _ in parameters)
    if granularity is None:
        granularity = rows(1)
    if isinstance(granularity, Block):
        return Blocks(numels=tuple(granularity.numel(parameter.shape) for _, parameter in parameters), names=names)
    if isinstance(granularity, Mapping):
        return _by_pattern(granularity, parameters)
    if not callable(granularity):
        raise ValueError(
            f"granularity is {granularity!r}; it must be a block such as laconic.rows(32), a mapping of name patterns "
            "to blocks, or a function of (name, parameter) that returns elements per block"
        )
    numels = []
    for name, parameter in parameters:
        numel = granularity(name, parameter)
        if isinstance(numel, Block):
            numel = numel.numel(parameter.shape)
        if not 1 <= numel <= max(1, parameter.numel()):
            raise ValueError(f"granularity of {name} is {numel}; it must be 1 to {parameter.numel()} elements")
        numels.append(numel)
    return Blocks(numels=tuple(numels), names=names)


def _by_pattern(mapping: Mapping[str, Block], parameters: Sequence[tuple[str, Tensor]]) -> Blocks:
    for pattern, block in mapping.items():
        if not isinstance(block, Block):
            raise ValueError(
                f"granularity[{pattern!r}] is {block!r}; it must be a block: laconic.rows(k), laconic.elements(n) or "
                "laconic.whole()"
            )
    used = set()
    numels = []
    for name, parameter in parameters:
        block = rows(1)
        for pattern, its_block in mapping.items():
            if fnmatchcase(name, pattern):
                used.add(pattern)
                block = its_block
                break
        numels.append(block.numel(parameter.shape))
    names = tuple(name for name, _ in parameters)
    return Blocks(numels=tuple(numels), names=names, patterns=tuple(mapping), used=frozenset(used))


def check_matched(units: Iterable[Blocks]) -> None:
    """Refuse a pattern that decides about no parameter of the whole model.

    Raises:
        ValueError: naming the pattern, and what takes its parameters or which names there are.
    """
    units = list(units)
    used = frozenset().union(*(unit.used for unit in units))
    names = sorted({name for unit in units for name in unit.names})
    for pattern in dict.fromkeys(pattern for unit in units for pattern in unit.patterns):
        if pattern in used:
            continue
        taken = [name for name in names if fnmatchcase(name, pattern)]
        if taken:
            raise ValueError(
                f"granularity pattern {pattern!r} is never used: every parameter it matches, such as {taken[0]}, "
                "matches an earlier pattern; put the special pattern first"
            )
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"granularity pattern {pattern!r} matches no parameter. Patterns see names as they are inside the module "
            f"given to fully_shard: {shown}"
        )
