"""laconic on a CUDA machine: one GPU is enough. Under 10 minutes on an H200; writes its rows into RESULTS.md beside it.

    python benchmarks/gpu.py                                # all parts
    python benchmarks/gpu.py --rows step,overlap            # some of them
    python benchmarks/gpu.py --dry-run-cpu                  # the same code at toy size without a GPU; writes nothing

Rows: `step` (one rank on NCCL against plain PyTorch and FSDP2), `memory` (four ranks on one GPU over Gloo), `overlap`
(host copies in the profiler's trace), `loss` (the same training on CPU and on CUDA).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _launch import launch
from _llama import Llama, decoder_layers, loss_of
from _trace import Overlap, StreamLabel, events_of, overlap
from record import RESULTS, Row, rows_table, write_section
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_shard

import laconic
from laconic.compare.machine import describe_machine, in_words
from laconic.shard.unit import unit_of

NODES, LOCAL = 2, 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    step: Llama
    memory: Llama
    loss: Llama
    blocks: int
    """Timed blocks per contestant, interleaved."""
    steps_per_block: int
    loss_steps: int
    memory_steps: int = 3
    """The peak is the most of so many warm steps."""
    profiled_steps: int = 2
    warm_up: int = 3


FULL = Sizes(
    step=Llama(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=32_000, batch=4, sequence=2048),
    memory=Llama(hidden=1024, intermediate=2816, layers=12, heads=16, kv_heads=16, vocab=8192, batch=1, sequence=512),
    loss=Llama(hidden=256, intermediate=688, layers=4, heads=4, kv_heads=2, vocab=512, batch=2, sequence=128),
    blocks=9,
    steps_per_block=4,
    loss_steps=20,
)
_TOY = Llama(hidden=64, intermediate=176, layers=3, heads=4, kv_heads=2, vocab=128, batch=1, sequence=32)
TOY = Sizes(step=_TOY, memory=_TOY, loss=_TOY, blocks=2, steps_per_block=1, loss_steps=3, profiled_steps=1, warm_up=2)


# -- what runs on a rank -----------------------------------------------------------------------------------------------


class Training:
    """One model being trained by one contestant: "plain", "fsdp2", or one of laconic's caches."""

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        shape: Llama,
        mesh: DeviceMesh | None = None,
        policy: MixedPrecisionPolicy | None = None,
        *,
        learning_rate: float = 1e-4,
    ) -> None:
        self.model: Any = model
        self._shape = shape
        self._device = next(model.parameters()).device
        policy = policy or MixedPrecisionPolicy()
        for module in (*decoder_layers(model), model) if kind != "plain" else ():
            if kind == "fsdp2":
                fsdp2_shard(module, mesh=mesh, mp_policy=policy)
            else:
                laconic.fully_shard(module, mesh=mesh, mp_policy=policy, cache=kind)  # type: ignore[arg-type]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self._steps = 0

    def step(self) -> Tensor:
        """One step on a fresh batch of this rank's own."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        tokens = self._shape.tokens(self._device, seed=1000 * self._steps + rank)
        self._steps += 1
        loss = loss_of(self.model, tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def device_of(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def seconds_per_step(training: Training, steps: int, device: torch.device) -> float:
    """Mean over `steps` steps, by CUDA events where there are any."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(steps):
            training.step()
        return (time.perf_counter() - begin) / steps
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(steps):
        training.step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / steps


def step_rank(sizes: Sizes, device_type: str) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds per step, block by block, and first losses, by contestant; on one rank."""
    mesh = laconic.init_mesh(device_type)
    device = device_of(device_type)
    kinds = ("plain", "fsdp2", "none")
    meshes = {"fsdp2": init_device_mesh(device_type, (1,)), "none": mesh}
    trainings = {
        kind: Training(kind, sizes.step.build(device, torch.bfloat16), sizes.step, meshes.get(kind)) for kind in kinds
    }
    losses = {kind: [float(trainings[kind].step()) for _ in range(sizes.warm_up)] for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(sizes.blocks):
        for turn in range(len(kinds)):  # everyone goes first as often as last
            kind = kinds[(block + turn) % len(kinds)]
            times[kind].append(seconds_per_step(trainings[kind], sizes.steps_per_block, device))
    return {kind: (times[kind], losses[kind]) for kind in kinds}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most memory of a step on one rank, in bytes."""

    allocated: int
    """torch's own figure; the engine's where there is no GPU."""
    engine: int
    host: int
    pageable: bool
    """The slab could not be page-locked."""


