"""What a run showed."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.compare.case import Case, Job


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case as measured. Bytes on the wire are those a node sends, mean over nodes."""

    job: Job
    strategy: str
    rate_bits_per_s: float | None
    steps: int
    """Optimizer steps taken."""
    step_s: float
    """Seconds per step, the median of the timed ones."""
    step_times_s: tuple[float, ...]
    """Of each timed step."""
    wire_bytes: float | None
    """Per node and step from the second step on, by the interface's counters; None without a wire."""
    counted_bytes: float | None
    """The same as the engine counts it; None for a baseline."""
    traffic_bytes: dict[str, float]
    """Per node and step from the second on, by "level/purpose", as the engine counts it."""
    allocated_peak_bytes: int | None
    """Most that torch had allocated on the fullest rank's device: parameters, gradients, optimizer, activations."""
    engine_peak_bytes: int | None
    """Most that the engine's own buffers took on the fullest rank's device; None for a baseline."""
    host_bytes_per_node: int
    """Cached slices in host memory."""
    wait_s: float | None
    """Seconds per step a rank stood still for the wire, as the engine counts it; mean over ranks, median over steps."""
    losses: tuple[float, ...]
    """Of every step, mean over ranks."""
    num_parameters: int
    num_trainable: int
    wall_s: float
    """Of the whole run, start of Python included."""
    output: str
    """Folder of the run: metrics, TensorBoard log, checkpoints."""

    @property
    def loss(self) -> float:
        """After the last step."""
        return self.losses[-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """The inverse of `to_dict`, also after JSON."""
        lists = {key: tuple(values[key]) for key in ("step_times_s", "losses")}
        return cls(**{**values, **lists})


def read_result(case: Case, folder: Path, *, wall_s: float) -> Result:
    """The result of `case` from what the trainer left in `folder`."""
    summary = json.loads((folder / "summary.json").read_text())
    nodes = summary["num_nodes"]
    times = summary["step_s"][case.warmup_steps :]
    return Result(
        job=case.job,
        strategy=case.strategy,
        rate_bits_per_s=case.rate_bits_per_s,
        steps=case.steps,
        step_s=statistics.median(times),
        step_times_s=tuple(times),
        wire_bytes=_per_node(summary["interface_sent_bytes"], nodes),
        counted_bytes=_per_node(summary["wire_bytes"], nodes),
        traffic_bytes=_by_kind(summary["traffic_bytes"], nodes),
        allocated_peak_bytes=_allocated_peak_bytes(summary),
        engine_peak_bytes=summary["device_peak_bytes"],
        host_bytes_per_node=summary["host_bytes_per_node"] or 0,
        wait_s=_median(summary["wait_s"][case.warmup_steps :]),
        losses=tuple(summary["losses"]),
        num_parameters=summary["num_parameters"],
        num_trainable=summary["num_trainable"],
        wall_s=wall_s,
        output=str(folder),
    )


def _allocated_peak_bytes(summary: dict[str, Any]) -> int | None:
    """A GPU's allocator keeps a peak; on a CPU it is what rests plus what the watched step took."""
    if summary["allocated_peak_bytes"] is not None:
        return summary["allocated_peak_bytes"]
    if summary["step_peak_bytes"] is None:
        return None
    return summary["resting_bytes"] + summary["step_peak_bytes"]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _per_node(by_step: Sequence[int | None], nodes: int) -> float | None:
    """Mean over the steps from the second on; the first fills caches."""
    known = [value for value in by_step[1:] if value is not None]
    return statistics.fmean(known) / nodes if known else None


def _by_kind(by_step: Sequence[dict[str, int]], nodes: int) -> dict[str, float]:
    steps = by_step[1:]
    kinds = sorted({kind for step in steps for kind in step})
    return {kind: statistics.fmean(step.get(kind, 0) for step in steps) / nodes for kind in kinds}
