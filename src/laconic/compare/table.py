"""The tables of a comparison: one that grows on the screen, and one in Markdown for its end."""

from collections.abc import Iterable, Iterator, Sequence

from laconic.compare.case import JOBS, REFERENCE, STRATEGIES
from laconic.compare.markdown import markdown
from laconic.compare.result import Result
from laconic.lab import format_rate

COLUMNS = (
    "job", "wire", "strategy", "tokens / s", "s / step", "x FSDP2", "wire MB / step", "x FSDP2",
    "local MB / step", "device MB", "host MB", "loss", "largest gap", "waits, s / step",
)  # fmt: skip
NUM_TEXT_COLUMNS = 3
_ON_SCREEN = [*range(2, 8), *range(9, 14)]
"""The columns that a terminal has room for."""
_HEAD = ("", "tokens/s", "s/step", "xFSDP2", "wire MB", "xFSDP2", "device MB", "host MB", "loss", "gap", "waits")
_BAR, _BAR_CELLS = "\u2588", 8
"""A cell of the bar for a step's seconds, and the length of FSDP2's."""

LEGEND = """\
FSDP2: with a true ring reduce-scatter, and transfers beside compute, as on NCCL. Gloo's own reduce-scatter is an
all-reduce, which moves gradients twice. wire MB: bytes that each node sends in one optimizer step from the second on,
by the interface's counters, with headers. local MB: bytes that the ranks of a node send to each other, likewise.
device MB: peak of torch's allocator on a rank: parameters, gradients, optimizer states, activations, transfers.
host MB: cached node shards, per node. loss: last step, mean over ranks. gap: the largest of a step's loss to FSDP2's.
waits: for the wire, as laconic's engine counts it."""

LEGEND_NO_WIRE = """\
no wire: the engine counts wire MB and local MB, and baselines have no count. Otherwise as with a wire:
device MB: peak of torch's allocator on a rank. host MB: cached node shards, per node. loss: last step."""


def render(results: Sequence[Result]) -> str:
    """Return the table in Markdown: `table_rows`."""
    return markdown(COLUMNS, table_rows(results), num_text_columns=NUM_TEXT_COLUMNS)


