"""Combines the records of all ranks into the figures of the cluster, and passes the figures to the loggers.

Nothing here runs inside a timed step: a few small collectives between steps combine the records of several steps.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import WIRE_LEVELS
from laconic.islands.exchange import SyncReport
from laconic.train.loggers import Logger
from laconic.train.records import KINDS, ClusterStep, StepRecord, SyncMetrics

_ON_WIRE = [kind for kind, (level, _) in KINDS.items() if level in WIRE_LEVELS]

_Figures = Mapping[str, float | None]
_SYNC_MEANS = [
    item.name
    for item in dataclasses.fields(SyncReport)
    if item.name not in ("step", "fragment", "sent_bytes", "num_islands")
]


class RunRecorder:
    """Collects the records of this rank, and keeps the figures of the cluster."""

    def __init__(
        self,
        loggers: Sequence[Logger],
        reduce: Callable[[Sequence[StepRecord]], Sequence[ClusterStep]],
        write: Callable[[Callable[[], None]], object],
    ) -> None:
        """`loggers` is empty except on rank 0.

        `reduce` is `reduce_records` with all arguments but the records. `write` calls an action that writes to files,
        on rank 0, and raises its error on all ranks. Collective.
        """
        self.steps: list[ClusterStep] = []  # the figures of all steps that are combined
        self.evaluations: list[dict[str, float]] = []
        """The figures of all evaluations so far, each with its step."""
        self._loggers, self._reduce, self._write = loggers, reduce, write
        self._pending: list[StepRecord] = []

    @property
    def num_pending(self) -> int:
        """The number of records that are not combined yet."""
        return len(self._pending)

    def add(self, record: StepRecord) -> None:
        """Keep a record of this rank until the next `flush`."""
        self._pending.append(record)

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Keep and log the figures of an evaluation after `step`, which are the same on all ranks. Collective."""
        self.evaluations.append({"step": step, **values})

        def log() -> None:
            for logger in self._loggers:
                logger.evaluation(step, values)

        self._write(log)

    def flush(self) -> None:
        """Combine the pending records of all ranks, and log the figures. Collective."""
        if not self._pending:
            return
        steps = self._reduce(self._pending)
        self._pending.clear()
        self.steps.extend(steps)

        def log() -> None:
            for step, logger in itertools.product(steps, self._loggers):
                logger.step(step)

        self._write(log)

    def close(self) -> None:
        """Close the loggers. They have written everything, so no error of a file can lose anything here."""
        for logger in self._loggers:
            with contextlib.suppress(OSError):
                logger.close()


def reduce_records(
    records: Sequence[StepRecord],
    ranks: RankInfo,
    group: dist.ProcessGroup,
    *,
    tokens_after: Callable[[int], int],
    steps_per_sync: int | None = None,
) -> list[ClusterStep]:
    """Combine the records of the same steps on all ranks. `group` has all ranks and a backend for CPU tensors.

    Collective: two small all-reduces, whatever the number of steps.
    `tokens_after` gives the tokens of the first n global batches; `steps_per_sync` is None without islands.
    """
    if not records:
        return []
    reports = [report for record in records for report in record.result.syncs]
    results = [record.result for record in records]
    losses = [{"grad_norm": own.grad_norm, "loss": own.loss, "num_losses": own.loss is not None} for own in results]
    of_steps: list[_Figures] = [{**record.sums, **loss} for record, loss in zip(records, losses, strict=True)]
    of_syncs = [{name: getattr(report, name) for name in (*_SYNC_MEANS, "sent_bytes")} for report in reports]
    sums = _all_reduce([*of_steps, *of_syncs], dist.ReduceOp.SUM, group)
    step_sums, sync_sums = sums[: len(records)], sums[len(records) :]
    peaks = _all_reduce([record.peaks for record in records], dist.ReduceOp.MAX, group)

    def tokens_in(last: int, num_steps: int) -> int:
        """The tokens of `num_steps` steps, of which the last is the `last`-th of the run."""
        return tokens_after(last) - tokens_after(max(last - num_steps, 0))

    syncs = [
        SyncMetrics(
            step=report.step,
            fragment=report.fragment,
            sent_bytes=int(total["sent_bytes"]),
            num_islands=report.num_islands,
            bytes_per_token=total["sent_bytes"] / tokens_in(report.step, steps_per_sync or 1),
            **{name: total[name] / ranks.world_size for name in _SYNC_MEANS},
        )
        for report, total in zip(reports, sync_sums, strict=True)
    ]
    has_islands = steps_per_sync is not None  # then each has its own gradient norm
    return [
        ClusterStep(
            step=record.step,
            tokens=tokens_after(record.step),
            loss=total["loss"] / total["num_losses"],
            loss_scale=record.result.loss_scale,
            skipped_steps=record.result.skipped_steps,
            grad_norm=total["grad_norm"] / ranks.world_size if has_islands else record.result.grad_norm,
            lr=record.lr,
            step_s=record.step_s,
            data_s=record.data_s,
            tokens_per_s=tokens_in(record.step, 1) / record.step_s,
            wait_s=None if total["wait_s"] is None else total["wait_s"] / ranks.world_size,
            wire_bytes=None if total["wait_s"] is None else sum(int(total[kind]) for kind in _ON_WIRE),
            traffic_bytes={kind: int(total[kind]) for kind in KINDS if total[kind]},
            interface_sent_bytes=_whole(total["interface_sent_bytes"]),
            loopback_bytes=_whole(total["loopback_bytes"]),
            host_bytes_per_node=_whole(total["host_bytes"], ranks.num_nodes),
            **{name: _whole(value) for name, value in peak.items()},
            resting=record.resting,
            rows=record.rows,
            syncs=tuple(sync for sync in syncs if sync.step == record.step),
        )
        for record, total, peak in zip(records, step_sums, peaks, strict=True)
    ]


def _whole(value: float | None, parts: int = 1) -> Any:
    return None if value is None else int(value) // parts


def _all_reduce(
    rows: Sequence[_Figures], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Reduce rows of named numbers over ranks, in one collective; None stays where no rank has a number.

    All ranks pass the same names in the same order.
    """
    pairs = [(value or 0.0, value is not None) for row in rows for value in row.values()]
    values = torch.tensor(pairs, dtype=torch.float64)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    reduced = iter(values.tolist())
    return [
        {name: value if known else None for name, (value, known) in zip(row, reduced, strict=False)} for row in rows
    ]
