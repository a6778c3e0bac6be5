"""Ways to shard a model on very many ranks with little padding, what they cost a rank, and the cheapest of them.

[Note: Why many ranks pad, and what helps]
A block lies whole in one shard. If an even share of a unit is a few blocks long, or shorter than one, shards are
rounded up to whole blocks, and the roundings are the padding. So the share must grow, or the block must shrink:

- Several layers in one unit: the share grows with the unit. The unit's weights and gradients are whole on each rank
  while it runs, so these grow too.
- Replicas: parameters, gradients and states are cut over fewer ranks, and each rank holds a larger part of them.
- Flat blocks: a tile of k x k elements needs k whole rows on one rank, a run of 256 elements needs 256 elements.
  `AdamW8bit` takes either. Each block has two fp32 scales.
- Shared blocks: weights in FP8 with a scale for 128 x 128 elements need 128 whole rows only so that nobody has to be
  asked. Ranks that agree on scales may cut anywhere: [Note: Shared blocks] in layers/scaled.py. Each rank then knows
  all scales.

Three others were tried, and are worse (benchmarks/tiles.py): tiles that lie one after another in memory still pad, and
cost the views of gathered weights; owners that differ from unit to unit need no padding at rest, but a unit has fewer
blocks than there are ranks, so a few send it all; whole blocks in a node, cut inside it, pad as an eighth of the ranks.

Experts over a mesh axis of their own are no remedy. With e groups of experts, a group has 1/e of the experts and 1/e of
the ranks, so the share of a rank stays as it is. Tried on 88 bad plans, it made no good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from laconic.layout.granularity import Block, elements, rows
from laconic.layout.packing import plan_unit
from laconic.plan.padding import ModelShapes, Shape
from laconic.plan.units import format_quantity

FLAT = 256
"""The elements of a flat block: the default of `laconic.optim.Tiling`."""
TILES = {128: "fp8_128x128"}
"""The format of weights whose tiles have so many rows, which ranks may share."""
Kind = Literal["rows", "flat", "shared"]
"""What stays on one rank: rows, flat runs, or nothing, as ranks share blocks."""
_LAYERS = (1, 2, 4, 8, 16)
"""The numbers of layers of a unit that are tried."""
_FEW_RANKS = 1024
_NODE = 8
"""Ranks of a node, which no replica cuts."""
SHARD_BYTES = 4 + 4 + 2
"""Bytes of an element that a rank holds: the weight and its gradient in fp32, and AdamW8bit's two moments."""
_SCALES_BYTES = 2 * 4
"""Bytes of a block's scales, one for each moment."""
_SHARED_BYTES = 4
"""Bytes of the scale of a shared block, which every rank has."""
UNIT_BYTES = 2 * 2 + 2 * 4
"""Bytes of an element of the largest unit, at the peak in backward: its weight and that of the next one in bf16, its
gradient and that of the unit before in fp32. tests/plan/test_remedies.py reads this off a rehearsed step."""