def table_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a row per result, in order. Ratios are to FSDP2 in the same job at the same rate, if it was run."""
    fsdp2 = [result for result in reversed(results) if result.strategy == REFERENCE]
    references = {(result.job, result.rate_bits_per_s): result for result in fsdp2}  # the first of equal runs
    return [_row(result, references.get((result.job, result.rate_bits_per_s))) for result in results]


def _row(result: Result, reference: Result | None) -> list[str]:
    moved, reference_moved = result.moved_bytes, reference.moved_bytes if reference else None
    return [
        JOBS[result.job],
        _wire(result),
        STRATEGIES[result.strategy].label,
        f"{result.tokens / result.step_s:,.0f}" if result.tokens else "-",
        f"{result.step_s:,.3f}",
        f"{result.step_s / reference.step_s:.2f}" if reference else "-",
        megabytes(moved),
        f"{moved / reference_moved:.3f}" if moved is not None and reference_moved else "-",
        megabytes(result.moved_local_bytes),
        megabytes(result.allocated_peak_bytes),
        megabytes(result.host_bytes_per_node),
        f"{result.loss:.4f}",
        _largest_gap(result, reference) if reference else "-",
        "-" if result.wait_s is None else f"{result.wait_s:.3f}",
    ]


def _largest_gap(result: Result, reference: Result) -> str:
    gap = max(abs(own - other) for own, other in zip(result.losses, reference.losses, strict=False))
    return f"{gap:.1e}" if gap else "0"


def _wire(result: Result) -> str:
    return "unshaped" if result.rate_bits_per_s is None else format_rate(result.rate_bits_per_s)


def megabytes(nbytes: float | None) -> str:
    """Return bytes in MB, with fewer digits the more there are; "-" for None."""
    if nbytes is None:
        return "-"
    return f"{nbytes / 1e6:.1f}" if nbytes >= 1e6 or nbytes == 0 else f"{nbytes / 1e6:.3f}"


class ScreenTable:
    """A table for a terminal, whose rows are printed as they come, with a bar for the seconds of a step.

    Args:
        strategies: the strategies of all rows that may come.
        device_limit_bytes: the device memory that a rank may use; each row says whether the strategy fits.
    """

    def __init__(self, strategies: Iterable[str] = STRATEGIES, *, device_limit_bytes: float | None = None) -> None:
        self._limit_bytes = device_limit_bytes
        self._widths = [max(len(STRATEGIES[name].label) for name in strategies), 8, 7, 7, 8, 8, 9, 7, 7, 7, 6]
        self._group: tuple[str, str] | None = None
        self._reference: Result | None = None
        """FSDP2's row of the group, or the first."""

    def add(self, result: Result) -> Iterator[str]:
        """The lines of a row; of the head, too, if the row is of another job or rate than the one before."""
        group = JOBS[result.job], _wire(result)
        if group != self._group:
            self._group, self._reference = group, None
            limit = "" if self._limit_bytes is None else f"; a rank may use {megabytes(self._limit_bytes)} MB"
            yield from ("", f"{group[0]}, {group[1]}{limit}")
            yield self._line(_HEAD)
        if self._reference is None or result.strategy == REFERENCE:
            self._reference = result
        row = _row(result, self._reference if self._reference.strategy == REFERENCE else None)
        bar = _BAR * max(1, round(_BAR_CELLS * min(2.0, result.step_s / self._reference.step_s)))
        verdict = "" if fits(result, self._limit_bytes) else "  does not fit"
        yield f"{self._line([row[column] for column in _ON_SCREEN])}  {bar}{verdict}"

    def _line(self, cells: Sequence[str]) -> str:
        first, *others = zip(cells, self._widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def fits(result: Result, device_limit_bytes: float | None) -> bool:
    """Whether the run would fit into that much device memory, if anybody knows."""
    peak_bytes = result.allocated_peak_bytes
    return device_limit_bytes is None or peak_bytes is None or peak_bytes <= device_limit_bytes


def savings_in_words(results: Sequence[Result], device_limit_bytes: float | None = None) -> str:
    """What laconic's quickest strategies save in the first job at the first rate, and when they would save nothing.

    Empty without FSDP2.
    """
    first = [
        each for each in results if each.job == results[0].job and each.rate_bits_per_s == results[0].rate_bits_per_s
    ]
    reference = next((each for each in first if each.strategy == REFERENCE), None)
    own = sorted((each for each in first if STRATEGIES[each.strategy].is_own), key=lambda each: each.step_s)
    if reference is None or not own:
        return ""
    quickest = {bool(STRATEGIES[each.strategy].inexact): each for each in reversed(own)}
    said = [_saving(quickest[is_inexact], reference) for is_inexact in (False, True) if is_inexact in quickest]
    others = [each for each in first if each.strategy in ("hsdp", "ddp")]
    excluded = [STRATEGIES[each.strategy].label for each in others if not fits(each, device_limit_bytes)]
    why = f"{' and '.join(excluded)} would not fit. " if excluded else ""
    return (
        f"{'; '.join(said)}. {why}On one node laconic saves nothing; where a node has room for all weights, gradients "
        "and states, HSDP sends as little as exact crossings do, and where a rank has, DDP is simpler."
    )


def _saving(result: Result, reference: Result) -> str:
    seconds = f"{result.step_s / reference.step_s:.2f} of {STRATEGIES[REFERENCE].label}'s seconds"
    wire = ""
    if result.moved_bytes is not None and reference.moved_bytes:
        wire = f" and {result.moved_bytes / reference.moved_bytes:.2f} of its bytes on the wire"
    loss = STRATEGIES[result.strategy].inexact and f", loss {result.loss:.3f} for {reference.loss:.3f}"
    return f"{STRATEGIES[result.strategy].label}: {seconds}{wire}{loss}"
