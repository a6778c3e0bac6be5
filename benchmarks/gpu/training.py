"""The training that every contestant runs, plain PyTorch, FSDP2 and laconic's caches: its step times and its losses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_shard

import laconic
from benchmarks.llama import Llama, decoder_layers, loss_of
from laconic.codec.lossless import MAX_NUMEL
from laconic.codec.payload import DEVICE_PIECE_NUMEL
from tests.support.alone import become_rank_0 as rank_0_of
from tests.support.launch import launch
from tests.support.measure import Benchmark, BenchmarkError, Options
from tests.support.record import Row, ratio_row

NODES, LOCAL = 2, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TIMEOUT_S = 300.0
WARMUP_STEPS = 3
LOSS_STEPS = 20
_BATCHES = 8
CACHES = ("none", "host", "device")
BLOCKS, STEPS_PER_BLOCK = 5, 4
"""The number of timed blocks of each contestant, and their steps; blocks of all contestants alternate."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The models of the rows."""

    step: Llama
    """The model of the rows about step time and overlap."""
    memory: Llama
    """The model of the rows about memory, and of overlap over Gloo."""
    loss: Llama
    """The model of the rows about losses."""
    host: Llama
    """The model of the row about host time: small kernels, many units."""
    piece_numel: int
    """The values that the row about codecs codes at once."""
    lossless_numels: tuple[int, ...]
    """The values that the row about the lossless coder codes at once: a small shard, a piece, the most of a call."""
    slab_bytes: int
    """The bytes that the row about page-locked memory copies."""
    matrices: tuple[tuple[int, int], ...]
    """The shapes of the parameters that the row about the 8-bit optimizer steps."""


FULL = Sizes(
    step=Llama(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=32_000, batch=8, sequence=2048),
    memory=Llama(hidden=1024, intermediate=2816, layers=12, heads=16, kv_heads=16, vocab=8192, batch=1, sequence=512),
    loss=Llama(hidden=256, intermediate=688, layers=4, heads=4, kv_heads=2, vocab=512, batch=2, sequence=128),
    host=Llama(hidden=256, intermediate=688, layers=32, heads=4, kv_heads=4, vocab=512, batch=1, sequence=64),
    piece_numel=1 << 26,
    lossless_numels=(1 << 20, DEVICE_PIECE_NUMEL, MAX_NUMEL),
    slab_bytes=1 << 30,
    matrices=((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)) * 8,
)
_TOY = Llama(hidden=64, intermediate=176, layers=3, heads=4, kv_heads=2, vocab=128, batch=1, sequence=32)
TOY = Sizes(
    step=_TOY, memory=_TOY, loss=_TOY, host=_TOY, piece_numel=1 << 12, lossless_numels=(1 << 12, 10_000),
    slab_bytes=1 << 16, matrices=((64, 64), (32, 96)),
)  # fmt: skip


class Bench:
    """The measurements that several rows share; each runs once, when a row first needs it."""

    def __init__(self, sizes: Sizes, device_type: str) -> None:
        self.sizes, self.device_type = sizes, device_type
        self.answers: dict[tuple[Any, ...], list[Any]] = {}
        """The results by rank of each (function, device type, *arguments) that ran."""

    def launch(
        self, function: Callable[..., Any], *args: Any, num_ranks: int = NODES * LOCAL, device_type: str = ""
    ) -> list[Any]:
        """Run `function(sizes, device type, *args)` once on ranks of this machine, two per emulated node.

        Several ranks meet over Gloo; one makes its own process group.
        """
        device_type = device_type or self.device_type
        if (key := (function, device_type, *args)) not in self.answers:
            self.answers[key] = launch(
                function, self.sizes, device_type, *args, num_ranks=num_ranks, num_local=min(num_ranks, LOCAL),
                backend="gloo" if num_ranks > 1 else None, timeout_s=TIMEOUT_S,
            )  # fmt: skip
        return self.answers[key]


def _prepare(options: Options) -> Bench:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or options.quick):
        raise BenchmarkError("torch finds no CUDA device here; --quick tries the rows at toy size on CPU")
    return Bench(TOY if options.quick else FULL, "cuda" if has_gpu else "cpu")


BENCHMARK = Benchmark(
    measures=("laconic.codec", "laconic.comm", "laconic.optim", "laconic.shard"),
    name="gpu",
    prepare=_prepare,
)


