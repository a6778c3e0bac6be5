"""Rows about the copies of the host cache: the fraction of their time during which no kernel runs."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import laconic
from benchmarks.gpu.training import (
    BENCHMARK,
    LOCAL,
    NODES,
    Bench,
    Sizes,
    Training,
    become_rank_0,
    device_of,
    seconds_per_step,
)
from benchmarks.llama import Llama
from laconic.shard.unit import unit_of
from tests.support.record import Row, ratio_row

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
        exposed_us=length(merge([*runs, *kernels])) - length(kernels),
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


_PROFILED_STEPS = 2
LABEL_BYTES = (12_347, 12_391)
# A trace for runs without a GPU: two labels, two copies to compare, of which one is half exposed, and other events.
SYNTHETIC_TRACE = [
    {"ph": "X", "cat": "gpu_memcpy", "ts": 0, "dur": 1, "args": {"stream": 20, "bytes": LABEL_BYTES[0]}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 0, "dur": 1, "args": {"stream": 21, "bytes": LABEL_BYTES[1]}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 10, "dur": 95, "args": {"stream": 20, "bytes": 5_000}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 110, "dur": 10, "args": {"stream": 21, "bytes": 5_000}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 200, "dur": 10, "args": {"stream": 7, "bytes": 5_000}},
    {"ph": "X", "cat": "kernel", "ts": 5, "dur": 110, "args": {"stream": 7}},
    {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 500, "args": {}},
]


def overlap_rank(sizes: Sizes, device_type: str, shape: Llama, is_alone: bool) -> tuple[Overlap, dict[str, float]]:
    """Return the overlap of the host cache's copies, and the seconds per step without the profiler, by cache."""
    if is_alone:
        become_rank_0()
    mesh = laconic.init_mesh(device_type, nodes=NODES, local=LOCAL)
    device = device_of(device_type)
    seconds: dict[str, float] = {}
    result = None
    for kind in ("none", "device", "host") if is_alone else ("host",):
        training = Training(kind, shape.build(device, torch.bfloat16), shape, mesh)
        training.warm_up()
        seconds[kind] = seconds_per_step(training, device)
        if kind == "host":
            result = _profile(training, _PROFILED_STEPS, device)
        del training
        gc.collect()
    assert result is not None
    return result, seconds


def _profile(training: Training, steps: int, device: torch.device) -> Overlap:
    if device.type != "cuda":
        training.step()
        return overlap(SYNTHETIC_TRACE, LABEL_BYTES)
    lanes = unit_of(training.model).root.lanes  # type: ignore[union-attr]
    labels = []
    for lane, nbytes in zip((lanes.to_host, lanes.to_device), LABEL_BYTES, strict=True):
        with lane.running():
            stream = torch.cuda.current_stream(device)
        labels.append(StreamLabel(stream, nbytes))
    for is_measured in (False, True):  # the first profile of a process includes the start of the profiler
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for label in labels:
                label.mark()
            for _ in range(steps if is_measured else 1):
                training.step()
            torch.cuda.synchronize()
    return overlap(events_of(profile), LABEL_BYTES)


@BENCHMARK.row("overlap-alone")
def overlap_alone(bench: Bench) -> Row:
    measured, seconds = bench.launch(overlap_rank, bench.sizes.step, True, num_ranks=1)[0]
    times = ", ".join(f"{kind} {step_s * 1e3:.1f} ms" for kind, step_s in seconds.items())
    return _row(
        "one rank of 2 x 2, transfers between ranks free",
        measured,
        f"{bench.sizes.step}, bf16; {measured}. Steps without the profiler: {times}.",
    )


@BENCHMARK.row("overlap-gloo")
def overlap_gloo(bench: Bench) -> Row:
    by_rank = bench.launch(overlap_rank, bench.sizes.memory, False)
    measured, _ = by_rank[0]
    return _row(
        "2 x 2 ranks on one GPU over Gloo",
        measured,
        f"{bench.sizes.memory}, bf16; rank 0: {measured}. Gloo carries every collective through host memory, and four "
        "processes take turns on the GPU. So most of the time no kernel runs that could hide a copy.",
    )


def _row(circumstances: str, measured: Overlap, note: str) -> Row:
    claim = f"host copies exposed, against the time of all copies: {circumstances}"
    return ratio_row(claim=claim, ratio=measured.exposed_fraction, note=note)
