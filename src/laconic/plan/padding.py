"""The shapes of a model's units, and the padding of their layouts, beside that of other rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.layout.explain import Explanation, explain
from laconic.layout.granularity import Block, rows
from laconic.layout.packing import UnitPlan, plan_unit, round_up
from laconic.plan.known import models

if TYPE_CHECKING:
    from torch import Tensor

    from laconic.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnitShapes:
    """The names and shapes of a unit's tensors, in the order of definition."""

    name: str
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    count: int = 1
    """The number of equal units in the model."""

    @property
    def numel(self) -> int:
        """The number of elements of one such unit."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The tensors of a model: those of its layers, and those of no layer, which are the root's."""

    layers: tuple[UnitShapes, ...]
    """In the order of forward."""
    rest: tuple[UnitShapes, ...] = ()
    """One unit, or none if layers have all tensors."""

    @property
    def numel(self) -> int:
        """The number of elements of the model."""
        return sum(unit.numel for unit in (*self.layers, *self.rest))

    def units(self, layers_per_unit: int = 1) -> tuple[UnitShapes, ...]:
        """The different units if neighbouring layers share one; the last of these may have fewer layers."""
        groups = [self.layers[first : first + layers_per_unit] for first in range(0, len(self.layers), layers_per_unit)]
        return _counted([*map(_joined, groups), *self.rest])


def _joined(layers: Sequence[UnitShapes]) -> UnitShapes:
    """The layers as one unit. As in `fully_shard`, the names of several begin with their place in the list."""
    if len(layers) == 1:
        return layers[0]
    return UnitShapes(
        name=f"{len(layers)} x {layers[0].name}",
        names=tuple(f"{index}.{name}" for index, layer in enumerate(layers) for name in layer.names),
        shapes=tuple(shape for layer in layers for shape in layer.shapes),
    )


def _counted(units: Iterable[UnitShapes]) -> tuple[UnitShapes, ...]:
    return tuple(replace(unit, count=count) for unit, count in Counter(units).items())


def shapes_of(model: str) -> ModelShapes:
    """Return the tensors of a model, in the units into which `laconic train` shards it.

    Args:
        model: a name in models.toml, the path of a transformers config.json, or the path of a folder with one.

    Raises:
        ValueError: there is no such name or file.
        JobError: transformers cannot build a causal language model from the file.
    """
    from laconic.config import ModelConfig

    known = models()
    if model in known:
        return _built(ModelConfig(config=dict(known[model].config)))
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"there is no model {model!r}: give {', '.join(known)}, a transformers config.json, or a folder that has it"
        )
    return _built(ModelConfig(config=str(path)))


def _built(config: ModelConfig) -> ModelShapes:
    from laconic.hf.layers import layers_to_shard
    from laconic.models.build import build_model

    model = build_model(config)
    layers = layers_to_shard(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in inside]
    return ModelShapes(
        layers=tuple(_shapes(type(layer).__name__, layer.named_parameters()) for layer in layers),
        rest=(_shapes("rest", rest),) if rest else (),
    )


def _shapes(name: str, parameters: Iterable[tuple[str, Tensor]]) -> UnitShapes:
    named = [(key, tuple(parameter.shape)) for key, parameter in parameters]
    return UnitShapes(name=name, names=tuple(key for key, _ in named), shapes=tuple(shape for _, shape in named))


def fsdp2_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Return the elements that PyTorch FSDP2 gathers. It cuts each tensor's first dimension in equal parts, rounded up.

    Source: torch.distributed.fsdp, `Shard(0)` with padding to ceil(shape[0] / ranks).
    """
    return sum(num_ranks * -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes if shape)


def lcm_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Return a lower bound on the elements of Megatron-FSDP's buffer.

    A shard is a multiple of the least common multiple of all rows; a row has prod(shape[1:]) elements. The real buffer
    may be larger, because it also aligns the start of each tensor.
    """
    shard = math.lcm(*(max(1, math.prod(shape[1:])) for shape in shapes))
    return round_up(sum(map(math.prod, shapes)), shard * num_ranks)


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """The padding of a model on one number of ranks with blocks of one height."""

    num_ranks: int
    num_rows: int
    """The number of rows of a block."""
    padding: float
    """The padding as a share of the model's elements."""
    fsdp2: float
    """The same share under FSDP2's rule, which keeps single rows whole."""
    lcm: float
    """The same share under Megatron-FSDP's rule, which keeps single rows whole."""
    num_buckets: int
    """The largest number of buckets of a unit."""
    explanations: tuple[tuple[str, Explanation], ...]
    """For each bucket of each unit: the name of the unit, and the reason for the bucket's padding."""


def plan_of(unit: UnitShapes, num_ranks: int, block: Block, *, itemsize: int) -> UnitPlan:
    """Plan one unit. All its tensors have the granularity `block`; the smallest dtype sent has `itemsize` bytes."""
    blocks = [block.numel(shape) for shape in unit.shapes]
    return plan_unit(unit.names, unit.shapes, blocks, num_shards=num_ranks, itemsize=itemsize)


def layout_rows(
    units: Sequence[UnitShapes], ranks: Iterable[int], row_counts: Sequence[int], *, itemsize: int
) -> Iterator[LayoutRow]:
    """Yield a row for each number of ranks and, within it, for each number of rows per block in `row_counts`."""
    total = sum(unit.count * unit.numel for unit in units)

    def share(numels: Iterable[int]) -> float:
        return sum(unit.count * numel for unit, numel in zip(units, numels, strict=True)) / total - 1

    for num_ranks in ranks:
        fsdp2 = share(fsdp2_numel(unit.shapes, num_ranks) for unit in units)
        lcm = share(lcm_numel(unit.shapes, num_ranks) for unit in units)
        for num_rows in row_counts:
            plans = [plan_of(unit, num_ranks, rows(num_rows), itemsize=itemsize) for unit in units]
            reasons = [explain(plan, itemsize=itemsize) for plan in plans]
            yield LayoutRow(
                num_ranks=num_ranks,
                num_rows=num_rows,
                padding=share(plan.numel for plan in plans),
                fsdp2=fsdp2,
                lcm=lcm,
                num_buckets=max(len(plan.buckets) for plan in plans),
                explanations=tuple(
                    (unit.name, reason) for unit, found in zip(units, reasons, strict=True) for reason in found
                ),
            )
