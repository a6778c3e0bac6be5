"""Weights in tiles of 128 x 128 on very many ranks: what keeps a tile's scale right, and what it costs a rank.

The row `tiles` of benchmarks.layout. By model, the bytes that a rank holds beyond those of an even cut without padding:

- as it is: 128 whole rows stay on one rank.
- replicas: the cheapest remedy that keeps blocks of rows.
- in a node: whole rows for eight ranks together, which cut them between themselves, and agree on scales there.
- tile order: the elements of a tile lie one after another in memory, so a tile is a run of 16,384 elements. Gathered
  weights and gradients would be no views any more.
- owners in turn: unequal shards, and in each unit others have more. Nothing pads at rest, but a unit has fewer blocks
  than ranks, so `senders` of them, as a share, hold it all, and each of these sends as much as `longest` even shares.
- shared: ranks cut tiles anywhere, and agree on scales: [Note: Shared blocks] in layers/scaled.py.
"""

from __future__ import annotations

import heapq
import math

from benchmarks.many_ranks import ManyRanks
from laconic.layout.granularity import Block, elements, rows
from laconic.plan.padding import ModelShapes
from laconic.plan.remedies import SHARD_BYTES, UNIT_BYTES, Remedy, advise, planned_numel
from laconic.plan.units import format_quantity
from tests.support.record import Row, Table

NUM_RANKS, SIDE, NODE = 10240, 128, 8
COLUMNS = ("model", "as it is", "replicas", "in a node", "tile order", "owners in turn; senders, longest", "shared")
CAPTION = (
    f"Weights in tiles of {SIDE} x {SIDE} on {NUM_RANKS:,} ranks: padding, and the bytes of a rank beyond those of an "
    "even cut without padding."
)
_ITEMSIZE = 2


def even_bytes(model: ModelShapes) -> float:
    """The bytes of a rank if everything could be cut anywhere."""
    largest = max(unit.numel for unit in model.units())
    return model.numel / NUM_RANKS * SHARD_BYTES + largest * UNIT_BYTES


def cut(model: ModelShapes, block: Block, num_shards: int = NUM_RANKS) -> tuple[float, float]:
    """The padding of blocks over so many shards, and the bytes that it adds to a rank."""
    numels = [(unit.count, planned_numel(unit.shapes, num_shards, block, _ITEMSIZE)) for unit in model.units()]
    total = sum(count * numel for count, numel in numels)
    held = total / NUM_RANKS * SHARD_BYTES + max(numel for _, numel in numels) * UNIT_BYTES
    return total / model.numel - 1, held - even_bytes(model)


def owners_in_turn(model: ModelShapes) -> tuple[float, float, float]:
    """With whole blocks, each to the rank that has least so far: bytes above an even cut, senders, longest message.

    Senders are the ranks that hold a block of the largest unit, as a share of all. The longest message is the largest
    block of it, in even shares.
    """
    blocks: dict[int, int] = {}
    loose = 0
    for unit in model.units():
        for shape in unit.shapes:
            block, numel = rows(SIDE).numel(shape), math.prod(shape)
            if block <= 1:
                loose += unit.count * numel
                continue
            for size in (block, numel % block):
                count = numel // block if size == block else 1
                blocks[size] = blocks.get(size, 0) + unit.count * count * (size > 0)
    held = [0] * NUM_RANKS
    for size in sorted(blocks, reverse=True):
        for _ in range(blocks[size] if size else 0):
            heapq.heappush(held, heapq.heappop(held) + size)
    layer = max(model.units(), key=lambda unit: unit.count * unit.numel)
    in_layer = sum(-(-math.prod(shape) // rows(SIDE).numel(shape)) for shape in layer.shapes if len(shape) > 1)
    longest = max(rows(SIDE).numel(shape) for shape in layer.shapes) / (layer.numel / NUM_RANKS)
    above = max(held) + loose / NUM_RANKS - model.numel / NUM_RANKS
    return above * SHARD_BYTES, min(1.0, in_layer / NUM_RANKS), longest


def tiles(measured: ManyRanks) -> tuple[Row, Table]:
    """The row, and its table: a line for each model."""
    lines, found, ordered_worst = [], [], 0.0
    for name in measured.names:
        model = measured.model(name)
        advice = advise(model, NUM_RANKS, SIDE, itemsize=_ITEMSIZE)
        assert advice is not None, name
        by_kind = {each.blocks: each for each in advice.remedies}
        shared = by_kind["shared"]
        above, senders, longest = owners_in_turn(model)
        ordered = cut(model, elements(SIDE**2))
        ordered_worst = max(ordered_worst, ordered[0])
        found.append((name, by_kind["rows"].added_bytes, shared))
        lines.append([
            name, _of(advice.plain), _of(by_kind["rows"]), _text(*cut(model, rows(SIDE), NUM_RANKS // NODE)),
            _text(*ordered), f"0%, {_quantity(above)}; {senders:.0%}, {longest:.0f}", _of(shared),
        ])  # fmt: skip
    dearest, most = max(found, key=lambda each: each[1]), max(found, key=lambda each: each[2].added_bytes)
    padding = max(each.padding for *_, each in found)
    row = Row(
        measures=("laconic.layout", "laconic.plan.padding", "laconic.plan.remedies"),
        claim=f"weights in tiles of {SIDE} x {SIDE} on {NUM_RANKS:,} ranks, {len(found)} published models, shared "
        "blocks: padding, and bytes of a rank beyond an even cut; with replicas",
        measured=f"{padding:.2%}, {format_quantity(most[2].added_bytes, 'B')}; {format_quantity(dearest[1], 'B')}",
        note=f"most with shared blocks: {most[0]}, whose scales each rank has; with replicas: {dearest[0]}. Shared "
        "blocks take an all-reduce of four bytes per tile before a gather, 0.05 % of the bytes of the gather. Tiles in "
        f"the order of memory pad {ordered_worst:.2%} at worst. Owners in turn pad nothing, and let a few ranks send "
        "each unit.",
    )
    return row, Table(columns=COLUMNS, rows=lines, caption=CAPTION)


def _of(remedy: Remedy) -> str:
    return _text(remedy.padding, remedy.added_bytes)


def _text(padding: float, added_bytes: float) -> str:
    return f"{padding:.2%}, {_quantity(added_bytes)}"


def _quantity(num_bytes: float) -> str:
    return ("-" if num_bytes < 0 else "+") + format_quantity(abs(num_bytes), "B")
