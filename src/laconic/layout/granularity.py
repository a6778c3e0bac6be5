"""Granularity: which runs of a parameter must stay on one rank, as users ask for it in `fully_shard(granularity=)`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from laconic.layout.bucket import row_block

if TYPE_CHECKING:  # a job description is checked without torch
    from torch import Tensor

_MAX_SHOWN = 8  # names of parameters in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of a tensor's elements that stays on one rank. `rows`, `elements` and `whole` make blocks.

    Blocks are counted from the tensor's beginning. The last one may be partial. A smaller tensor is one block.

    Raises:
        ValueError: the count is below 1.
    """

    unit: Literal["rows", "elements", "whole"]
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a block of {self.count} {self.unit} cuts nothing; it needs at least 1")

    def __str__(self) -> str:
        if self.unit == "whole":
            return self.unit
        return f"{self.count} {self.unit if self.count > 1 else self.unit.removesuffix('s')}"

    def numel(self, shape: Sequence[int]) -> int:
        """The elements per block of a tensor of this shape; at least 1."""
        whole = max(1, math.prod(shape))
        if self.unit == "whole":
            return whole
        if self.unit == "elements":
            return min(self.count, whole)
        return min(self.count * row_block(shape), whole) if len(shape) > 1 else 1


def rows(count: int) -> Block:
    """Ask for blocks of `count` rows. A row is a run along the last dim; the other dims together count rows.

    Tiles of k x k elements need rows(k), the smallest contiguous run of whole tiles. A vector may be cut anywhere.
    """
    return Block(unit="rows", count=count)


def elements(count: int) -> Block:
    """Ask for blocks of `count` elements, in matrices and vectors alike."""
    return Block(unit="elements", count=count)


def whole() -> Block:
    """Ask for the whole tensor on one rank."""
    return Block(unit="whole")


def block_of(text: object) -> Block:
    """Return the block that "32 rows", "256 elements" or "whole" describes.

    Raises:
        ValueError: `text` is none of these.
    """
    if text == "whole":
        return whole()
    match = re.fullmatch(r"([1-9][0-9]*) (row|element)s?", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{text!r} is not a block; write "32 rows", "256 elements" or "whole"')
    return Block(unit="rows" if match[2] == "row" else "elements", count=int(match[1]))


Granularity: TypeAlias = Callable[[str, "Tensor"], int | Block] | Block | Mapping[str, Block]
"""The argument of `fully_shard(granularity=)`: a block for all parameters, or one of these.

- A mapping from patterns (as in `fnmatch`, such as "*.weight") to blocks. The first pattern that matches a parameter's
  name within its unit decides; a parameter that matches no pattern gets one row.
- A function of the parameter's name within its unit and the parameter. It returns a block or the elements per block."""


def granularity_of(given: Any) -> Granularity | None:
    """Return what `fully_shard(granularity=)` takes, from a text such as "32 rows", or a mapping to texts or blocks.

    Raises:
        ValueError: a text is no block.
    """
    if isinstance(given, Mapping):
        return {pattern: each if isinstance(each, Block) else block_of(each) for pattern, each in given.items()}
    return given if given is None or isinstance(given, Block) or callable(given) else block_of(given)


def granularity_text(granularity: Granularity | None) -> Any:
    """The inverse of `granularity_of`. A function stays as it is."""
    if isinstance(granularity, Mapping):
        return {pattern: str(block) for pattern, block in granularity.items()}
    return str(granularity) if isinstance(granularity, Block) else granularity


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of one unit's parameters, by their names within the unit, and the patterns that the user gave."""

    numels: tuple[int, ...]
    """The elements per block of each parameter."""
    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()
    """The `patterns` that decided about a parameter."""


def resolve(
    granularity: Granularity | None,
    parameters: Sequence[tuple[str, Tensor]],
    uncut: Mapping[str, int] | None = None,
) -> Blocks:
    """Find the blocks of a unit's parameters, (name within the unit, parameter); None asks for one row of each.

    Only shapes are read, so meta tensors work too.

    Args:
        granularity: what the user asks for.
        parameters: the parameters.
        uncut: by name, the elements per block that a parameter itself wants whole. They count where the user does not
            ask for a block.

    Raises:
        ValueError: a function returns less than one element or more than the parameter has; a mapping's value is no
            `Block`; `granularity` is none of the three forms; or it would cut a block that must be whole.
    """
    uncut, is_asked = uncut or {}, granularity is not None
    granularity = rows(1) if granularity is None else granularity
    _check(granularity)
    patterns = tuple(granularity) if isinstance(granularity, Mapping) else ()
    numels, used = [], set()
    for name, parameter in parameters:
        block: Block | int = rows(1)
        of_parameter = uncut.get(name)
        if isinstance(granularity, Mapping):
            matching = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
            if matching is not None:
                used.add(matching)
                block = granularity[matching]
            elif of_parameter:
                block = of_parameter
        elif of_parameter and not is_asked:
            block = of_parameter
        else:
            block = granularity if isinstance(granularity, Block) else granularity(name, parameter)
        numel = block.numel(parameter.shape) if isinstance(block, Block) else block
        most = max(1, parameter.numel())
        if not 1 <= numel <= most:
            raise ValueError(f"granularity of {name} is {numel}; it must be 1 to {most} elements")
        if of_parameter and numel % of_parameter and numel < most:
            raise ValueError(
                f"granularity of {name} is {numel} elements, which cuts its blocks of {of_parameter}: elements that "
                "share a scale must stay on one rank. Leave granularity out for it, or ask for a multiple"
            )
        numels.append(numel)
    names = tuple(name for name, _ in parameters)
    return Blocks(numels=tuple(numels), names=names, patterns=patterns, used=frozenset(used))


def _check(granularity: Granularity) -> None:
    if isinstance(granularity, Mapping):
        for pattern, block in granularity.items():
            if not isinstance(block, Block):
                raise ValueError(
                    f"granularity[{pattern!r}] is {block!r}; it must be a block: laconic.rows(k), laconic.elements(n) "
                    "or laconic.whole()"
                )
    elif not isinstance(granularity, Block) and not callable(granularity):
        raise ValueError(
            f"granularity is {granularity!r}; it must be a block such as laconic.rows(32), a mapping of name patterns "
            "to blocks, or a function of (name, parameter) that returns elements per block"
        )


def check_matched(units: Iterable[Blocks]) -> None:
    """Refuse a pattern that decides about no parameter of the whole model, whose units are `units`.

    Raises:
        ValueError: the message names the pattern, and either a parameter that an earlier pattern decides about, or the
            names that patterns may match.
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
        shown = ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
        raise ValueError(
            f"granularity pattern {pattern!r} matches no parameter. Patterns see names as they are inside the module "
            f"given to fully_shard: {shown}"
        )
