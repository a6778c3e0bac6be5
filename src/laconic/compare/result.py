"""The measurements of one run."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from laconic import registry
from laconic.compare.case import STRATEGIES, Case, Job


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurements of one case. Bytes on the wire are the bytes that a node sends, as a mean over nodes."""

    job: Job
    strategy: str
    rate_bits_per_s: float | None
    steps: int
    step_s: float
    """The median seconds of the timed steps. With islands the mean, since only some steps sync."""
    step_times_s: tuple[float, ...]
    wire_bytes: float | None
    """The bytes per node and step from the second step on, by the interface's counters; None without a wire."""
    counted_bytes: float | None
    """The same bytes by the engine's own count; None for a baseline."""
    traffic_bytes: dict[str, float]
    """The bytes per node and step from the second step on, by "level/purpose" and by the engine's own count."""
    allocated_peak_bytes: int | None
    """The peak of torch's allocator on the fullest rank: parameters, gradients, optimizer states, activations."""
    engine_peak_bytes: int | None
    """The peak of the engine's own buffers on the fullest rank's device; None for a baseline."""
    host_bytes_per_node: int
    """The bytes of the node shards that a node's ranks keep in host memory."""
    wait_s: float | None
    """The seconds per step that a rank waits for the wire, by the engine: mean over ranks, median over steps."""
    losses: tuple[float, ...]
    """The loss of every step, mean over ranks."""
    num_parameters: int
    num_trainable: int
    wall_s: float
    """The seconds of the whole run, with the time that Python takes to start."""
    output: str
    """The folder of the run: metrics, TensorBoard log, checkpoints."""
    num_nodes: int
    num_local: int
    """The number of ranks on each node."""
    local_bytes: float | None
    """The bytes per node and step from the second on that ranks of a node send to each other, by the loopback's
    counters; None without a wire."""
    all_step_times_s: tuple[float, ...] = ()
    """The seconds of every step, also of those that are not timed."""
    all_waits_s: tuple[float | None, ...] = ()
    """The seconds of every step that a rank waited for the wire; None where nothing counts them."""
    all_wire_bytes: tuple[float | None, ...] = ()
    """The bytes that a node sent in every step, by the interface's counters; None without a wire."""
    tokens: int = 0
    """The tokens of a step, of all ranks together; 0 in files of older sources."""

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return self.losses[-1]

    @property
    def moved_bytes(self) -> float | None:
        """The bytes per node and step: `wire_bytes`, or without a wire `counted_bytes`."""
        return self.wire_bytes if self.wire_bytes is not None else self.counted_bytes

    @property
    def moved_local_bytes(self) -> float | None:
        """The bytes between ranks of a node by the loopback's counters, or as the engine counts them without a wire."""
        if self.local_bytes is not None or self.counted_bytes is None:
            return self.local_bytes
        return sum(size for kind, size in self.traffic_bytes.items() if kind.startswith("local/"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild a result from the values of `to_dict`, also if they were written as JSON and read again."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in fields}  # older files have more
        lists = {name: tuple(known.get(name, ())) for name, field in fields.items() if _is_list(field)}
        return cls(**{**known, **lists, "strategy": registry.canonical(values["strategy"])})


def read_result(case: Case, folder: Path, *, wall_s: float) -> Result:
    """Read the result of `case` from the trainer's output in `folder`; the run took `wall_s` seconds."""
    summary = json.loads((folder / "summary.json").read_text())
    nodes = summary["num_nodes"]
    times = summary["step_s"][case.warmup_steps :]
    typical = statistics.fmean if STRATEGIES[case.strategy].has_islands else statistics.median
    return Result(
        job=case.job,
        strategy=case.strategy,
        rate_bits_per_s=case.rate_bits_per_s,
        steps=case.steps,
        step_s=typical(times),
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
        num_nodes=nodes,
        num_local=summary["num_local"],
        local_bytes=_per_node(summary.get("loopback_bytes", []), nodes),  # older sources have none
        all_step_times_s=tuple(summary["step_s"]),
        all_waits_s=tuple(summary["wait_s"]),
        tokens=summary.get("tokens_per_step", 0),
        all_wire_bytes=tuple(None if sent is None else sent / nodes for sent in summary["interface_sent_bytes"]),
    )


def _is_list(field: dataclasses.Field[Any]) -> bool:
    """Whether JSON has a list for the field."""
    return str(field.type).startswith("tuple")


def _allocated_peak_bytes(summary: dict[str, Any]) -> int | None:
    """The peak of a GPU's allocator. On a CPU: the memory between steps plus the most that the watched step adds."""
    if summary["allocated_peak_bytes"] is None and summary["step_peak_bytes"] is not None:
        return summary["resting_bytes"] + summary["step_peak_bytes"]
    return summary["allocated_peak_bytes"]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _per_node(by_step: Sequence[int | None], nodes: int) -> float | None:
    """The mean over the steps from the second on. The first step fills caches."""
    known = [value for value in by_step[1:] if value is not None]
    return statistics.fmean(known) / nodes if known else None


def _by_kind(by_step: Sequence[dict[str, int]], nodes: int) -> dict[str, float]:
    kinds = sorted({kind for step in by_step[1:] for kind in step})
    return {kind: statistics.fmean(step.get(kind, 0) for step in by_step[1:]) / nodes for kind in kinds}
