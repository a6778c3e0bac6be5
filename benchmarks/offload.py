"""Parameters in host memory: fully_shard with CPUOffloadPolicy and cache="host" against FSDP2 with CPUOffloadPolicy.

    python -m benchmarks.offload            both rows, some minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.offload --quick    a tiny job, printed only

Four ranks train a Llama on Gloo, as 2 nodes x 2 ranks, with nothing between them that limits the wire. Run it on a
quiet machine.

[Note: Device memory without a device]
There is no GPU here, so tensors of the device and of the host are both in main memory, and nothing is copied between
the two. Which is which follows from what a tensor is. Sharded parameters, their gradients, optimizer states and the
host cache rest on the host. All else would be on the device: gathered parameters, their gradients, transfers, and
activations. Their peak is measured in two ways, in forward and backward of one step.

  by torch's allocator  What the profiler saw allocated beyond what was there before. The step before has left its
                        gradients, so tensors that rest on the host are not in it, and activations are. Both are
                        measured alike.
  by each one's books   Without activations. Ours: `memory().device_peak_bytes`, which counts all buffers of the engine.
                        FSDP2: torch's own FSDPMemTracker, the categories of unsharded parameters and gradients and of
                        the buffers of all-gather and reduce-scatter. It leaves out the sum that a reduce-scatter puts
                        on the device before it goes to the host, and the copies of shards that a GPU needs before an
                        all-gather. Both are in favour of FSDP2.

FSDP2 has the collectives of [Note: The strongest baseline] in strategies/ring.py. For memory it is also measured with
torch's own, which the tracker needs to recognise. Gathers do not run ahead then, so FSDP2 may need less. By the
allocator, the smaller of its two figures counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from benchmarks.llama import Llama, decoder_layers, loss_of
from laconic.strategies.memory import measured_peak
from tests.support.launch import launch
from tests.support.measure import Benchmark, Options
from tests.support.record import Row, ratio_row

OURS, RINGS, TORCH = "laconic", "FSDP2 with rings", "FSDP2 with torch's collectives"
STRATEGIES = (OURS, RINGS, TORCH)
_NODES, _LOCAL = 2, 2
_TIMEOUT_S = 600.0
_WARMUP_STEPS = 3
_LLAMA = Llama(
    hidden=512, intermediate=1024, layers=8, heads=8, kv_heads=2, vocab=256, batch=1, sequence=64,
)  # fmt: skip
_TINY_LLAMA = dataclasses.replace(_LLAMA, hidden=64, intermediate=96, layers=3, heads=2)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes of the job."""

    llama: Llama
    steps: int
    """The number of timed steps of a run."""
    repeats: int
    """The number of runs of each strategy, in turn."""

    def launch(self, job: Callable[..., Any], strategy: str, *args: Any) -> list[Any]:
        """Run `job(strategy, llama, *args)` on all ranks; return their results."""
        sizes = {"num_ranks": _NODES * _LOCAL, "num_local": _LOCAL}
        return launch(job, strategy, self.llama, *args, **sizes, timeout_s=_TIMEOUT_S)


def _prepare(options: Options) -> Bench:
    if options.quick:
        return Bench(llama=_TINY_LLAMA, steps=2, repeats=1)
    return Bench(llama=_LLAMA, steps=12, repeats=5)


BENCHMARK = Benchmark(measures=("laconic.ragged", "laconic.shard"), name="offload", prepare=_prepare)