def play_rank_0() -> None:
    """Make this process rank 0 of a cluster that nobody else is in: collectives carry nothing and take no time."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", rank=0, world_size=NODES * LOCAL)


def memory_rank(sizes: Sizes, device_type: str, kinds: Sequence[str], alone: bool) -> dict[str, Peak | str]:
    """Peak memory of warm steps by contestant, or why there is none."""
    if alone:
        play_rank_0()
    mesh = laconic.init_mesh(device_type, nodes=NODES, local=LOCAL)
    flat = init_device_mesh(device_type, (dist.get_world_size(),))
    device = device_of(device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    peaks: dict[str, Peak | str] = {}
    for kind in kinds:
        try:
            peaks[kind] = _peak_of(kind, sizes, device, flat if kind == "fsdp2" else mesh, policy)
        except Exception as error:
            if kind != "fsdp2":  # the baseline may be unable to: what it cannot do over this backend is a finding
                raise
            peaks[kind] = f"{type(error).__name__}: {error}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return peaks


def _peak_of(kind: str, sizes: Sizes, device: torch.device, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Peak:
    training = Training(kind, sizes.memory.build(device, torch.float32), sizes.memory, mesh, policy)
    for _ in range(sizes.warm_up):
        training.step()
    is_laconic = kind != "fsdp2"
    if is_laconic:
        training.model.reset_peak_memory()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(sizes.memory_steps):
        training.step()
    engine = training.model.memory() if is_laconic else None
    engine_peak = engine.device_peak_bytes if engine else 0
    allocated = torch.cuda.max_memory_allocated() if device.type == "cuda" else engine_peak
    slab = _slab_of(training.model) if kind == "host" else None
    return Peak(
        allocated=allocated,
        engine=engine_peak,
        host=engine.host_bytes if engine else 0,
        pageable=slab is not None and device.type == "cuda" and not slab.is_pinned(),
    )


def _slab_of(model: nn.Module) -> Tensor | None:
    """A slice that rests in the host slab."""
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    resting = [bucket.resting for unit in units for bucket in unit.buckets]
    return next((each.buffer() for each in resting if each is not None and each.is_in_slab), None)


def overlap_rank(sizes: Sizes, device_type: str, shape: Llama, alone: bool) -> tuple[Overlap, dict[str, float]]:
    """Overlap of the host cache's copies on this rank, and seconds per step without the profiler by cache."""
    if alone:
        play_rank_0()
    mesh = laconic.init_mesh(device_type, nodes=NODES, local=LOCAL)
    device = device_of(device_type)
    seconds: dict[str, float] = {}
    result = None
    for kind in ("none", "device", "host") if alone else ("host",):
        training = Training(kind, shape.build(device, torch.bfloat16), shape, mesh)
        for _ in range(sizes.warm_up):
            training.step()
        seconds[kind] = seconds_per_step(training, sizes.steps_per_block, device)
        if kind == "host":
            result = _profiled(training, sizes.profiled_steps, device)
        del training
        gc.collect()
    assert result is not None
    return result, seconds


def _profiled(training: Training, steps: int, device: torch.device) -> Overlap:
    context = unit_of(training.model).context  # type: ignore[union-attr]
    assert context is not None
    if device.type != "cuda":
        training.step()
        return overlap(_SYNTHETIC_TRACE, [12_347, 12_391])
    labels = []
    for lane, nbytes in ((context.lanes.to_host, 12_347), (context.lanes.to_device, 12_391)):
        assert lane._stream is not None
        labels.append(StreamLabel(lane._stream, nbytes))
    for measured in (False, True):  # the first profile of a process pays for setting the profiler up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for label in labels:
                label.leave()
            for _ in range(steps if measured else 1):
                training.step()
            torch.cuda.synchronize()
    return overlap(events_of(profile), [label.nbytes for label in labels])


# A trace such as a GPU leaves, for the dry run: two labels, two copies, one of them half exposed, and others' events.
_SYNTHETIC_TRACE = [
    {"ph": "X", "cat": "gpu_memcpy", "ts": 0, "dur": 1, "args": {"stream": 20, "bytes": 12_347}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 0, "dur": 1, "args": {"stream": 21, "bytes": 12_391}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 10, "dur": 95, "args": {"stream": 20, "bytes": 5_000}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 110, "dur": 10, "args": {"stream": 21, "bytes": 5_000}},
    {"ph": "X", "cat": "gpu_memcpy", "ts": 200, "dur": 10, "args": {"stream": 7, "bytes": 5_000}},
    {"ph": "X", "cat": "kernel", "ts": 5, "dur": 110, "args": {"stream": 7}},
    {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 500, "args": {}},
]


def loss_rank(sizes: Sizes, device_type: str, kinds: Sequence[str]) -> dict[str, list[float]]:
    """Losses of this rank, step by step, by contestant, in fp32 without TF32."""
    mesh = laconic.init_mesh(device_type)
    device = device_of(device_type)
    losses = {}
    for kind in kinds:
        model = sizes.loss.build(torch.device("cpu"), torch.float32).to(device)  # the same weights on both devices
        training = Training(kind, model, sizes.loss, mesh, learning_rate=1e-3)
        losses[kind] = [float(training.step()) for _ in range(sizes.loss_steps)]
    return losses


