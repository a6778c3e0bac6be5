"""What a step measured, put together over ranks, and who is told.

Nothing here runs inside a timed step: each rank keeps its records, and `reduce_records` combines those of several steps
in one small collective between steps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, get_args

import psutil
import torch
import torch.distributed as dist

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Level, Purpose, Snapshot
from laconic.islands.local_steps import SyncReport
from laconic.strategies.spread import Memory
from laconic.strategies.staggering import Cyclic, Staggering, gather

_KINDS: list[tuple[Level, Purpose]] = list(itertools.product(get_args(Level), get_args(Purpose)))
_WIRE: tuple[Level, ...] = ("island", "node")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step as one rank saw it."""

    step: int
    """Optimizer steps done after this one: 1 for the first."""
    loss: float | None
    """Mean over this rank's rows; None where another rank has it."""
    grad_norm: float | None
    """Before clipping; the same on all ranks of an island; None if nobody has measured it."""
    lr: float
    """Learning rate used."""
    step_s: float
    """From the first forward to the end of the optimizer."""
    data_s: float
    """Fetching the rows, before the step."""
    traffic: Snapshot | None
    """Bytes and waiting during the step, if the strategy counts them."""
    interface_sent_bytes: int | None
    """What the node's network interface sent during the step; None but on one rank per node of a lab."""
    interface_received_bytes: int | None
    """The same, received."""
    memory: Memory | None
    """As the engine accounts it, if the strategy does."""
    syncs: tuple[SyncReport, ...] = ()
    """What islands agreed on after the step; as many on every rank."""
    staggering: Staggering | None = None
    """What the cyclic schedule did; on every rank, or on none."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One fragment's agreement. What islands see differently, as their mean."""

    step: int
    """After which it was applied."""
    fragment: int
    drift_norm: float
    """Of an island's own pseudo-gradient."""
    mean_norm: float
    """Of the mean of all islands' pseudo-gradients."""
    cosine: float
    """Between the two: 1 where islands pull one way, 1 / sqrt(islands) where they are unrelated."""
    codec_error: float
    """Of what an island sent, relative."""
    sent_bytes: int
    """By all ranks together."""
    bytes_per_token: float
    """sent_bytes, over the tokens of all islands since the fragment before."""
    hidden_s: float
    """Seconds of the exchange behind training."""
    exposed_s: float
    """Seconds that training stood still for it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of the whole cluster."""

    step: int
    tokens: int
    """Tokens seen since the beginning of the run."""
    loss: float
    """Mean over all ranks, and so over islands."""
    grad_norm: float | None
    """Mean over islands; None if nobody has measured it."""
    lr: float
    step_s: float
    data_s: float
    tokens_per_s: float
    wait_s: float | None
    """Seconds a rank stood still for the wire, mean over ranks; None where nobody counts."""
    wire_bytes: int | None
    """Sent between machines by all ranks together, as counted by the engine."""
    traffic_bytes: dict[str, int] = field(default_factory=dict)
    """Sent by all ranks together, by "level/purpose"."""
    interface_sent_bytes: int | None = None
    """Sent by all nodes' interfaces together, as counted by the kernel."""
    interface_received_bytes: int | None = None
    device_bytes: int | None = None
    """The fullest rank's, accounted by the engine."""
    device_peak_bytes: int | None = None
    host_bytes_per_node: int | None = None
    """Cached slices of all ranks, per node."""
    allocated_peak_bytes: int | None = None
    """torch.cuda.max_memory_allocated of the fullest rank; on a GPU."""
    resident_bytes: int = 0
    """Resident memory of the largest process."""
    syncs: tuple[Sync, ...] = ()
    """What islands agreed on after it."""
    cyclic: Cyclic | None = None
    """What the cyclic schedule did."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what nobody measured is left out."""
        values = {**self.__dict__, "syncs": [dict(sync.__dict__) for sync in self.syncs]}
        values["cyclic"] = dict(self.cyclic.__dict__) if self.cyclic else None
        return {key: value for key, value in values.items() if value is not None and value != {} and value != []}

    def scalars(self) -> dict[str, float]:
        """Flat names for TensorBoard."""
        groups = {"loss": "train", "grad_norm": "train", "lr": "train", "tokens": "train"}
        flat = {}
        for key, value in self.to_dict().items():
            if key == "traffic_bytes":
                flat.update({f"traffic_bytes/{name}": float(size) for name, size in value.items()})
            elif key == "cyclic":
                flat.update({f"cyclic/{name}": float(figure) for name, figure in value.items()})
            elif key == "syncs":
                for sync in value:
                    tag = f"fragment-{sync['fragment']}"
                    flat.update({f"sync/{n}/{tag}": float(v) for n, v in sync.items() if n not in ("step", "fragment")})
            elif key != "step":
                group = groups.get(key, "memory" if "device" in key or "host" in key or "resident" in key else "speed")
                group = "wire" if "wire" in key or "interface" in key or key == "wait_s" else group
                flat[f"{group}/{key}"] = float(value)
        return flat


