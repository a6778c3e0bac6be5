"""The pictures that `laconic plan` draws with matplotlib: a layout, and predicted steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.layout.packing import UnitPlan
from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane, Span
from laconic.plan.units import format_number

SUFFIXES = (".png", ".svg", ".pdf")
"""The endings of the names of pictures."""
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8da9c4", "#f4c97a", "#7fc8ac",
    "#e3b6cd",
)  # fmt: skip
"""The palette of Okabe and Ito, which colour-blind readers can tell apart, and lighter versions of its colours."""
_OTHER_COLOUR = "#b3d9f0"
_HEAD, _TAIL = 12, 3
"""A picture without room for all ranks shows so many of the first and of the last ranks."""
_NARROW = 0.003
"""The share of a line below which an extent has no border, which would hide it."""


def draw_layout(plan: UnitPlan, title: str) -> Any:
    """Return a matplotlib figure of a unit's plan. Each rank has a line, with its shards of the buckets side by side.

    Lengths are to scale within a bucket. Padding is white. Tensors of one shape share a colour.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    num_ranks, sizes = plan.buckets[0].num_shards, [bucket.shard_numel for bucket in plan.buckets]
    shown = list(range(num_ranks))
    if num_ranks > _HEAD + _TAIL + 1:
        shown = [*range(_HEAD), *range(num_ranks - _TAIL, num_ranks)]
    rows = [row + (row >= _HEAD and len(shown) < num_ranks) for row in range(len(shown))]
    colours, legend = _assign_colours(plan)
    figure = Figure(figsize=(11, 1.4 + 0.26 * len(shown) + 0.1 * len(legend)), layout="constrained", dpi=120)
    widths = [max(size / sum(sizes), 0.08) for size in sizes]
    every = figure.subplots(1, len(sizes), squeeze=False, sharey=True, gridspec_kw={"width_ratios": widths})[0]
    for index, (axes, bucket) in enumerate(zip(every, plan.buckets, strict=True)):
        for row, shard in zip(rows, shown, strict=True):
            axes.barh(row, bucket.shard_numel, height=0.8, color="white", edgecolor="#555555", linewidth=0.5)
            bars = [
                (bucket.offset_in_shard(slot, shard), extent.numel, colours[bucket.slots[slot].shape])
                for slot in range(len(bucket.slots))
                if (extent := bucket.extent(slot, shard)) is not None
            ]
            borders = ["white" if numel > _NARROW * bucket.shard_numel else colour for _, numel, colour in bars]
            axes.broken_barh(
                [(begin, numel) for begin, numel, _ in bars], (row - 0.4, 0.8),
                facecolors=[colour for *_, colour in bars], edgecolors=borders, linewidth=0.3,
            )  # fmt: skip
        share = bucket.padding / max(1, bucket.numel - bucket.padding)
        words = f": {bucket.shard_numel:,} elements a rank, {share:.2%} padding" if widths[index] > 0.3 else ""
        axes.set_title(f"bucket {index}{words}", fontsize=8, loc="left")
        axes.set_xlim(0, bucket.shard_numel)
        axes.set_xticks([])
    every[0].set_yticks(rows, [f"rank {shard}" for shard in shown], fontsize=8)
    every[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.legend(handles=legend, fontsize=7, ncols=2, frameon=False, loc="outside lower center")
    return figure


def _assign_colours(plan: UnitPlan) -> tuple[dict[tuple[int, ...], str], list[Any]]:
    """The colour of each shape, and the legend. The shapes with the most elements get different colours."""
    from matplotlib.patches import Patch

    names: dict[tuple[int, ...], list[str]] = {}
    for slot in (slot for bucket in plan.buckets for slot in bucket.slots):
        names.setdefault(slot.shape, []).append(slot.name)
    shapes = sorted(names, key=lambda shape: -math.prod(shape) * len(names[shape]))
    legend = []
    for shape, colour in zip(shapes, _COLOURS, strict=False):
        first, *others = names[shape]
        words = f"{first} and {len(others)} more" if others else first
        legend.append(Patch(color=colour, label=f"{' x '.join(map(str, shape))}: {words}"))
    if len(shapes) > len(_COLOURS):
        legend.append(Patch(color=_OTHER_COLOUR, label=f"{len(shapes) - len(_COLOURS)} more shapes"))
    legend.append(Patch(facecolor="white", edgecolor="#555555", label="padding"))
    return dict.fromkeys(shapes, _OTHER_COLOUR) | dict(zip(shapes, _COLOURS, strict=False)), legend


_BY_LANE = {
    PlanLane.COMPUTE: "#56b4e9", PlanLane.WIRE: "#d55e00", PlanLane.LOCAL: "#e69f00", PlanLane.TO_HOST: "#009e73",
    PlanLane.TO_DEVICE: "#7fc8ac", PlanLane.HOST: "#999999", PlanLane.STAGES: "#cc79a7",
}  # fmt: skip
"""After the palette of Okabe and Ito."""
_MAX_LABELLED = 60
"""The most spans of a lane that get their names."""


def draw_timelines(estimates: Sequence[Estimate], path: Path, title: str = "") -> None:
    """Write a picture of the steps of estimates that kept their spans, one under another, on one scale of seconds.

    A step has a line for each lane that works; one of a pipeline has a line for each place's compute, and one for what
    its node sends.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    lines = [_lines(each) for each in estimates]
    heights = [1.2 + 0.6 * len(each) for each in lines]
    figure = Figure(figsize=(11, 0.3 + sum(heights)), layout="constrained", dpi=120)
    every = figure.subplots(len(estimates), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, estimate, own in zip(every[:, 0], estimates, lines, strict=True):
        _draw_step(axes, estimate, own)
        axes.set_xlim(0, max(each.seconds for each in estimates))
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _lines(estimate: Estimate) -> list[tuple[int, PlanLane]]:
    """The place and the lane of each line of a step."""
    places = range(1 + max((span.place for span in estimate.spans), default=0))
    working = {(span.place, span.lane) for span in estimate.spans if not span.is_wait}
    shown = PlanLane if len(places) == 1 else (PlanLane.COMPUTE, PlanLane.WIRE)
    return [(place, lane) for place in places for lane in shown if (place, lane) in working]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The spans of a line, in which those without a gap are one. Thousands of bars take a minute to draw."""
    joined = list(spans[:1])
    for span in spans[1:]:
        if span.begin_s <= joined[-1].end_s:
            joined[-1] = replace(joined[-1], end_s=max(span.end_s, joined[-1].end_s), name="")
        else:
            joined.append(span)
    return joined


def _draw_step(axes: Any, estimate: Estimate, lines: Sequence[tuple[int, PlanLane]]) -> None:
    from matplotlib.patches import Patch

    for row, line in enumerate(lines):
        lane = line[1]
        work = [span for span in estimate.spans if (span.place, span.lane) == line and not span.is_wait]
        work = work if len(work) <= _MAX_LABELLED else _joined(work)
        for span in work:
            begin_s = span.begin_s - estimate.begin_s
            axes.barh(row, span.end_s - span.begin_s, left=begin_s, height=0.7, color=_BY_LANE[lane], edgecolor="white",
                      linewidth=0.3)  # fmt: skip
            is_wide = span.end_s - span.begin_s > 0.05 * estimate.seconds
            if is_wide and len(work) <= _MAX_LABELLED:
                middle_s = begin_s + (span.end_s - span.begin_s) / 2
                axes.text(middle_s, row, span.name, ha="center", va="center", fontsize=6, clip_on=True)
    for span in estimate.spans:
        if span.is_wait:
            row = lines.index((span.place, PlanLane.COMPUTE))
            axes.barh(row, span.end_s - span.begin_s, left=span.begin_s - estimate.begin_s, height=0.7, fill=False,
                      edgecolor=_BY_LANE[span.lane], linewidth=0.6, hatch="////")  # fmt: skip
    waited = [lane for lane in PlanLane if estimate.waits_s.get(lane)]
    words = [f"waits {format_number(estimate.waits_s[lane])} s: {lane.value}" for lane in waited]
    legend = [
        Patch(fill=False, edgecolor=_BY_LANE[lane], hatch="////", label=label)
        for lane, label in zip(waited, words, strict=True)
    ]
    if legend:
        axes.legend(handles=legend, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False)
    is_piped = any(place for place, _ in lines)
    names = [f"place {place}: {lane.value}" if is_piped else lane.value for place, lane in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{estimate.label}: a step of {format_number(estimate.seconds)} s, predicted"
    axes.set_title(title, fontsize=9, loc="left")
