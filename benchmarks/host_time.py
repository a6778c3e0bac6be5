"""The host's time for a unit and step beside FSDP2's, on a CPU whose kernels take next to none.

    python -m benchmarks.host_time                    the row, recorded in RESULTS.md; the machine should be idle
    python -m benchmarks.host_time --quick            few units, printed only

On an accelerator most of this time goes to the driver, which both engines call alike: see the rows host-* of
benchmarks.gpu. Here it is the engines' own.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.peers import HOST_KINDS, HOST_LIMITS, alternating, trainings_of
from benchmarks.gpu.training import LOCAL, NODES, Training, become_rank_0
from benchmarks.llama import Llama
from tests.support.launch import launch
from tests.support.measure import Benchmark
from tests.support.record import Row

_PAIRS = 7


@dataclass(frozen=True)
class Bench:
    """The model of the row."""

    shape: Llama


_FULL = Llama(hidden=16, intermediate=32, layers=32, heads=2, kv_heads=2, vocab=64, batch=1, sequence=8)
BENCHMARK = Benchmark(
    measures=("laconic.comm", "laconic.ragged", "laconic.shard"),
    name="host_time",
    prepare=lambda options: Bench(replace(_FULL, layers=2) if options.quick else _FULL),
)


def host_times(shape: Llama) -> dict[str, list[float]]:
    """Return the seconds of a step, block by block, by contestant."""
    torch.set_num_threads(1)
    become_rank_0()
    device = torch.device("cpu")
    contestants = trainings_of({"fsdp2": {}, **HOST_KINDS}, shape, device, fused=False)
    contestants["plain"] = Training("plain", shape.build(device, torch.bfloat16), shape, fused=False)
    return alternating(contestants, device, Training.step, _PAIRS)


@BENCHMARK.row("host-time", section="device")
def host_time(bench: Bench) -> Row:
    """The host's time with many small units, by median of pairs."""
    times = launch(host_times, bench.shape, num_ranks=1, backend=None, timeout_s=300)[0]
    ratios = {
        kind: statistics.median(a / b for a, b in zip(times[kind], times["fsdp2"], strict=True)) for kind in HOST_LIMITS
    }
    micros = {kind: statistics.median(found) / bench.shape.layers * 1e6 for kind, found in times.items()}
    return Row(
        claim="the host's time for a unit and step against FSDP2, on a CPU: " + " / ".join(HOST_LIMITS),
        required=" / ".join(f"<= {limit:.2f}x" for limit in HOST_LIMITS.values()),
        measured=" / ".join(f"{ratio:.3f}x" for ratio in ratios.values()),
        is_met=all(ratios[kind] <= limit for kind, limit in HOST_LIMITS.items()),
        note=(
            f"{bench.shape}, fp32 with bf16 compute, foreach AdamW; rank 0 of {NODES * LOCAL}, transfers between ranks "
            f"free, one thread; medians of {_PAIRS} alternating pairs. Microseconds a unit and step: "
            f"{', '.join(f'{kind} {time:,.0f}' for kind, time in micros.items())}."
        ),
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
