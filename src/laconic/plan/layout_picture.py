"""A picture of the layout of a unit: the part of each tensor that each rank holds, as SVG."""

import math
from collections.abc import Iterator
from html import escape

from laconic.layout.bucket import BucketLayout, Slot
from laconic.layout.packing import UnitPlan

# The palette of Okabe and Ito, which colour-blind readers can tell apart, and lighter versions of its colours.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8da9c4", "#f4c97a", "#7fc8ac",
    "#e3b6cd",
)  # fmt: skip
_OTHER_COLOUR = "#b3d9f0"
_WIDTH, _LEFT, _BAR, _GAP, _TOP, _LINE, _BETWEEN = 960, 64, 20, 5, 44, 18, 14  # pixels
_HEAD, _TAIL = 12, 3  # a picture without room for all ranks shows so many of the first and of the last ranks
_LABEL_WIDTH = 240  # the width of a bucket, in pixels, from which its label fits above it


def draw_layout(plan: UnitPlan, title: str) -> str:
    """Return a unit's plan as SVG. Each rank has a line, with its shards of the unit's buckets side by side.

    Lengths are to scale, but no bucket is too narrow to be seen. Padding is white. Tensors of one shape share a colour.
    """
    num_ranks = plan.buckets[0].num_shards
    shown = list(range(num_ranks))
    if num_ranks > _HEAD + _TAIL + 1:
        shown = [*range(_HEAD), *range(num_ranks - _TAIL, num_ranks)]
    tops = [_TOP + line * (_BAR + _GAP) for line in range(len(shown))]
    if len(shown) < num_ranks:
        tops[_HEAD:] = [top + 3 * _GAP for top in tops[_HEAD:]]
    colours, legend = _assign_colours(plan)
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for shard, top in zip(shown, tops, strict=True):
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">rank {shard}</text>')
    left = float(_LEFT)
    for index, (bucket, width) in enumerate(zip(plan.buckets, _bucket_widths(plan), strict=True)):
        parts.append(f'<text x="{left:.1f}" y="{_TOP - 8}">{escape(_bucket_label(index, bucket, width))}</text>')
        for shard, top in zip(shown, tops, strict=True):
            frame = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"'
            parts += [f'<rect {frame} fill="#fff" stroke="#555"/>', *_extents(bucket, shard, left, top, width, colours)]
        left += width + _BETWEEN
    bottom = _TOP + len(shown) * (_BAR + _GAP) + 5 * _GAP
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
    return [least + (room - least * len(sizes)) * size / sum(sizes) for size in sizes]


def _bucket_label(index: int, bucket: BucketLayout, width: float) -> str:
    if not bucket.slots or width <= _LABEL_WIDTH:
        return f"bucket {index}"
    own = bucket.numel - bucket.padding
    share = bucket.padding / own if own else 0.0
    return f"bucket {index}: {bucket.shard_numel:,} elements a rank, {share:.2%} padding"


def _extents(
    bucket: BucketLayout, shard: int, left: float, top: int, width: float, colours: dict[tuple[int, ...], str]
) -> Iterator[str]:
    """The extents of a shard. Neighbours may have the same colour, so a line separates extents that are wide enough."""
    for index, slot in enumerate(bucket.slots):
        extent = bucket.extent(index, shard)
        if extent is None:
            continue
        x = left + width * bucket.offset_in_shard(index, shard) / bucket.shard_numel
        size = width * extent.numel / bucket.shard_numel
        stroke = ' stroke="#fff" stroke-width="0.6"' if size > 3 else ""
        label = f"{slot.name} {slot.shape}: elements {extent.start:,} to {extent.stop:,}"
        yield (
            f'<rect x="{x:.2f}" y="{top + 0.5}" width="{max(size, 0.4):.2f}" height="{_BAR - 1}" '
            f'fill="{colours[slot.shape]}"{stroke}><title>{escape(label)}</title></rect>'
        )


def _assign_colours(plan: UnitPlan) -> tuple[dict[tuple[int, ...], str], list[tuple[str, str]]]:
    """The colour of each shape, and the legend. The shapes with the most elements get different colours."""
    by_shape: dict[tuple[int, ...], list[Slot]] = {}
    for slot in (slot for bucket in plan.buckets for slot in bucket.slots):
        by_shape.setdefault(slot.shape, []).append(slot)
    shapes = sorted(by_shape, key=lambda shape: -math.prod(shape) * len(by_shape[shape]))
    colours = dict.fromkeys(shapes, _OTHER_COLOUR) | dict(zip(shapes, _COLOURS, strict=False))
    legend = []
    for shape in shapes[: len(_COLOURS)]:
        first, *others = by_shape[shape]
        names = f"{first.name} and {len(others)} more" if others else first.name
        legend.append((colours[shape], f"{' x '.join(map(str, shape))}: {names}"))
    if len(shapes) > len(_COLOURS):
        legend.append((_OTHER_COLOUR, f"{len(shapes) - len(_COLOURS)} more shapes"))
    return colours, [*legend, ("#fff", "padding")]