def reduce_records(
    records: Sequence[StepRecord],
    ranks: RankInfo,
    group: dist.ProcessGroup,
    *,
    tokens_per_step: int,
    steps_per_sync: int | None = None,
) -> list[Step]:
    """Combine the same steps of all ranks. Collective: two small all-reduces, whatever the number of steps,
    and one more exchange of a cyclic schedule.

    Args:
        tokens_per_step: of all ranks.
        steps_per_sync: between two fragments' syncs; None: all ranks are one island.
    """
    if not records:
        return []
    reports = [report for record in records for report in record.syncs]
    sums = torch.tensor([_summed(record) for record in records], dtype=torch.float64)
    sync_sums = torch.tensor([_reported(report) for report in reports], dtype=torch.float64)
    both = torch.cat([sums.flatten(), sync_sums.flatten()])
    most = torch.tensor(_maxima(records[-1]), dtype=torch.float64)
    if ranks.world_size > 1:
        dist.all_reduce(both, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    sums, sync_sums = both[: sums.numel()].view_as(sums), both[sums.numel() :].view_as(sync_sums)
    staggerings = [record.staggering for record in records if record.staggering is not None]
    cyclics = gather(staggerings, group) if staggerings else [None] * len(records)
    syncs = [
        _sync(report, row, ranks.world_size, tokens_per_step * (steps_per_sync or 1))
        for report, row in zip(reports, sync_sums.tolist(), strict=True)
    ]
    return [
        _step(
            record,
            row,
            most.tolist(),
            ranks,
            tokens_per_step,
            has_islands=steps_per_sync is not None,
            syncs=tuple(sync for sync in syncs if sync.step == record.step),
            cyclic=cyclic,
        )
        for record, row, cyclic in zip(records, sums.tolist(), cyclics, strict=True)
    ]


_SYNC_MEANS = ("drift_norm", "mean_norm", "cosine", "codec_error", "hidden_s", "exposed_s")


def _reported(report: SyncReport) -> list[float]:
    return [*(getattr(report, name) for name in _SYNC_MEANS), float(report.sent_bytes)]


def _sync(report: SyncReport, sums: list[float], world_size: int, tokens: int) -> Sync:
    *of_means, sent_bytes = sums
    means = {name: value / world_size for name, value in zip(_SYNC_MEANS, of_means, strict=True)}
    return Sync(
        step=report.step,
        fragment=report.fragment,
        sent_bytes=int(sent_bytes),
        bytes_per_token=sent_bytes / tokens,
        **means,
    )


def _summed(record: StepRecord) -> list[float]:
    traffic = record.traffic or Snapshot()
    return [
        record.grad_norm or 0.0,
        record.loss or 0.0,
        float(record.loss is not None),
        float(record.interface_sent_bytes is not None),
        float(record.interface_sent_bytes or 0),
        float(record.interface_received_bytes or 0),
        float(record.memory.host_bytes if record.memory else 0),
        sum(traffic.waited_s(level) for level in _WIRE),
        *(float(traffic.total(level, purpose, "sent")) for level, purpose in _KINDS),
    ]


def _maxima(record: StepRecord) -> list[float]:
    memory = record.memory or Memory()
    return [
        float(memory.device_bytes),
        float(memory.device_peak_bytes),
        float(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0),
        float(psutil.Process().memory_info().rss),
    ]


def _step(
    record: StepRecord,
    sums: list[float],
    most: list[float],
    ranks: RankInfo,
    tokens_per_step: int,
    *,
    has_islands: bool,
    syncs: tuple[Sync, ...],
    cyclic: Cyclic | None,
) -> Step:
    grad_norm, loss, losses, interfaces, sent, received, host, wait, *sizes = sums
    device, device_peak, allocated_peak, resident = (int(value) for value in most)
    counted = record.traffic is not None
    by_kind = {kind: int(size) for kind, size in zip(_KINDS, sizes, strict=True) if size}
    return Step(
        step=record.step,
        tokens=record.step * tokens_per_step,
        loss=loss / losses,
        grad_norm=grad_norm / ranks.world_size if has_islands else record.grad_norm,
        lr=record.lr,
        step_s=record.step_s,
        data_s=record.data_s,
        tokens_per_s=tokens_per_step / record.step_s,
        wait_s=wait / ranks.world_size if counted else None,
        wire_bytes=sum(size for (level, _), size in by_kind.items() if level in _WIRE) if counted else None,
        traffic_bytes={f"{level}/{purpose}": size for (level, purpose), size in by_kind.items()},
        interface_sent_bytes=int(sent) if interfaces else None,
        interface_received_bytes=int(received) if interfaces else None,
        device_bytes=device if record.memory else None,
        device_peak_bytes=device_peak if record.memory else None,
        host_bytes_per_node=int(host) // ranks.num_nodes if record.memory else None,
        allocated_peak_bytes=allocated_peak or None,
        resident_bytes=resident,
        syncs=syncs,
        cyclic=cyclic,
    )


# --------------------------------------------------------------------------------------------- loggers


class Logger:
    """Is told everything and does nothing: what ranks other than 0 use."""

    def tick(self, done: int, loss: float) -> None:
        """`done` steps are finished; the loss is this rank's. For a bar: the figures of all ranks come later."""

    def step(self, step: Step) -> None:
        """A finished step, with the figures of all ranks."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Held-out figures after `step`."""

    def close(self) -> None:
        """No more to come."""


class JsonlLogger(Logger):
    """One JSON object per line, flushed at once."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Continue `path`, dropping lines of steps that the resumed run takes again."""
        kept = [line for line in _complete_lines(path) if json.loads(line).get("step", 0) <= after_step]
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def step(self, step: Step) -> None:
        self._write(step.to_dict())

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, **values})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _complete_lines(path: Path) -> list[str]:
    """Lines of `path` if it exists, without a last one that a killed run left half written."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]


class TensorBoardLogger(Logger):
    """Scalars by group: train, speed, wire, traffic_bytes, memory, sync, cyclic, eval."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)

    def step(self, step: Step) -> None:
        for name, value in step.scalars().items():
            self._writer.add_scalar(name, value, step.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"eval/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class Loggers(Logger):
    """Several at once."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers

    def tick(self, done: int, loss: float) -> None:
        for logger in self._loggers:
            logger.tick(done, loss)

    def step(self, step: Step) -> None:
        for logger in self._loggers:
            logger.step(step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.evaluation(step, values)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
