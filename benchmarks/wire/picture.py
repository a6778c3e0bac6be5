"""The picture of the bytes of each level: formulas from 2 to 64 nodes of 1 to 8 ranks, and the runs in the lab."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.wire.bench import FLOAT32_BYTES
from laconic.compare.case import STRATEGIES
from laconic.compare.result import Result
from tests.support.step_bytes import StepBytes, step_bytes

NODES = (2, 4, 8, 16, 32, 64)
LOCAL = (1, 2, 4, 8)
_LINES: dict[str, dict[str, Any]] = {
    "fsdp2-gloo": {"color": "#b0b0b0", "linestyle": ":"},
    "fsdp2": {"color": "#4d4d4d"},
    "none": {"color": "#f2c879"},
    "ddp": {"color": "#a3c1da"},
    "host": {"color": "#d95f02", "linewidth": 3.0},
    "hsdp": {"color": "#4a78a8", "linestyle": "--"},  # above `host`, which it equals
}
"""The strategies in drawing order."""


def in_weights(strategy: str, nodes: int, local: int) -> StepBytes:
    """Return the bytes of full training in multiples of the weights."""
    return step_bytes(strategy, nodes=nodes, local=local, weights_bytes=1.0, gradients_bytes=1.0)


def save(results: Iterable[Result], path: Path) -> None:
    """Write a PNG: a row for each level, a column for each number of ranks per node, a mark for each measured run."""
    from matplotlib.figure import Figure

    full = [result for result in results if result.job == "full" and result.strategy in _LINES]
    figure = Figure(figsize=(12.0, 6.4), layout="constrained", dpi=150)
    figure.suptitle(
        "Full training: bytes that a node moves per step, in multiples of the weights. Lines: formula; marks: measured",
        fontsize=10,
    )
    axes = figure.subplots(2, len(LOCAL), sharex=True, squeeze=False)
    for column, local in enumerate(LOCAL):
        for row, level in enumerate(("node", "local")):
            _draw(axes[row, column], level, local, [result for result in full if result.num_local == local])
        axes[0, column].set_title(f"{local} rank{'s' * (local > 1)} per node", fontsize=9)
        axes[1, column].set_xlabel("nodes", fontsize=8)
    axes[0, 0].set_ylabel("over the wire", fontsize=9)
    axes[1, 0].set_ylabel("between ranks of a node", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path)


def _draw(axes: Any, level: str, local: int, results: Sequence[Result]) -> None:
    for strategy, style in _LINES.items():
        values = [getattr(in_weights(strategy, nodes, local), level) for nodes in NODES]
        axes.plot(NODES, values, label=STRATEGIES[strategy].label, **{"linewidth": 1.5, **style})
    for result in results:
        moved = result.wire_bytes if level == "node" else result.local_bytes
        if moved is not None and result.num_nodes in NODES:
            weights_bytes = result.num_parameters * FLOAT32_BYTES
            color = _LINES[result.strategy]["color"]
            axes.plot(result.num_nodes, moved / weights_bytes, "o", color=color, markersize=5, markeredgecolor="black")
    axes.set_xscale("log", base=2)
    axes.set_xticks(NODES, list(map(str, NODES)))
    axes.set_ylim(0.0, max(1.0, axes.get_ylim()[1]))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
