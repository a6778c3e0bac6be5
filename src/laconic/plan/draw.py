"""A picture of a unit's plan: what each rank holds of which tensor, drawn from the plan itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from laconic.layout.bucket import BucketLayout, Slot
from laconic.layout.planner import UnitPlan

# Okabe and Ito's, told apart by colour-blind readers too, and lighter twins of them.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8da9c4", "#f4c97a", "#7fc8ac",
    "#e3b6cd", "#b3d9f0",
)  # fmt: skip
_WIDTH, _LEFT, _BAR, _GAP, _TOP, _LINE, _BETWEEN = 960, 64, 20, 5, 44, 18, 14
_HEAD, _TAIL = 12, 3
"""Ranks shown when there are too many for the picture."""


def draw(plan: UnitPlan, title: str) -> str:
    """The plan as SVG: a line per rank, the shards of the unit's buckets side by side, padding left white.

    Lengths are true to scale, but a bucket is at least wide enough to be seen. Tensors of one shape share a colour.
    """
    num_ranks = plan.buckets[0].num_shards
    shown = list(range(num_ranks))
    if num_ranks > _HEAD + _TAIL + 1:
        shown = [*range(_HEAD), *range(num_ranks - _TAIL, num_ranks)]
    colours = _colours(plan)
    widths = _bucket_widths(plan)
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    left = float(_LEFT)
    for index, (bucket, width) in enumerate(zip(plan.buckets, widths, strict=True)):
        parts.append(f'<text x="{left:.1f}" y="{_TOP - 8}">{escape(_bucket_label(index, bucket, width))}</text>')
        for line, shard in enumerate(shown):
            top = _TOP + line * (_BAR + _GAP) + (_GAP * 3 if shard >= _HEAD and len(shown) < num_ranks else 0)
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="#fff" stroke="#555"/>'
            )
            parts += _shard(bucket, shard, left, top, width, colours)
            if index == 0:
                parts.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">rank {shard}</text>')
        left += width + _BETWEEN
    bottom = _TOP + len(shown) * (_BAR + _GAP) + 5 * _GAP
    legend = list(_legend(plan, colours))
    for row, (colour, text) in enumerate(legend):
        x, y = _LEFT + (row % 2) * (_WIDTH - _LEFT) // 2, bottom + (row // 2) * _LINE
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}" stroke="#555"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(text)}</text>')
    height = bottom + -(-len(legend) // 2) * _LINE + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bucket_widths(plan: UnitPlan) -> list[float]:
    room = _WIDTH - _LEFT - 16 - _BETWEEN * (len(plan.buckets) - 1)
    least = 0.08 * room
    sizes = [bucket.shard_numel for bucket in plan.buckets]
    wide = room - least * len(sizes)
    return [least + wide * size / sum(sizes) for size in sizes]


def _bucket_label(index: int, bucket: BucketLayout, width: float) -> str:
    if len(bucket.slots) and width > 240:
        own = bucket.numel - bucket.padding
        share = bucket.padding / own if own else 0.0
        return f"bucket {index}: {bucket.shard_numel:,} elements a rank, {share:.2%} padding"
    return f"bucket {index}"


def _shard(
    bucket: BucketLayout, shard: int, left: float, top: int, width: float, colours: dict[tuple[int, ...], str]
) -> Iterator[str]:
    """A rank's extents. A stroke ends each, so that tensors of one shape can be told apart where there is room."""
    for index, slot in enumerate(bucket.slots):
        extent = bucket.extent(index, shard)
        if extent is None:
            continue
        x = left + width * bucket.offset_in_shard(index, shard) / bucket.shard_numel
        size = width * extent.numel / bucket.shard_numel
        stroke = ' stroke="#fff" stroke-width="0.6"' if size > 3 else ""
        what = f"{slot.name} {slot.shape}: elements {extent.start:,} to {extent.stop:,}"
        yield (
            f'<rect x="{x:.2f}" y="{top + 0.5}" width="{max(size, 0.4):.2f}" height="{_BAR - 1}" '
            f'fill="{colours[slot.shape]}"{stroke}><title>{escape(what)}</title></rect>'
        )


def _shapes(plan: UnitPlan) -> dict[tuple[int, ...], list[Slot]]:
    """Tensors by shape, those that fill most first."""
    found: dict[tuple[int, ...], list[Slot]] = {}
    for bucket in plan.buckets:
        for slot in bucket.slots:
            found.setdefault(slot.shape, []).append(slot)
    return dict(sorted(found.items(), key=lambda item: -math.prod(item[0]) * len(item[1])))


def _colours(plan: UnitPlan) -> dict[tuple[int, ...], str]:
    return {
        shape: _COLOURS[index] if index < len(_COLOURS) - 1 else _COLOURS[-1]
        for index, shape in enumerate(_shapes(plan))
    }


def _legend(plan: UnitPlan, colours: dict[tuple[int, ...], str]) -> Iterator[tuple[str, str]]:
    shapes = list(_shapes(plan).items())
    for shape, slots in shapes[: len(_COLOURS) - 1]:
        names = slots[0].name if len(slots) == 1 else f"{slots[0].name} and {len(slots) - 1} more"
        yield colours[shape], f"{' x '.join(map(str, shape))}: {names}"
    if len(shapes) >= len(_COLOURS):
        yield _COLOURS[-1], f"{len(shapes) - len(_COLOURS) + 1} more shapes"
    yield "#fff", "padding"
