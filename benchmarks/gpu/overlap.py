"""Rows about the copies of the host cache: the fraction of their time during which no kernel runs."""

from __future__ import annotations

import gc

import torch

import laconic
from benchmarks.gpu.trace import Overlap, StreamLabel, events_of, overlap
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
    return ratio_row(claim=claim, ratio=measured.exposed_fraction, limit=0.1, note=note)