def sharded(strategy: str, shape: Llama) -> nn.Module:
    """Return the model, each layer and the rest a unit of its own, with parameters that rest in host memory."""
    model = shape.build(torch.device("cpu"), torch.float32)
    layers = decoder_layers(model)
    arguments: dict[str, Any] = {
        "reshard_after_forward": True,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),  # without a GPU no memory can be pinned
    }
    if strategy == OURS:
        from laconic import fully_shard

        arguments |= {"cache": "host"}
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]

        arguments |= {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    for module in (*layers, model):
        fully_shard(module, **arguments)
    if strategy == RINGS:
        from laconic.strategies.ring import use_rings

        use_rings([model, *layers])
    return model


def make_step(model: nn.Module, shape: Llama) -> Callable[[], float]:
    """Return a function that trains one step on this rank's batch, and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = shape.tokens(torch.device("cpu"), seed=dist.get_rank())

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def measure_seconds(strategy: str, shape: Llama, steps: int) -> tuple[float, float]:
    """Return the median seconds per step of this rank, and the last loss."""
    step, times, loss = make_step(sharded(strategy, shape), shape), [], 0.0
    for _ in range(_WARMUP_STEPS + steps):
        dist.barrier()
        start_s = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[_WARMUP_STEPS:]), loss


def measure_memory(strategy: str, shape: Llama) -> tuple[int, int | None]:
    """Return the peaks of [Note: Device memory without a device] on this rank, in bytes.

    The first is by the allocator. The second is by the books; None for FSDP2 with rings, which the tracker cannot read.
    """
    model = sharded(strategy, shape)
    step, tokens = make_step(model, shape), shape.tokens(torch.device("cpu"), seed=dist.get_rank())
    for _ in range(_WARMUP_STEPS):
        step()
    with measured_peak() as peak:
        loss_of(model, tokens).backward()
    assert peak.nbytes is not None
    return peak.nbytes, _peak_by_books(strategy, model, tokens)


def _peak_by_books(strategy: str, model: Any, tokens: Tensor) -> int | None:
    if strategy == OURS:
        model.reset_peak_memory()
        loss_of(model, tokens).backward()
        return model.memory().device_peak_bytes
    if strategy == TORCH:
        with _device_tracker(model) as tracker:
            loss_of(model, tokens).backward()
        return tracker.device_peak_bytes
    return None


def _device_tracker(model: nn.Module) -> Any:
    """Torch's tracker of FSDP2's memory, which also keeps the peak of what would be on the device."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType

    on_device = (
        _FSDPRefType.UNSHARDED_PARAM, _FSDPRefType.UNSHARDED_GRAD, _FSDPRefType.ALL_GATHER,
        _FSDPRefType.REDUCE_SCATTER,
    )  # fmt: skip

    class DeviceTracker(FSDPMemTracker):
        device_peak_bytes = 0

        def _update_peak_stats(self, peak_state: Any) -> None:
            super()._update_peak_stats(peak_state)
            held: dict[Any, int] = self._curr_mem_snap.get(torch.device("cpu"), {})
            now = sum(held.get(kind, 0) for kind in on_device)
            self.device_peak_bytes = max(self.device_peak_bytes, now)

    return DeviceTracker(model)


@BENCHMARK.row("device-memory")
def device_memory(bench: Bench) -> Row:
    """Compare the peaks of the rank that needs most."""
    by_rank = {name: bench.launch(measure_memory, name) for name in STRATEGIES}
    allocated = {name: max(peak for peak, _ in peaks) for name, peaks in by_rank.items()}
    booked = {name: max(peak for _, peak in by_rank[name]) for name in (OURS, TORCH)}
    by_allocator, by_books = allocated[OURS] / min(allocated[RINGS], allocated[TORCH]), booked[OURS] / booked[TORCH]
    each = [", ".join(f"{name} {peak / 1e6:.2f} MB" for name, peak in peaks.items()) for peaks in (allocated, booked)]
    return Row(
        claim='peak device memory, CPUOffloadPolicy and cache="host", against FSDP2 with CPUOffloadPolicy',
        required="<= 1.0x",
        measured=f"{by_allocator:.3f}x with activations, {by_books:.3f}x without",
        is_met=by_allocator <= 1.0 and by_books <= 1.0,
        note=(
            f"{bench.llama}, fp32, on {_NODES} nodes x {_LOCAL} ranks, the most of any rank, in forward and backward. "
            "Measured on CPU, where device and host are one memory, so the split is by what a tensor is. With "
            "activations: what torch's profiler saw allocated beyond all that rests on the host (sharded parameters "
            f"and gradients, optimizer states, the cache), {each[0]}; held to the smaller of FSDP2's two. Without: by "
            "the engine's own count, and for FSDP2 by torch's FSDPMemTracker (unsharded parameters and gradients, "
            f"buffers of all-gather and reduce-scatter), {each[1]}."
        ),
    )


@BENCHMARK.row("step-time")
def step_time(bench: Bench) -> Row:
    """Time both in turn."""
    times: dict[str, list[float]] = {OURS: [], RINGS: []}
    for _ in range(bench.repeats):
        for name, found in times.items():
            by_rank = bench.launch(measure_seconds, name, bench.steps)
            found.append(statistics.mean(seconds for seconds, _ in by_rank))
            loss = statistics.mean(loss for _, loss in by_rank)
            print(f"{name}: {found[-1]:.3f} s, loss {loss:.6f}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(found) for name, found in times.items()}
    each = "; ".join(f"{name} {', '.join(f'{seconds:.3f}' for seconds in found)} s" for name, found in times.items())
    return ratio_row(
        claim='step time on an unshaped wire, CPUOffloadPolicy and cache="host", against FSDP2 with CPUOffloadPolicy',
        ratio=medians[OURS] / medians[RINGS],
        limit=0.8,
        note=(
            f"{bench.llama}, fp32, fused AdamW on the host, {_NODES} nodes x {_LOCAL} ranks as processes over "
            f"loopback, {bench.repeats} alternating runs of {bench.steps} steps: {each}. FSDP2 has a true ring "
            "reduce-scatter and gathers that run ahead. Parameters are in the memory that computes, so no copies to a "
            "device are in these times."
        ),
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
