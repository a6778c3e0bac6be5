"""The exposed time of copies: the part of their time in a profile during which no kernel ran."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The copies of some streams beside the kernels of the whole process, in microseconds."""

    copies_us: float
    """The time during which at least one of the copies ran."""
    exposed_us: float
    """The part of `copies_us` during which no kernel ran."""
    kernels_us: float
    """The time during which at least one kernel ran."""
    span_us: float
    """The time from the beginning of the first kernel to the end of the last."""
    moved_bytes: int
    """The bytes of all copies."""

    @property
    def exposed_fraction(self) -> float:
        """The fraction of `copies_us` during which no kernel ran."""
        return self.exposed_us / self.copies_us

    def __str__(self) -> str:
        speed = self.moved_bytes / self.copies_us / 1e3
        return (
            f"copies move {self.moved_bytes / 1e6:.0f} MB in {self.copies_us / 1e3:.2f} ms ({speed:.1f} GB/s), during "
            f"{self.exposed_us / 1e3:.2f} ms no kernel runs; kernels run for {self.kernels_us / 1e3:.1f} of "
            f"{self.span_us / 1e3:.1f} ms"
        )


class StreamLabel:
    """Marks a CUDA stream in a trace by a copy of an unusual size, because a trace has its own numbers for streams."""

    def __init__(self, stream: torch.cuda.Stream, nbytes: int) -> None:
        self._stream, self.nbytes = stream, nbytes
        self._host = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=stream.device)

    def mark(self) -> None:
        """Issue the copy. Call it while the profiler records."""
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)


def events_of(profile: Any) -> list[Mapping[str, Any]]:
    """Return the events of the trace as dictionaries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def overlap(events: Sequence[Mapping[str, Any]], labels: Iterable[int]) -> Overlap:
    """Compare the copies on the labelled streams with all kernels; `labels` are the sizes of the labels in bytes.

    Raises:
        ValueError: a label is not in the trace, or its stream copied nothing else.
    """
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and event.get("ph") == "X"]
    streams = set()
    for label in labels:
        found = {event["args"]["stream"] for event in copies if event["args"].get("bytes") == label}
        if len(found) != 1:
            raise ValueError(f"the label of {label} bytes is on {len(found)} streams of the trace; expected one")
        streams |= found
    sizes = set(labels)
    cached = [
        event for event in copies if event["args"]["stream"] in streams and event["args"].get("bytes") not in sizes
    ]
    if not cached:
        raise ValueError(f"streams {sorted(streams)} copied nothing but their labels")
    kernels = merge(_interval(event) for event in events if event.get("cat") == "kernel" and event.get("ph") == "X")
    runs = merge(_interval(event) for event in cached)
    return Overlap(
        copies_us=length(runs),
        exposed_us=length(runs) - shared(runs, kernels),
        kernels_us=length(kernels),
        span_us=kernels[-1][1] - kernels[0][0] if kernels else 0.0,
        moved_bytes=sum(event["args"].get("bytes", 0) for event in cached),
    )


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def shared(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Return the length of the intersection of two lists of disjoint, ordered intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total
