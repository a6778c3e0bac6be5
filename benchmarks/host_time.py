"""The host's time for a unit and step beside FSDP2's, on a CPU whose kernels take next to none.

    python -m benchmarks.host_time                    the rows, recorded; the machine should be idle
    python -m benchmarks.host_time --quick            few units, printed only

On an accelerator most of this time goes to the driver, which both engines call alike: see the rows host-* of
benchmarks.gpu. Here it is the engines' own.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from tests.support.alone import become_rank_0
from tests.support.launch import launch
from tests.support.measure import Benchmark
from tests.support.record import Row
from tests.support.units import KINDS, WIDTH, stack

_NODES, _LOCAL = 2, 2
_PAIRS, _STEPS = 7, 5
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"cache": "none"}, "host": {"cache": "host"}, "rank": {"cache": "rank"},
    "4bit": {"cache": "host", "wire": "4bit"},
}  # fmt: skip
_TRIED = (
    "What units ask is bound or looked up once: before, none had 995 and 1,370 calls. What is left is six calls for "
    "each of four to six transfers, whose wait is noted for those who look for ranks that do not come, and one to "
    "three for each thing that a unit does. A toy with moves that are bound once, two calls each, without checks, "
    "caches, counters and names, takes 0.15x and 0.33x of FSDP2's time. In few bits each message takes a dozen "
    "operations of torch on a CPU, which has no kernels for them."
)


@dataclass(frozen=True)
class Bench:
    """How many units a model has."""

    num_units: int


BENCHMARK = Benchmark(
    measures=("laconic.comm", "laconic.ragged", "laconic.shard"),
    name="host_time",
    prepare=lambda options: Bench(4 if options.quick else 24),
)


def _sharded(name: str, kind: str, num_units: int) -> nn.Module:
    """A model of small units, as a contestant shards it: "plain", "fsdp2", or a name of `POLICIES`."""
    model = stack(kind, num_units)
    shard: Callable[[nn.Module], Any] = lambda module: module  # noqa: E731
    if name == "fsdp2":
        flat = init_device_mesh("cpu", (_NODES * _LOCAL,))
        shard = lambda module: fully_shard(module, mesh=flat)  # noqa: E731
    elif name != "plain":
        mesh = laconic.init_mesh("cpu", nodes=_NODES, local=_LOCAL)
        shard = lambda module: laconic.fully_shard(module, mesh=mesh, **POLICIES[name])  # noqa: E731
    for unit in list(model)[:-1]:
        shard(unit)
    shard(model)
    return model


def _forward_and_backward(model: nn.Module) -> Callable[[], None]:
    def run() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()

    return run


def host_times(num_units: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of the processor for a unit and step, pair by pair, by kind of unit and contestant."""
    torch.set_num_threads(1)
    become_rank_0(_NODES * _LOCAL)
    times: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        steps = {}
        for name in ("plain", "fsdp2", *POLICIES):
            model = _sharded(name, kind, num_units)
            steps[name] = _forward_and_backward(model), torch.optim.AdamW(model.parameters(), fused=True)
        times[kind] = {name: [] for name in steps}
        for pair in range(-1, _PAIRS):
            for name in sorted(steps, reverse=bool(pair % 2)):
                run, optimizer = steps[name]
                begun_s = time.process_time()
                for _ in range(_STEPS):
                    run()
                    optimizer.step()
                    optimizer.zero_grad()
                if pair >= 0:
                    times[kind][name].append((time.process_time() - begun_s) / (_STEPS * num_units))
    return times


@BENCHMARK.row("host-time")
def host_time(bench: Bench) -> Row:
    """The host's time with many small units, by median of pairs."""
    times = launch(host_times, bench.num_units, num_ranks=1, backend=None, timeout_s=500)[0]
    ratios = {
        (kind, name): statistics.median(
            ours / theirs for ours, theirs in zip(times[kind][name], times[kind]["fsdp2"], strict=True)
        )
        for kind, name in itertools.product(KINDS, POLICIES)
    }
    micros = [
        f"{kind}: " + ", ".join(f"{name} {statistics.median(found) * 1e6:,.0f}" for name, found in times[kind].items())
        for kind in KINDS
    ]
    return Row(
        claim=f"the host's time for a unit and step against FSDP2, on a CPU, units of {' and of '.join(KINDS)}: "
        + " / ".join(POLICIES),
        measured="; ".join(" / ".join(f"{ratios[kind, name]:.2f}x" for name in POLICIES) for kind in KINDS),
        note=(
            f"{bench.num_units} units, width {WIDTH}, fp32, fused AdamW; rank 0 of {_NODES} x {_LOCAL}, transfers "
            f"between ranks free, one thread; medians of {_PAIRS} alternating pairs of {_STEPS} steps, in seconds of "
            f"the processor. Microseconds a unit and step: {'; '.join(micros)}."
        ),
        tried=_TRIED,
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
