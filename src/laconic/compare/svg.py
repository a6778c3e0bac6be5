"""Small pictures as SVG inside a page of HTML: bars, timelines and lines.

Colours are classes of the page's style sheet, so that a reader's dark mode reaches them. A picture has a title and a
description for readers who do not see it. The width of a picture is that of a phone, so its text stays readable there.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 400  # units; the style sheet scales it
_LINE, _BAR = 20, 13  # the height of a row, and of the bar in it
_LABEL = 140  # the room for names at the left
_NUMBER = 62  # the room for a number after the longest bar
_ids = itertools.count()

DASHES = ("", "7 3", "2 2", "9 3 2 3", "4 4")
"""Dash patterns of lines, in turn, so that lines differ without their colours."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: a value, and what was expected."""

    label: str
    colour: str
    """A class of the style sheet."""
    value: float | None
    """None where nothing was measured."""
    expected: float | None = None
    """A mark at the value that was expected; None without an expectation."""


@dataclass(frozen=True, kw_only=True)
class TimelineBar:
    """One step of a timeline."""

    seconds: float
    wait_s: float | None
    """The part of the step in which the rank waited for the wire; None if nothing counts it."""
    is_timed: bool
    """Whether the step counts in the table."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart over steps."""

    label: str
    colour: str
    values: Sequence[float]


def bars(rows: Sequence[Bar], *, title: str, unit: str) -> str:
    """Return horizontal bars from zero, each with its number."""
    largest = max((value for row in rows for value in (row.value, row.expected) if value is not None), default=0.0)
    scale = (_WIDTH - _LABEL - _NUMBER) / (largest or 1.0)
    parts = []
    for index, row in enumerate(rows):
        top = index * _LINE
        parts.append(_text(_LABEL - 6, top + 14, row.label, anchor="end"))
        if row.value is None:
            parts.append(_text(_LABEL + 4, top + 14, "not measured", kind="faint"))
        else:
            tip = f"{row.label}: {row.value:.4g} {unit}"
            parts.append(_rect(_LABEL, top + 3, row.value * scale, _BAR, f"fill {row.colour}", tip))
            end = _LABEL + max(row.value, row.expected or 0.0) * scale
            parts.append(_text(end + 4, top + 14, f"{row.value:.3g}", kind="number"))
        if row.expected is not None:
            x = _LABEL + row.expected * scale
            tip = f"{row.label}: predicted {row.expected:.4g} {unit}"
            parts.append(_rect(x - 1, top + 1, 2, _BAR + 4, "mark", tip))
    words = "; ".join(f"{row.label} {'not measured' if row.value is None else f'{row.value:.3g}'}" for row in rows)
    return _picture(len(rows) * _LINE + 2, parts, title=title, description=f"{unit}: {words}")


def timelines(rows: Sequence[tuple[str, str, Sequence[TimelineBar]]], *, title: str) -> str:
    """Return a row of steps, one after the other in time, for each (name, class of its colour, steps)."""
    longest = max((sum(step.seconds for step in steps) for _, _, steps in rows), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL - 8) / longest
    parts = []
    for index, (label, colour, steps) in enumerate(rows):
        top, start = index * _LINE, 0.0
        parts.append(_text(_LABEL - 6, top + 14, label, anchor="end"))
        for step in steps:
            left, width = _LABEL + start * scale, step.seconds * scale
            parts.append(
                _rect(
                    left, top + 3, width, _BAR, f"fill step {colour}{'' if step.is_timed else ' untimed'}", step.label
                )
            )
            if step.wait_s:
                waiting = min(step.wait_s, step.seconds) * scale
                parts.append(_rect(left + width - waiting, top + 3 + _BAR - 5, waiting, 5, "wait", step.label))
            start += step.seconds
    bottom = len(rows) * _LINE + 4
    for tick in _ticks(longest):
        x = _LABEL + tick * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 12, f"{tick:g} s", anchor="middle", kind="faint"))
    words = "; ".join(
        f"{label} {len(steps)} steps in {sum(step.seconds for step in steps):.3g} s" for label, _, steps in rows
    )
    return _picture(bottom + 18, parts, title=title, description=words)


def lines(rows: Sequence[Line], *, title: str, unit: str) -> str:
    """Return lines over the steps 1, 2, ..., with a legend below."""
    known = [value for row in rows for value in row.values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    steps = max((len(row.values) for row in rows), default=1)
    left, right, top, bottom = 44, _WIDTH - 10, 10, 190
    across = (right - left) / max(1, steps - 1)
    down = (bottom - top) / (high - low)
    parts = []
    for tick in _ticks(high - low, start=low):
        y = bottom - (tick - low) * down
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 5, y + 4, f"{tick:.4g}", anchor="end", kind="faint"))
    for step in sorted({1, (steps + 1) // 2, steps}):
        anchor = "end" if step == steps > 1 else "middle"
        parts.append(_text(left + (step - 1) * across, bottom + 14, f"step {step}", anchor=anchor, kind="faint"))
    for index, row in enumerate(rows):
        points = " ".join(
            f"{left + position * across:.1f},{bottom - (value - low) * down:.1f}"
            for position, value in enumerate(row.values)
            if math.isfinite(value)
        )
        dash = DASHES[index % len(DASHES)]
        parts.append(
            f'<polyline class="line {row.colour}" points="{points}" stroke-dasharray="{dash or "none"}">'
            f"<title>{escape(row.label)}</title></polyline>"
        )
        x, y = left + (index % 2) * 175, bottom + 34 + index // 2 * 16
        parts.append(
            f'<line class="line {row.colour}" x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" '
            f'stroke-dasharray="{dash or "none"}"/>'
        )
        parts.append(_text(x + 31, y, row.label))
    words = "; ".join(f"{row.label} from {row.values[0]:.4g} to {row.values[-1]:.4g}" for row in rows if row.values)
    height = bottom + 30 + -(-len(rows) // 2) * 16
    return _picture(height, parts, title=title, description=f"{unit}: {words}")


def _picture(height: float, parts: Sequence[str], *, title: str, description: str) -> str:
    number = next(_ids)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(title)}</title><desc id="d{number}">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:g}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(span: float, start: float = 0.0) -> Iterator[float]:
    """Round values within [start, start + span], three to six of them."""
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough), power)
    tick = math.ceil(start / step - 1e-9) * step
    while tick <= start + span + step * 1e-9:
        yield round(tick, 12)
        tick += step