# -- the parts ---------------------------------------------------------------------------------------------------------


def step_part(sizes: Sizes, device_type: str) -> list[Row]:
    measured = launch(step_rank, 1, 1, sizes, device_type, backend=None, timeout_s=240)[0]
    medians = {kind: statistics.median(times) for kind, (times, _) in measured.items()}
    spread = ", ".join(
        f"{kind} {medians[kind] * 1e3:.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
        for kind, (times, _) in measured.items()
    )
    drift = max(abs(a - b) / abs(b) for a, b in zip(measured["none"][1], measured["plain"][1], strict=True))
    note = (
        f"{sizes.step}, bf16, fused AdamW; medians of {sizes.blocks} interleaved blocks of {sizes.steps_per_block} "
        f"steps: {spread}. The first {sizes.warm_up} losses differ from plain PyTorch's by {drift:.1e} at most."
    )
    return [
        _at_most(
            "step-plain", "step time, one rank, laconic / plain PyTorch", medians["none"] / medians["plain"], 1.03, note
        ),
        _at_most("step-fsdp2", "step time, one rank, laconic / FSDP2", medians["none"] / medians["fsdp2"], 1.00),
    ]


def _at_most(key: str, claim: str, value: float, bound: float, note: str = "") -> Row:
    return Row(
        key=key, claim=claim, required=f"<= {bound:.2f}", measured=f"{value:.3f}", is_met=value <= bound, note=note
    )


def _within(key: str, claim: str, ratio: float, tolerance: float, note: str = "") -> Row:
    return Row(
        key=key,
        claim=claim,
        required=f"1 within {tolerance:.0%}",
        measured=f"{ratio:.4f}",
        is_met=abs(ratio - 1) <= tolerance,
        note=note,
    )


def memory_part(sizes: Sizes, device_type: str) -> list[Row]:
    kinds = ("none", "host", "device", "fsdp2")
    by_rank = launch(memory_rank, NODES * LOCAL, LOCAL, sizes, device_type, kinds, False, backend="gloo", timeout_s=300)
    alone = launch(memory_rank, 1, 1, sizes, device_type, kinds[:3], True, backend=None, timeout_s=120)[0]
    peaks = {kind: _largest([peaks[kind] for peaks in by_rank]) for kind in kinds}
    none, host, device, fsdp2 = (peaks[kind] for kind in kinds)
    assert isinstance(none, Peak)
    assert isinstance(host, Peak)
    assert isinstance(device, Peak)
    with torch.device("meta"):
        numel = sum(p.numel() for p in sizes.memory.build(torch.device("meta"), torch.bfloat16).parameters())
    slices = 2 * numel / LOCAL
    expected = none.allocated + slices
    name = "torch's peak allocated" if device_type == "cuda" else "the engine's peak"
    note = (
        f"{sizes.memory}, fp32 with bf16 compute, {NODES} nodes x {LOCAL} ranks on one device; MB: none "
        f"{none.allocated / 1e6:.1f}, host {host.allocated / 1e6:.1f}, device {device.allocated / 1e6:.1f}; as the "
        f"engine accounts: {none.engine / 1e6:.1f}, {host.engine / 1e6:.1f}, {device.engine / 1e6:.1f}; host slab "
        f"{host.host / 1e6:.1f} MB per rank{', NOT page-locked' if host.pageable else ''}. With one rank alone, whose "
        f"transfers take no time and are ordered by streams as NCCL's are, host / none is "
        f"{alone['host'].allocated / alone['none'].allocated:.4f} and device / (none + W / L) "
        f"{alone['device'].allocated / (alone['none'].allocated + slices):.4f}."
    )
    rows = [
        _within("memory-host", f"{name}, cache=host / none", host.allocated / none.allocated, 0.02, note),
        _within("memory-device", f"{name}, cache=device / (none + W / L)", device.allocated / expected, 0.05),
    ]
    claim = f"{name}, cache=host / FSDP2"
    if isinstance(fsdp2, str):
        reason = f"FSDP2 did not run over Gloo on this device: {fsdp2}"
        rows.append(Row(key="memory-fsdp2", claim=claim, required="<= 1.00", measured="-", is_met=False, note=reason))
    elif device_type == "cuda":
        ratio = host.allocated / fsdp2.allocated
        rows.append(_at_most("memory-fsdp2", claim, ratio, 1.0, f"FSDP2 {fsdp2.allocated / 1e6:.1f} MB"))
    return rows


