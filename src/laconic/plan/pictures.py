"""The pictures that `laconic plan` draws: a layout, the time steps of a cyclic schedule, a predicted step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from laconic.cyclic.schedule import Message, MessageKind, Op, Rule
from laconic.layout.bucket import BucketLayout, Slot
from laconic.layout.packing import UnitPlan
from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane
from laconic.plan.timesteps import KINDS, CyclicPlan

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


SUFFIXES = (".png", ".svg", ".pdf")
"""The endings of file names that `draw_timesteps` and `draw_timeline` accept."""

# Forwards are blue and backwards orange; later stages are darker.
_FORWARD, _BACKWARD = ("#d6e6f2", "#3f7fb5"), ("#fbe3cc", "#d9731a")
_MAX_LABELLED_STAGES = 16  # ops of more stages are too narrow for labels
KIND_COLOURS: dict[MessageKind, str] = {
    "gradient": "#0072b2", "total": "#e69f00", "weights": "#009e73", "rear weights": "#7fc8ac", "activation": "#56b4e9",
    "activation gradient": "#b3d9f0", "square": "#cc79a7", "norm": "#e3b6cd",
}  # fmt: skip
"""The colour of each kind of message, after the palette of Okabe and Ito."""


def draw_timesteps(plan: CyclicPlan, path: Path) -> None:
    """Write a picture of every worker's time steps, the activations alive in each, and the messages that leave.

    Raises: ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    rows, messages = plan.schedule.table(plan.batches), plan.messages()
    steps, workers = len(messages), len(rows)
    width = min(max(7.0, 0.32 * steps), 40.0)
    figure = Figure(figsize=(width, 0.32 * workers + 4.2), layout="constrained", dpi=120)
    heights = [0.32 * workers + 0.2, 1.3, 1.3]
    grid, alive, sent = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    states = f", states {plan.schedule.states}" if plan.schedule.states != "replicated" else ""
    figure.suptitle(f"{workers} workers and stages, rule {plan.schedule.rule.name}{states}", fontsize=10)
    _draw_ops(grid, rows, plan.schedule.rule)
    _draw_live(alive, plan)
    _draw_messages(sent, messages)
    sent.set_xlim(0, steps)
    sent.set_xlabel("time step", fontsize=9)
    for axes in (grid, alive, sent):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_ops(axes: Any, rows: list[list[Op | None]], rule: Rule) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    forward, backward = (LinearSegmentedColormap.from_list("", colours) for colours in (_FORWARD, _BACKWARD))
    for op in (op for row in rows for op in row if op is not None):
        colour = (forward if op.is_forward else backward)((op.stage + 1) / rule.num_stages)
        axes.add_patch(Rectangle((op.step, op.worker), 1, 0.92, facecolor=colour, edgecolor="white", linewidth=0.8))
        weight = "bold" if rule.is_fresh(op.worker, op.stage) else "normal"
        if rule.num_stages <= _MAX_LABELLED_STAGES:
            axes.text(op.step + 0.5, op.worker + 0.48, op.label, ha="center", va="center", fontsize=6.5, weight=weight)
    axes.set_ylim(len(rows), -0.1)
    axes.set_yticks([worker + 0.46 for worker in range(len(rows))], [f"worker {w + 1}" for w in range(len(rows))])
    axes.set_title("bold: with the newest parameters", fontsize=8, loc="right")


def _draw_live(axes: Any, plan: CyclicPlan) -> None:
    plain, live = plan.plain.live_activations(plan.batches), plan.live()
    axes.stairs(plain, label="all at once", color="#999999", fill=True, alpha=0.9)
    axes.stairs(live, label=plan.schedule.rule.name, color="#0072b2", alpha=0.9)
    _label(axes, "live stage\nactivations", num_columns=2)


def _draw_messages(axes: Any, messages: list[list[Message]]) -> None:
    middles = [step + 0.5 for step in range(len(messages))]
    bottom = [0] * len(messages)
    for kind in KINDS:
        counts = [sum(message.kind == kind for message in step) for step in messages]
        if any(counts):
            axes.bar(middles, counts, 0.8, bottom, color=KIND_COLOURS[kind], label=kind)
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    _label(axes, "messages that\nleave", num_columns=3)


def _label(axes: Any, text: str, *, num_columns: int) -> None:
    axes.set_ylabel(text, fontsize=8)
    axes.margins(y=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=num_columns)


_BY_LANE = {
    PlanLane.COMPUTE: "#56b4e9", PlanLane.WIRE: "#d55e00", PlanLane.LOCAL: "#e69f00", PlanLane.TO_HOST: "#009e73",
    PlanLane.TO_DEVICE: "#7fc8ac", PlanLane.HOST: "#999999",
}  # fmt: skip
"""After the palette of Okabe and Ito."""
_MAX_LABELLED = 60
"""The most spans of a lane that get their names."""


def draw_timeline(estimate: Estimate, path: Path) -> None:
    """Write a picture of the step of an estimate that kept its spans.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    draw_timelines([estimate], path)


def draw_timelines(estimates: Sequence[Estimate], path: Path, title: str = "") -> None:
    """Write a picture of the steps of estimates that kept their spans, one under another, on one scale of seconds.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    lanes = [[lane for lane in PlanLane if any(span.lane is lane for span in each.spans)] for each in estimates]
    heights = [1.2 + 0.6 * len(each) for each in lanes]
    figure = Figure(figsize=(11, 0.3 + sum(heights)), layout="constrained", dpi=120)
    every = figure.subplots(len(estimates), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, estimate, own in zip(every[:, 0], estimates, lanes, strict=True):
        _draw_step(axes, estimate, own)
        axes.set_xlim(0, max(each.seconds for each in estimates))
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _draw_step(axes: Any, estimate: Estimate, lanes: Sequence[PlanLane]) -> None:
    from matplotlib.patches import Patch

    for row, lane in enumerate(lanes):
        work = [span for span in estimate.spans if span.lane is lane and not span.is_wait]
        for span in work:
            begin_s = span.begin_s - estimate.begin_s
            axes.barh(row, span.end_s - span.begin_s, left=begin_s, height=0.7, color=_BY_LANE[lane], edgecolor="white",
                      linewidth=0.3)  # fmt: skip
            is_wide = span.end_s - span.begin_s > 0.05 * estimate.seconds
            if is_wide and len(work) <= _MAX_LABELLED:
                middle_s = begin_s + (span.end_s - span.begin_s) / 2
                axes.text(middle_s, row, span.name, ha="center", va="center", fontsize=6, clip_on=True)
    row = lanes.index(PlanLane.COMPUTE)
    for span in estimate.spans:
        if span.is_wait:
            axes.barh(row, span.end_s - span.begin_s, left=span.begin_s - estimate.begin_s, height=0.7, fill=False,
                      edgecolor=_BY_LANE[span.lane], linewidth=0.6, hatch="////")  # fmt: skip
    waited = [lane for lane in lanes if estimate.waits_s.get(lane)]
    legend = [
        Patch(
            fill=False,
            edgecolor=_BY_LANE[lane],
            hatch="////",
            label=f"waits {estimate.waits_s[lane]:.3g} s: {lane.value}",
        )
        for lane in waited
    ]
    if legend:
        axes.legend(handles=legend, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False)
    axes.set_yticks(range(len(lanes)), [lane.value for lane in lanes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{estimate.label}: a step of {estimate.seconds:.3g} s, predicted", fontsize=9, loc="left")
