"""Records of all ranks, combined into the figures of the cluster and passed to the loggers.

Nothing here runs inside a timed step: a few small collectives between steps combine the records of several steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import psutil
import torch
import torch.distributed as dist

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import WIRE_LEVELS, Level, Purpose, Snapshot
from laconic.islands.local_steps import SyncReport
from laconic.strategies.cyclic_metrics import gather_metrics
from laconic.train.loggers import Logger
from laconic.train.records import Step, StepRecord, SyncMetrics

_KINDS: dict[str, tuple[Level, Purpose]] = {
    f"{level}/{purpose}": (level, purpose) for level, purpose in itertools.product(get_args(Level), get_args(Purpose))
}
_SYNC_MEANS = [
    item.name for item in dataclasses.fields(SyncReport) if item.name not in ("step", "fragment", "sent_bytes")
]


class Recorder:
    """Collects the records of this rank, and keeps the figures of the cluster."""

    def __init__(self, loggers: Sequence[Logger], reduce: Callable[[Sequence[StepRecord]], Sequence[Step]]) -> None:
        """Take rank 0's loggers, none on other ranks, and `reduce_records` with all arguments but the records."""
        self.steps: list[Step] = []
        self.evaluations: list[dict[str, float]] = []
        """The figures of all evaluations so far, each with its step."""
        self._loggers, self._reduce = loggers, reduce
        self._pending: list[StepRecord] = []

    @property
    def num_pending(self) -> int:
        """The number of records that are not combined yet."""
        return len(self._pending)

    def add(self, record: StepRecord) -> None:
        """Keep a record of this rank until the next `flush`."""
        self._pending.append(record)
        for logger in self._loggers:
            logger.tick(record.step, math.nan if record.result.loss is None else record.result.loss)

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Keep and log the figures of an evaluation after `step`, which are the same on all ranks."""
        self.evaluations.append({"step": step, **values})
        for logger in self._loggers:
            logger.evaluation(step, values)

    def flush(self) -> None:
        """Combine the pending records of all ranks, and log the steps. Collective."""
        steps = self._reduce(self._pending)
        self._pending.clear()
        self.steps.extend(steps)
        for step, logger in itertools.product(steps, self._loggers):
            logger.step(step)

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close()


def reduce_records(
    records: Sequence[StepRecord],
    ranks: RankInfo,
    group: dist.ProcessGroup,
    *,
    tokens_per_step: int,
    steps_per_sync: int | None = None,
) -> list[Step]:
    """Combine the same steps of all ranks, which form `group`, a group with a backend for CPU tensors.

    Collective: two small all-reduces, whatever the number of steps, and one more exchange with a cyclic schedule.
    `tokens_per_step` is of the global batch; `steps_per_sync` is None without islands.
    """
    if not records:
        return []
    reports = [report for record in records for report in record.result.syncs]
    rows = [*map(_figures, records), *map(_sync_figures, reports)]
    sums = _all_reduce(rows, dist.ReduceOp.SUM, group)
    [peaks] = _all_reduce([_peaks(records[-1])], dist.ReduceOp.MAX, group)
    maxima = {key: int(value) for key, value in peaks.items()}
    timelines = [record.result.timeline for record in records if record.result.timeline is not None]
    cyclic = gather_metrics(timelines, group) if timelines else [None] * len(records)
    tokens_per_sync = tokens_per_step * (steps_per_sync or 1)
    syncs = [
        SyncMetrics(
            step=report.step,
            fragment=report.fragment,
            sent_bytes=int(total["sent_bytes"]),
            bytes_per_token=total["sent_bytes"] / tokens_per_sync,
            **{name: total[name] / ranks.world_size for name in _SYNC_MEANS},
        )
        for report, total in zip(reports, sums[len(records) :], strict=True)
    ]
    steps = []
    for record, total, cyclic_metrics in zip(records, sums[: len(records)], cyclic, strict=True):
        is_counted, has_interface = record.traffic is not None, total["num_interfaces"] > 0
        grad_norm = record.result.grad_norm
        if steps_per_sync is not None:  # islands differ
            grad_norm = total["grad_norm"] / ranks.world_size
        traffic_bytes = {kind: int(total[kind]) for kind in _KINDS if total[kind]}
        wire_bytes = sum(size for kind, size in traffic_bytes.items() if _KINDS[kind][0] in WIRE_LEVELS)
        steps.append(
            Step(
                step=record.step,
                tokens=record.step * tokens_per_step,
                loss=total["loss"] / total["num_losses"],
                grad_norm=grad_norm,
                lr=record.lr,
                step_s=record.step_s,
                data_s=record.data_s,
                tokens_per_s=tokens_per_step / record.step_s,
                wait_s=total["wait_s"] / ranks.world_size if is_counted else None,
                wire_bytes=wire_bytes if is_counted else None,
                traffic_bytes=traffic_bytes,
                interface_sent_bytes=int(total["interface_sent_bytes"]) if has_interface else None,
                interface_received_bytes=int(total["interface_received_bytes"]) if has_interface else None,
                device_bytes=maxima["device_bytes"] if record.memory else None,
                device_peak_bytes=maxima["device_peak_bytes"] if record.memory else None,
                host_bytes_per_node=int(total["host_bytes"]) // ranks.num_nodes if record.memory else None,
                allocated_peak_bytes=maxima["allocated_peak_bytes"] or None,
                resident_bytes=maxima["resident_bytes"],
                syncs=tuple(sync for sync in syncs if sync.step == record.step),
                cyclic=cyclic_metrics,
            )
        )
    return steps


def _figures(record: StepRecord) -> dict[str, float]:
    """The figures of a step that are summed over ranks."""
    result, interface = record.result, record.interface
    traffic = record.traffic or Snapshot()
    return {
        "grad_norm": result.grad_norm or 0.0,
        "loss": result.loss or 0.0,
        "num_losses": result.loss is not None,
        "num_interfaces": interface is not None,
        "interface_sent_bytes": interface.sent if interface else 0,
        "interface_received_bytes": interface.received if interface else 0,
        "host_bytes": record.memory.host_bytes if record.memory else 0,
        "wait_s": sum(traffic.waited_s(level) for level in WIRE_LEVELS),
        **{kind: traffic.total(level, purpose, "sent") for kind, (level, purpose) in _KINDS.items()},
    }


def _sync_figures(report: SyncReport) -> dict[str, float]:
    """The figures of a sync that are summed over ranks."""
    return {name: getattr(report, name) for name in (*_SYNC_MEANS, "sent_bytes")}


def _peaks(record: StepRecord) -> dict[str, float]:
    """The figures of which the largest of all ranks counts."""
    memory = record.memory
    return {
        "device_bytes": memory.device_bytes if memory else 0,
        "device_peak_bytes": memory.device_peak_bytes if memory else 0,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "resident_bytes": psutil.Process().memory_info().rss,
    }


def _all_reduce(
    rows: Sequence[Mapping[str, float]], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> list[dict[str, float]]:
    """Reduce rows of named numbers over ranks, in one collective. All ranks pass the same names in the same order."""
    values = torch.tensor([value for row in rows for value in row.values()], dtype=torch.float64)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    reduced = iter(values.tolist())
    return [{name: next(reduced) for name in row} for row in rows]