class Training:
    """The training of one model by one contestant: "plain", "fsdp2", or one of laconic's caches."""

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        shape: Llama,
        mesh: DeviceMesh | None = None,
        policy: MixedPrecisionPolicy | None = None,
        *,
        learning_rate: float = 1e-4,
        **options: Any,
    ) -> None:
        """`options` are arguments of `fully_shard`, laconic's or torch's."""
        self.model: Any = model
        policy = policy or MixedPrecisionPolicy()
        for module in (*decoder_layers(model), model) if kind != "plain" else ():
            if kind == "fsdp2":
                fsdp2_shard(module, mesh=mesh, mp_policy=policy, **options)
            else:
                laconic.fully_shard(module, mesh=mesh, mp_policy=policy, cache=kind, **options)  # type: ignore[arg-type]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self._steps = 0
        rank = dist.get_rank() if dist.is_initialized() else 0
        device = next(model.parameters()).device if mesh is None else torch.device(mesh.device_type)
        # on the device before the first step: the host must not wait for a copy in one
        self._batches = [shape.tokens(device, seed=1000 * number + rank) for number in range(_BATCHES)]

    def warm_up(self) -> list[float]:
        """Take the first steps, and return their losses."""
        return [float(self.step()) for _ in range(WARMUP_STEPS)]

    def step(self) -> Tensor:
        """Take a step on the next batch, different on every rank, and return its loss."""
        loss = self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def backward(self) -> Tensor:
        """Run forward and backward on the next batch, and return the loss."""
        loss = loss_of(self.model, self._batches[self._steps % len(self._batches)])
        self._steps += 1
        loss.backward()
        return loss.detach()


def device_of(device_type: str) -> torch.device:
    """Return the device of this rank: all ranks share one GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def seconds_per_step(training: Training, device: torch.device) -> float:
    """Return the mean seconds over the steps of a block."""
    return seconds_per_call(training.step, device, STEPS_PER_BLOCK)


def seconds_per_call(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the mean seconds of so many calls, by CUDA events on a GPU."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start_s) / calls
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def now_s() -> float:
    """Return the time at which the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def become_rank_0() -> None:
    """Make this process rank 0 of a cluster without other processes."""
    rank_0_of(NODES * LOCAL)


def step_rank(sizes: Sizes, device_type: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds per step of every block, and the first losses, by contestant."""
    mesh = laconic.init_mesh(device_type)
    device = device_of(device_type)
    kinds = ("plain", "fsdp2", "none")
    meshes = {"fsdp2": init_device_mesh(device_type, (1,)), "none": mesh}
    trainings = {
        kind: Training(kind, sizes.step.build(device, torch.bfloat16), sizes.step, meshes.get(kind)) for kind in kinds
    }
    losses = {kind: trainings[kind].warm_up() for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(BLOCKS):
        for turn in range(len(kinds)):  # every contestant is first equally often
            kind = kinds[(block + turn) % len(kinds)]
            times[kind].append(seconds_per_step(trainings[kind], device))
    return {kind: (times[kind], losses[kind]) for kind in kinds}


def _step_times(bench: Bench) -> dict[str, tuple[list[float], list[float]]]:
    return bench.launch(step_rank, num_ranks=1)[0]


@BENCHMARK.row("step-plain")
def step_plain(bench: Bench) -> Row:
    sizes, measured = bench.sizes, _step_times(bench)
    each = ", ".join(
        f"{kind} {statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
        for kind, (times, _) in measured.items()
    )
    worst = max(abs(a - b) / abs(b) for a, b in zip(measured["none"][1], measured["plain"][1], strict=True))
    note = (
        f"{sizes.step}, bf16, fused AdamW; medians of {BLOCKS} interleaved blocks of {STEPS_PER_BLOCK} "
        f"steps: {each}. The first {WARMUP_STEPS} losses differ from plain PyTorch's by {worst:.1e} at most."
    )
    return _step_row(bench, "plain", "plain PyTorch", note)


@BENCHMARK.row("step-fsdp2")
def step_fsdp2(bench: Bench) -> Row:
    return _step_row(bench, "fsdp2", "FSDP2")


def _step_row(bench: Bench, kind: str, name: str, note: str = "") -> Row:
    laconic_s, other_s = (statistics.median(_step_times(bench)[each][0]) for each in ("none", kind))
    claim = f"step time, one rank, laconic / {name}"
    return ratio_row(claim=claim, ratio=laconic_s / other_s, note=note)


def loss_rank(sizes: Sizes, device_type: str) -> dict[str, list[float]]:
    """Return the losses of this rank, step by step, by cache, in fp32 without TF32."""
    mesh = laconic.init_mesh(device_type)
    device = device_of(device_type)
    losses = {}
    for cache in CACHES:
        model = sizes.loss.build(torch.device("cpu"), torch.float32).to(device)  # the same weights on both devices
        training = Training(cache, model, sizes.loss, mesh, learning_rate=1e-3)
        losses[cache] = [float(training.step()) for _ in range(LOSS_STEPS)]
    return losses


def loss(bench: Bench, cache: str) -> Row:
    by_device = (bench.launch(loss_rank, device_type=each) for each in (bench.device_type, "cpu"))
    differences = [
        abs(on_device - on_cpu) / abs(on_cpu)
        for device_losses, cpu_losses in zip(*by_device, strict=True)
        for on_device, on_cpu in zip(device_losses[cache], cpu_losses[cache], strict=True)
    ]
    return Row(
        claim=f"loss on {bench.device_type.upper()} against CPU, cache={cache}, largest relative difference",
        measured=f"{max(differences):.1e}",
        note=f"{bench.sizes.loss}, fp32, {LOSS_STEPS} AdamW steps on {NODES} x {LOCAL} ranks",
    )


for _cache in CACHES:
    BENCHMARK.row(f"loss-{_cache}")(partial(loss, cache=_cache))
