"""Combines the records of all ranks into the figures of the cluster, and passes the figures to the loggers.

Nothing here runs inside a timed step: a few small collectives between steps combine the records of several steps.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import WIRE_LEVELS, Level, Purpose, Snapshot
from laconic.islands.exchange import SyncReport
from laconic.train.loggers import Logger
from laconic.train.records import ClusterStep, StepRecord, SyncMetrics

_KINDS: dict[str, tuple[Level, Purpose]] = {
    f"{level}/{purpose}": (level, purpose) for level, purpose in itertools.product(get_args(Level), get_args(Purpose))
}  # the keys of `ClusterStep.traffic_bytes`
_Figures = dict[str, float]
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
    sums = _all_reduce([*map(_figures, records), *map(_sync_figures, reports)], dist.ReduceOp.SUM, group)
    step_sums, sync_sums = sums[: len(records)], sums[len(records) :]
    peaks = _all_reduce([*map(_peaks, records)], dist.ReduceOp.MAX, group)

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
            **_wire_figures(record, total, ranks),
            **_memory_figures(record, total, peak, ranks),
            resting=record.resting,
            rows=record.rows,
            syncs=tuple(sync for sync in syncs if sync.step == record.step),
        )
        for record, total, peak in zip(records, step_sums, peaks, strict=True)
    ]


def _wire_figures(record: StepRecord, total: _Figures, ranks: RankInfo) -> dict[str, Any]:
    """The bytes and the waiting of a `ClusterStep`, from the sums over ranks; None where nothing is counted."""
    is_counted, has_interface = record.traffic is not None, total["num_interfaces"] > 0
    traffic_bytes = {kind: int(total[kind]) for kind in _KINDS if total[kind]}
    wire_bytes = sum(size for kind, size in traffic_bytes.items() if _KINDS[kind][0] in WIRE_LEVELS)
    return {
        "wait_s": total["wait_s"] / ranks.world_size if is_counted else None,
        "wire_bytes": wire_bytes if is_counted else None,
        "traffic_bytes": traffic_bytes,
        "interface_sent_bytes": int(total["interface_sent_bytes"]) if has_interface else None,
        "loopback_bytes": int(total["loopback_bytes"]) if has_interface else None,
    }


def _memory_figures(record: StepRecord, total: _Figures, peak: _Figures, ranks: RankInfo) -> dict[str, Any]:
    """The memory of a `ClusterStep`, from the sums and the maxima over ranks; None where nothing is measured."""
    has_engine = record.memory is not None
    return {
        "device_bytes": int(peak["device_bytes"]) if has_engine else None,
        "device_peak_bytes": int(peak["device_peak_bytes"]) if has_engine else None,
        "host_bytes_per_node": int(total["host_bytes"]) // ranks.num_nodes if has_engine else None,
        "allocated_peak_bytes": int(peak["allocated_peak_bytes"]) or None,
        "resident_bytes": int(peak["resident_bytes"]),
    }


def _figures(record: StepRecord) -> _Figures:
    """The figures of a step that are summed over ranks."""
    result, interface = record.result, record.interface
    traffic = record.traffic or Snapshot()
    return {
        "grad_norm": result.grad_norm or 0.0,
        "loss": result.loss or 0.0,
        "num_losses": result.loss is not None,
        "num_interfaces": interface is not None,
        "interface_sent_bytes": interface.sent if interface else 0,
        "loopback_bytes": record.loopback.sent if record.loopback else 0,
        "host_bytes": record.memory.host_bytes if record.memory else 0,
        "wait_s": sum(traffic.waited_s(level) for level in WIRE_LEVELS),
        **{kind: traffic.total(level, purpose, "sent") for kind, (level, purpose) in _KINDS.items()},
    }


def _sync_figures(report: SyncReport) -> _Figures:
    """The figures of a sync that are summed over ranks."""
    return {name: getattr(report, name) for name in (*_SYNC_MEANS, "sent_bytes")}


def _peaks(record: StepRecord) -> _Figures:
    """The figures of which the cluster's figure is the largest over ranks."""
    memory = record.memory
    return {
        "device_bytes": memory.device_bytes if memory else 0,
        "device_peak_bytes": memory.device_peak_bytes if memory else 0,
        "allocated_peak_bytes": record.allocated_peak_bytes,
        "resident_bytes": record.resident_bytes,
    }


def _all_reduce(rows: list[_Figures], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> list[_Figures]:
    """Reduce rows of named numbers over ranks, in one collective. All ranks pass the same names in the same order."""
    values = torch.tensor([value for row in rows for value in row.values()], dtype=torch.float64)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    reduced = iter(values.tolist())
    return [{name: next(reduced) for name in row} for row in rows]