def most_padding(num_ranks: int) -> float:
    """The padding beyond which a plan wants a remedy, as a share of the model: 3 % up to 1,024 ranks, 5 % beyond."""
    return 0.03 if num_ranks <= _FEW_RANKS else 0.05


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A way to shard a model: what the user chooses, its padding, and the memory of a rank."""

    num_ranks: int
    num_rows: int
    """The rows per block that were asked for."""
    layers_per_unit: int = 1
    num_replicas: int = 1
    blocks: Kind = "rows"
    padding: float
    """As a share of the model's elements."""
    rank_bytes: float
    """The bytes that a rank holds: its parts of parameters, gradients and states, and the largest unit as it runs."""
    added_bytes: float
    """How many of them are more than with blocks of rows and a layer a unit, cut evenly over all ranks."""

    @property
    def words(self) -> str:
        """The remedy in words."""
        words = [f"{self.layers_per_unit} layers a unit"] if self.layers_per_unit > 1 else []
        if self.num_replicas > 1:
            words.append(f"{self.num_replicas} replicas of {self.num_ranks // self.num_replicas} ranks")
        if self.blocks == "shared":
            words.append("shared blocks")
        elif self.blocks == "flat":
            words.append(f"flat blocks of {FLAT}" if self.num_rows > 1 else "rows that may be cut")
        return ", ".join(words) or "as it is"

    @property
    def calls(self) -> tuple[str, ...]:
        """The statements by which a user gets it, given a `model` and its `layers`."""
        arguments = ", mesh=mesh" if self.num_replicas > 1 else ""
        if self.blocks != "shared" and (self.num_rows > 1 or self.blocks == "rows"):
            asked = f"elements({FLAT})" if self.blocks == "flat" else f"rows({self.num_rows})"
            arguments += f", granularity=laconic.{asked}"
        each, among = "layer", "layer in layers"
        if (count := self.layers_per_unit) > 1:
            each, among = f"list(layers[i : i + {count}])", f"i in range(0, len(layers), {count})"
        statements = [
            f"for {among}: laconic.fully_shard({each}{arguments})",
            f"laconic.fully_shard(model{arguments})",
        ]
        if self.num_replicas > 1:
            statements.insert(0, f'mesh = laconic.init_mesh("cuda", islands={self.num_replicas})')
        if self.blocks == "shared":
            weight_format = TILES[self.num_rows]
            statements.insert(0, f'laconic.convert_to_scaled_training(model, "{weight_format}", shares_blocks=True)')
        if self.blocks == "flat" and self.num_rows > 1:
            statements.append(
                "optimizer = laconic.optim.AdamW8bit(model.parameters(), block=laconic.optim.Tiling(tile=None))"
            )
        return tuple(statements)

    def __str__(self) -> str:
        sign, amount = "-" if self.added_bytes < 0 else "+", format_quantity(abs(self.added_bytes), "B")
        calls = "; ".join(self.calls)
        if self.blocks == "flat" and self.num_replicas == self.layers_per_unit == 1 and self.num_rows > 1:
            calls += ", or [optimizer] flat_blocks = true in a job with adamw8bit"
        return f"{self.padding:.2%}, {sign}{amount} a rank, {self.words}: {calls}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A plan that pads too much, and the ways to shard that do not."""

    plain: Remedy
    """The plan without a remedy."""
    remedies: tuple[Remedy, ...]
    """The cheapest one of each kind of blocks, if there are any; the cheapest first."""

    def __str__(self) -> str:
        num_ranks, count = self.plain.num_ranks, self.plain.num_rows
        head = f"{num_ranks} ranks, {count} row{'s' * (count > 1)}: {self.plain.padding:.2%}"
        lines = [f"{head} -> {each}" for each in self.remedies]
        return "\n".join(lines) or f"{head}; nothing brings it to {most_padding(num_ranks):.0%}: use fewer ranks"


def advise(model: ModelShapes, num_ranks: int, num_rows: int, *, itemsize: int) -> Advice | None:
    """Find the cheapest remedies for blocks of `num_rows` rows; None if the padding is small as it is.

    Cheapest means the fewest bytes on a rank. The smallest dtype sent has `itemsize` bytes.
    Source: [Note: Why many ranks pad, and what helps].
    """
    search = _Search(model, num_ranks, num_rows, itemsize)
    plain = search.plan(1, 1, "rows")
    if plain.padding <= most_padding(num_ranks):
        return None
    kinds: tuple[Kind, ...] = ("rows", "flat", "shared") if num_rows in TILES else ("rows", "flat")
    found = [best for kind in kinds if (best := search.cheapest(kind)) is not None]
    return Advice(plain=plain, remedies=tuple(sorted(found, key=lambda each: each.rank_bytes)))