def _largest(peaks: Sequence[Peak | str]) -> Peak | str:
    failed = [peak for peak in peaks if isinstance(peak, str)]
    return failed[0] if failed else max((p for p in peaks if isinstance(p, Peak)), key=lambda peak: peak.allocated)


def overlap_part(sizes: Sizes, device_type: str) -> list[Row]:
    alone, seconds = launch(overlap_rank, 1, 1, sizes, device_type, sizes.step, True, backend=None, timeout_s=200)[0]
    crowd = launch(
        overlap_rank, NODES * LOCAL, LOCAL, sizes, device_type, sizes.memory, False, backend="gloo", timeout_s=200
    )
    over_gloo: Overlap = crowd[0][0]
    times = ", ".join(f"{kind} {value * 1e3:.1f} ms" for kind, value in seconds.items())
    return [
        _at_most(
            "overlap-alone",
            "host copies exposed, share of their time: one rank of 2 x 2, transfers between ranks free",
            alone.exposed_fraction,
            0.10,
            f"{sizes.step}, bf16; {alone}. Steps without the profiler: {times}.",
        ),
        _at_most(
            "overlap-gloo",
            "host copies exposed, share of their time: 2 x 2 ranks on one GPU over Gloo",
            over_gloo.exposed_fraction,
            0.10,
            f"{sizes.memory}, bf16; rank 0: {over_gloo}. Gloo carries every collective through host memory and four "
            "processes take turns on the GPU: most of the time there is no kernel that a copy could hide behind.",
        ),
    ]


def loss_part(sizes: Sizes, device_type: str) -> list[Row]:
    kinds = ("none", "host", "device")
    world = NODES * LOCAL
    runs = {
        where: launch(loss_rank, world, LOCAL, sizes, where, kinds, backend="gloo", timeout_s=200)
        for where in dict.fromkeys(("cpu", device_type))
    }
    rows = []
    for kind in kinds:
        pairs = [
            (there, here)
            for rank in range(world)
            for there, here in zip(runs[device_type][rank][kind], runs["cpu"][rank][kind], strict=True)
        ]
        worst = max(abs(there - here) / abs(here) for there, here in pairs)
        rows.append(
            Row(
                key=f"loss-{kind}",
                claim=f"loss on {device_type.upper()} against CPU, cache={kind}, largest relative difference",
                required="<= 1e-4",
                measured=f"{worst:.1e}",
                is_met=worst <= 1e-4,
                note=f"{sizes.loss}, fp32, {sizes.loss_steps} AdamW steps on {NODES} x {LOCAL} ranks",
            )
        )
    return rows


PARTS: dict[str, tuple[str, Callable[[Sizes, str], list[Row]]]] = {
    "step": ("One GPU, one rank on NCCL: step time", step_part),
    "memory": ("One GPU, four ranks over Gloo: peak memory", memory_part),
    "overlap": ("One GPU: host copies behind compute", overlap_part),
    "loss": ("One GPU, four ranks over Gloo: the same losses as on CPU", loss_part),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(PARTS), help="parts, comma-separated; default: %(default)s")
    parser.add_argument("--dry-run-cpu", action="store_true", help="toy sizes on CPU; writes nothing without --results")
    parser.add_argument("--results", type=Path, help="the file to write the sections into; default: RESULTS.md here")
    options = parser.parse_args(argv)
    parts = options.rows.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.dry_run_cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --dry-run-cpu tries the script without one")
    device_type, sizes = ("cpu", TOY) if options.dry_run_cpu else ("cuda", FULL)
    path = options.results or (None if options.dry_run_cpu else RESULTS)
    command = shlex.join(["python", "benchmarks/gpu.py", *(sys.argv[1:] if argv is None else argv)])
    failed = False
    for part in parts:
        heading, measure = PARTS[part]
        begin = time.monotonic()
        try:
            rows = measure(sizes, device_type)
        except (RuntimeError, TimeoutError) as error:
            failed = True
            print(f"{part} failed:\n{error}", file=sys.stderr)
            reason = str(error).strip().splitlines()[-1]
            rows = [Row(key=part, claim=heading, required="-", measured="not measured", is_met=False, note=reason)]
        body = f"{_circumstances(command)}\n\n{rows_table(rows)}"
        print(f"\n{heading} ({time.monotonic() - begin:.0f} s)\n\n{body}", flush=True)
        if path is not None:
            write_section(heading, body, path)
    return 1 if failed else 0


def _circumstances(command: str) -> str:
    machine = describe_machine()
    gpu = ""
    if torch.cuda.is_available():
        driver = torch.version.cuda
        gpu = f"{torch.cuda.get_device_name()}, CUDA {driver}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; "
    return f"`{command}`, {machine['date']}: {gpu}{in_words(machine)}."


if __name__ == "__main__":
    sys.exit(main())
