"""The table at the end of a comparison: Markdown with padded cells, so that it is readable on a terminal too."""

from collections.abc import Sequence

from laconic.compare.case import JOBS, REFERENCE, STRATEGIES
from laconic.compare.result import Result
from laconic.lab import format_rate

_COLUMNS = (
    "job", "wire", "strategy", "s / step", "x FSDP2", "wire MB / step", "x FSDP2", "local MB / step",
    "device MB", "host MB", "loss",
)  # fmt: skip
_NUM_TEXT_COLUMNS = 3

LEGEND = """\
FSDP2: with a true ring reduce-scatter. wire MB: bytes that each node sends in one optimizer step from the second on, by
the interface's counters, with headers. local MB: bytes that the ranks of a node send to each other, likewise.
device MB: peak of torch's allocator on a rank: parameters, gradients, optimizer states, activations, transfers.
host MB: cached node shards, per node. loss: last step, mean over ranks."""

LEGEND_NO_WIRE = """\
no wire: the engine counts wire MB and local MB, and baselines have no count. Otherwise as with a wire:
device MB: peak of torch's allocator on a rank. host MB: cached node shards, per node. loss: last step."""


def render(results: Sequence[Result]) -> str:
    """Return a row per result, in order. Ratios are to FSDP2 in the same job at the same rate, if it was run."""
    fsdp2 = [result for result in reversed(results) if result.strategy == REFERENCE]
    references = {(result.job, result.rate_bits_per_s): result for result in fsdp2}  # the first of equal runs
    rows = [_row(result, references.get((result.job, result.rate_bits_per_s))) for result in results]
    return markdown(_COLUMNS, rows, num_text_columns=_NUM_TEXT_COLUMNS)


def _row(result: Result, reference: Result | None) -> list[str]:
    moved, reference_moved = result.moved_bytes, reference.moved_bytes if reference else None
    return [
        JOBS[result.job],
        "unshaped" if result.rate_bits_per_s is None else format_rate(result.rate_bits_per_s),
        STRATEGIES[result.strategy].label,
        f"{result.step_s:.3f}",
        f"{result.step_s / reference.step_s:.2f}" if reference else "-",
        megabytes(moved),
        f"{moved / reference_moved:.3f}" if moved is not None and reference_moved else "-",
        megabytes(result.moved_local_bytes),
        megabytes(result.allocated_peak_bytes),
        megabytes(result.host_bytes_per_node),
        f"{result.loss:.4f}",
    ]


def megabytes(nbytes: float | None) -> str:
    """Return bytes in MB, with fewer digits the more there are; "-" for None."""
    if nbytes is None:
        return "-"
    return f"{nbytes / 1e6:.1f}" if nbytes >= 1e6 or nbytes == 0 else f"{nbytes / 1e6:.3f}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int) -> str:
    """Return a Markdown table with padded cells. The first `num_text_columns` are aligned left, the others right."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * (width + 1) + ("-" if index < num_text_columns else ":") for index, width in enumerate(widths))
    return "\n".join([line(columns), f"|{'|'.join(rule)}|", *(line(row) for row in rows)])