class _Search:
    """Plans a model in many ways, the ones that may be cheapest first."""

    def __init__(self, model: ModelShapes, num_ranks: int, num_rows: int, itemsize: int) -> None:
        self._model, self._num_ranks, self._num_rows, self._itemsize = model, num_ranks, num_rows, itemsize
        self._units_of = cache(model.units)
        """The units, by the number of layers in each."""
        nodes = num_ranks // (_NODE if num_ranks % _NODE == 0 else 1)
        self._splits = [count for count in range(1, nodes + 1) if nodes % count == 0]
        """The numbers of replicas."""

    def cheapest(self, kind: Kind) -> Remedy | None:
        """The cheapest way with such blocks that pads little enough; None if there is none."""
        most, best = most_padding(self._num_ranks), None
        ways = (
            (self._least_bytes(layers, replicas, kind), layers, replicas)
            for layers in _LAYERS
            if layers <= max(1, len(self._model.layers))
            for replicas in self._splits
        )
        for least_bytes, layers, replicas in sorted(ways):
            if best is not None and least_bytes >= best.rank_bytes:
                break
            if self._least_padding(layers, replicas, kind) > most:
                continue
            found = self.plan(layers, replicas, kind)
            if found.padding <= most and (best is None or found.rank_bytes < best.rank_bytes):
                best = found
        return best

    def plan(self, layers: int, replicas: int, kind: Kind) -> Remedy:
        """Plan all units in one of the ways."""
        block, units, num_shards = self._block(kind), self._units_of(layers), self._num_ranks // replicas
        itemsize = 1 if kind == "shared" else self._itemsize  # of codes
        numels = [planned_numel(unit.shapes, num_shards, block, itemsize) for unit in units]
        total = sum(unit.count * numel for unit, numel in zip(units, numels, strict=True))
        rank_bytes = self._rank_bytes(total, max(numels), num_shards, kind)
        return Remedy(
            num_ranks=self._num_ranks,
            num_rows=self._num_rows,
            layers_per_unit=layers,
            num_replicas=replicas,
            blocks=kind,
            padding=total / self._model.numel - 1,
            rank_bytes=rank_bytes,
            added_bytes=rank_bytes - self._least_bytes(1, 1, "rows"),
        )

    def _least_bytes(self, layers: int, replicas: int, kind: Kind) -> float:
        largest = max(unit.numel for unit in self._units_of(layers))
        return self._rank_bytes(self._model.numel, largest, self._num_ranks // replicas, kind)

    def _rank_bytes(self, total: int, largest: int, num_shards: int, kind: Kind) -> float:
        scaled = self._num_rows**2 if kind == "rows" else FLAT
        shared_bytes = self._model.numel / self._num_rows**2 * _SHARED_BYTES if kind == "shared" else 0
        held_bytes = total / num_shards * (SHARD_BYTES + _SCALES_BYTES / scaled)
        return held_bytes + shared_bytes + largest * UNIT_BYTES

    def _least_padding(self, layers: int, replicas: int, kind: Kind) -> float:
        """A lower bound: the largest block of a unit fits into a shard."""
        block, num_shards = self._block(kind), self._num_ranks // replicas
        total = sum(
            unit.count * max(unit.numel, num_shards * max(map(block.numel, unit.shapes)))
            for unit in self._units_of(layers)
        )
        return total / self._model.numel - 1

    def _block(self, kind: Kind) -> Block:
        if kind == "rows":
            return rows(self._num_rows)
        is_run = kind == "flat" and self._num_rows > 1  # without granularity, single rows may be cut
        return elements(FLAT if is_run else 1)


@lru_cache(maxsize=4096)
def planned_numel(shapes: Sequence[Shape], num_shards: int, block: Block, itemsize: int) -> int:
    """The elements of a unit with tensors of these shapes and blocks, padding included."""
    names, blocks = [str(index) for index in range(len(shapes))], [block.numel(shape) for shape in shapes]
    return plan_unit(names, shapes, blocks, num_shards=num_shards, itemsize=itemsize).numel
