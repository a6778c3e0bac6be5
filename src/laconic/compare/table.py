"""The table a comparison ends with: Markdown, aligned so that it reads on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.compare.case import JOBS, REFERENCE, STRATEGIES
from laconic.compare.result import Result
from laconic.lab import format_rate

_COLUMNS = (
    "job", "wire", "strategy", "s / step", "x FSDP2", "wire MB / step", "x FSDP2", "device MB", "host MB", "loss",
)  # fmt: skip
_NUM_TEXT_COLUMNS = 3

LEGEND = """\
wire MB: sent by each node in one optimizer step, from the second on, by the interface's counters, headers included.
device MB: the most torch's allocator held on a rank: parameters, gradients, optimizer, activations, transfers.
host MB: cached slices, per node. loss: of the last step, mean over ranks."""

LEGEND_NO_WIRE = """\
no wire: wire MB is what the engine counted, and baselines do not count. Otherwise as with a wire:
device MB: the most torch's allocator held on a rank. host MB: cached slices, per node. loss: of the last step."""


def render(results: Sequence[Result]) -> str:
    """One row per result, in their order, with ratios to FSDP2 in the same job at the same rate."""
    rows = [_row(result, reference_of(result, results)) for result in results]
    return markdown(_COLUMNS, rows, num_text_columns=_NUM_TEXT_COLUMNS)


def reference_of(result: Result, results: Sequence[Result]) -> Result | None:
    """FSDP2 in the same job at the same rate, if it was run."""
    same = (
        other
        for other in results
        if (other.job, other.rate_bits_per_s) == (result.job, result.rate_bits_per_s) and other.strategy == REFERENCE
    )
    return next(same, None)


def moved_bytes(result: Result) -> float | None:
    """Per node and step: by the interface, or as counted where there is none."""
    return result.wire_bytes if result.wire_bytes is not None else result.counted_bytes


def _row(result: Result, reference: Result | None) -> list[str]:
    moved = moved_bytes(result)
    reference_moved = moved_bytes(reference) if reference else None
    rate = format_rate(result.rate_bits_per_s)
    return [
        JOBS[result.job],
        "unshaped" if rate == "none" else rate,
        STRATEGIES[result.strategy][0],
        f"{result.step_s:.3f}",
        f"{result.step_s / reference.step_s:.2f}" if reference else "-",
        _megabytes(moved),
        f"{moved / reference_moved:.3f}" if moved is not None and reference_moved else "-",
        _megabytes(result.allocated_peak_bytes),
        _megabytes(result.host_bytes_per_node),
        f"{result.loss:.4f}",
    ]


def _megabytes(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 1e6:.1f}" if nbytes >= 1e6 or nbytes == 0 else f"{nbytes / 1e6:.3f}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int) -> str:
    """A Markdown table with padded cells; all but the first `num_text_columns` are aligned right."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * (width + 1) + ("-" if index < num_text_columns else ":") for index, width in enumerate(widths))
    return "\n".join([line(columns), f"|{'|'.join(rule)}|", *(line(row) for row in rows)])
