"""The report of a comparison: one page of HTML that needs no network, no script and no font of its own."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from laconic.compare.case import JOBS, REFERENCE, STRATEGIES, WATCHED_STEP
from laconic.compare.result import Prediction, Result
from laconic.compare.svg import Bar, Line, TimelineBar, bars, lines, timelines
from laconic.compare.table import megabytes
from laconic.lab import format_rate

_TIMELINE = """\
Every block is one step, in the order in which they ran, on rank 0's clock. Pale blocks are not timed: the first step
fills caches, and memory is watched in step {watched}, which slows it down. A light stripe at the end of a block is the
part of the step in which a rank waited for the wire, as laconic's engine counts it. The other strategies have no such
count."""


class _Page(Template):
    delimiter = "@@"
    idpattern = "(?a:title|light|dark|classes|machine|command|main|footer)"


def render_report(results: Sequence[Result], *, title: str, machine: str, command: str, legend: str) -> str:
    """Return the page. A section for each job and rate has a table, bars, timelines and losses.

    Where a result has a prediction, it stands below the measurement, and is a mark in the bars.
    """
    shown = [name for name in STRATEGIES if any(result.strategy == name for result in results)]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((JOBS[result.job], _rate(result)), []).append(result)
    sections = [_section(f"{job}, {rate}", group) for (job, rate), group in groups.items()]
    notes = "".join(
        f'<dt><span class="key {_css(name)}"></span> {escape(STRATEGIES[name].label)}</dt>'
        f"<dd>{escape(STRATEGIES[name].note)}</dd>"
        for name in shown
    )
    page = _Page((files("laconic.compare") / "report.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(title),
        light=_variables(0),
        dark=_variables(1),
        classes="\n".join(f".{_css(name)} {{ --c: var(--{_css(name)}); }}" for name in STRATEGIES),
        machine=escape(machine),
        command=escape(command),
        main="\n".join([*sections, f'<section><h2>The strategies</h2><dl class="notes">{notes}</dl></section>']),
        footer=escape(legend),
    )


def _section(title: str, results: Sequence[Result]) -> str:
    names = [_label(result) for result in results]
    timeline = timelines(
        [(name, _css(each.strategy), list(_segments(each))) for name, each in zip(names, results, strict=True)],
        title=f"Timelines: {title}",
    )
    losses = lines(
        [
            Line(label=name, colour=_css(each.strategy), values=each.losses)
            for name, each in zip(names, results, strict=True)
        ],
        title=f"Losses: {title}",
        unit="loss, mean over ranks",
    )
    seconds = bars(
        [
            Bar(
                label=name, colour=_css(each.strategy), value=each.step_s,
                expected=each.prediction.step_s if each.prediction else None,
            )
            for name, each in zip(names, results, strict=True)
        ],
        title=f"Seconds per step: {title}", unit="s",
    )  # fmt: skip
    moved = bars(
        [
            Bar(
                label=name, colour=_css(each.strategy), value=_in_mega(each.moved_bytes),
                expected=_in_mega(each.prediction.wire_bytes) if each.prediction else None,
            )
            for name, each in zip(names, results, strict=True)
        ],
        title=f"MB on the wire per node and step: {title}", unit="MB",
    )  # fmt: skip
    explained = f'<figcaption class="faint">{_TIMELINE.format(watched=WATCHED_STEP)}</figcaption>'
    return f"""<section>
