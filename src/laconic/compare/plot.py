"""The picture at the end of a comparison: seconds and megabytes per step, grouped by rate."""

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import Any

from laconic.compare.case import JOBS, STRATEGIES
from laconic.compare.result import Result
from laconic.lab import format_rate

_METRICS: tuple[tuple[str, Callable[[Result], float]], ...] = (
    ("seconds per step", lambda result: result.step_s),
    (
        "MB on the wire per node and step",
        lambda result: nan if result.moved_bytes is None else result.moved_bytes / 1e6,
    ),
)


def save_plot(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Write a PNG: a row of axes for each measure, a column for each job, a group of bars for each rate.

    Raises: ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    jobs = list(dict.fromkeys(result.job for result in results))
    figure = Figure(figsize=(max(5.0, 4.6 * len(jobs)), 6.4), layout="constrained", dpi=150)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(_METRICS), len(jobs), squeeze=False)
    for column, job in enumerate(jobs):
        of_job = [result for result in results if result.job == job]
        for row, (label, value) in enumerate(_METRICS):
            _bars(axes[row, column], of_job, value)
            if column == 0:
                axes[row, column].set_ylabel(label, fontsize=9)
            if row == 0:
                axes[row, column].set_title(JOBS[job], fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    figure.savefig(path)


def _bars(axes: Any, results: Sequence[Result], value: Callable[[Result], float]) -> None:
    rates = list(dict.fromkeys(result.rate_bits_per_s for result in results))
    strategies = [name for name in STRATEGIES if any(result.strategy == name for result in results)]
    width = 0.8 / len(strategies)
    for index, strategy in enumerate(strategies):
        shown = [result for result in results if result.strategy == strategy]
        offset = (index - (len(strategies) - 1) / 2) * width
        bars = axes.bar(
            [rates.index(result.rate_bits_per_s) + offset for result in shown], list(map(value, shown)),
            0.92 * width, color=STRATEGIES[strategy].colour, label=STRATEGIES[strategy].label,
        )  # fmt: skip
        axes.bar_label(bars, fmt="{:.3g}", fontsize=7, padding=1)
    labels = ["unshaped wire" if rate is None else f"{format_rate(rate)}/s" for rate in rates]
    axes.set_xticks(range(len(rates)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.14)
    axes.spines[["top", "right"]].set_visible(False)
    if len(rates) == 1:
        axes.set_xlim(-0.75, 0.75)