<h2>{escape(title)}</h2>
{_table(title, results)}
<div class="charts">
<figure><h3>Seconds per step</h3>{seconds}</figure>
<figure><h3>MB on the wire per node and step</h3>{moved}</figure>
<figure><h3>Timelines</h3>{timeline}{explained}</figure>
<figure><h3>Losses</h3>{losses}</figure>
</div>
</section>"""


_COLUMNS = (
    "strategy", "seconds per step", "seconds, × FSDP2", "wire, MB per node and step", "wire, × FSDP2",
    "inside a node, MB per step",
    "device, MB at most", "host, MB per node", "waited for the wire, s per step", "loss of the last step",
    "largest difference of a loss to FSDP2",
)  # fmt: skip


def _table(title: str, results: Sequence[Result]) -> str:
    reference = next((result for result in results if result.strategy == REFERENCE), None)
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in _COLUMNS)
    body = "".join(_row(result, reference) for result in results)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(title)}: measurements" tabindex="0">'
        f"<table><caption>{escape(title)}: measurements</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _row(result: Result, reference: Result | None) -> str:
    expected = result.prediction or Prediction()
    step_s, moved = (reference.step_s, reference.moved_bytes) if reference else (None, None)
    gap = None if reference is None else max(
        (abs(own - other) for own, other in zip(result.losses, reference.losses, strict=False)), default=None
    )  # fmt: skip
    texts = [
        _cell(f"{result.step_s:.3f}", result.step_s, expected.step_s),
        _cell(_ratio(result.step_s, step_s, 2)),
        _cell(megabytes(result.moved_bytes), result.moved_bytes, expected.wire_bytes, scale=1e6),
        _cell(_ratio(result.moved_bytes, moved, 3)),
        _cell(megabytes(result.moved_local_bytes)),
        _cell(
            megabytes(result.allocated_peak_bytes), result.allocated_peak_bytes,
            expected.allocated_peak_bytes, scale=1e6,
        ),
        _cell(
            megabytes(result.host_bytes_per_node), result.host_bytes_per_node,
            expected.host_bytes_per_node, scale=1e6,
        ),
        _cell("–" if result.wait_s is None else f"{result.wait_s:.3f}"),
        _cell(f"{result.loss:.4f}"),
        _cell("–" if gap is None else f"{gap:.1e}" if gap else "0"),
    ]  # fmt: skip
    name = f'<span class="key {_css(result.strategy)}"></span> {escape(_label(result))}'
    labels = _COLUMNS[1:]  # a phone shows them beside each measurement
    cells = [f'<td data-label="{escape(label)}">{text}</td>' for label, text in zip(labels, texts, strict=True)]
    return f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>'


def _cell(text: str, value: float | None = None, expected: float | None = None, *, scale: float = 1.0) -> str:
    """A measurement and, below it, the prediction and how far it is off."""
    if expected is None:
        return escape(text)
    error = f", {expected / value - 1:+.1%}" if value else ""
    return f"{escape(text)}<small>predicted {expected / scale:.4g}{error}</small>"


def _ratio(value: float | None, reference: float | None, digits: int) -> str:
    return f"{value / reference:.{digits}f}" if value is not None and reference else "–"


def _segments(result: Result) -> Iterator[TimelineBar]:
    untimed = len(result.all_step_times_s) - len(result.step_times_s)
    waits = result.all_waits_s or (None,) * len(result.all_step_times_s)
    sent = result.all_wire_bytes or (None,) * len(result.all_step_times_s)
    for index, (seconds, wait_s, nbytes) in enumerate(zip(result.all_step_times_s, waits, sent, strict=True)):
        words = [f"{_label(result)}, step {index + 1}: {seconds:.3f} s"]
        words += [] if wait_s is None else [f"waited {wait_s:.3f} s for the wire"]
        words += [] if nbytes is None else [f"{megabytes(nbytes)} MB on the wire"]
        yield TimelineBar(seconds=seconds, wait_s=wait_s, is_timed=index >= untimed, label=", ".join(words))


def _label(result: Result) -> str:
    return STRATEGIES[result.strategy].label


def _rate(result: Result) -> str:
    return "unshaped wire" if result.rate_bits_per_s is None else f"wire of {format_rate(result.rate_bits_per_s)}/s"


def _in_mega(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 1e6


def _css(strategy: str) -> str:
    """The name of the strategy's class and variable in the style sheet."""
    return f"s-{strategy.replace('+', 'p')}"


def _variables(background: int) -> str:
    """The colours of all strategies on white (0) or on a dark background (1)."""
    return " ".join(f"--{_css(name)}: {each.colours[background]};" for name, each in STRATEGIES.items())
