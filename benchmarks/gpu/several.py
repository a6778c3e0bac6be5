"""The engine on several GPUs, one rank each: rows that one GPU cannot give.

    torchrun --nproc-per-node 8 -m benchmarks.gpu.several            on one machine, or on each of several
    torchrun --nproc-per-node 4 -m benchmarks.gpu.several --quick    toy sizes, not recorded; without GPUs on CPU

`make gpu` runs it where it finds several GPUs. One machine of four or more stands for two nodes, so that all crossings
run: their wire is then the links between its GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import laconic
from benchmarks.gpu import policies
from benchmarks.gpu.training import (
    BENCHMARK,
    BF16,
    BLOCKS,
    FULL,
    STEPS_PER_BLOCK,
    TOY,
    Sizes,
    Training,
    now_s,
    seconds_per_step,
)
from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.groups import started_bytes
from tests.support.imported import imported_here
from tests.support.record import Record, Row, ratio_row, rows_table

_OURS: dict[str, dict[str, Any]] = {"none": {}, "host": {}, "device": {}, "4bit": {"wire": "4bit"}}
_GATHERED_BYTES = 1 << 28
_REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of this run, and what they train."""

    sizes: Sizes
    device: torch.device
    nodes: int
    local: int

    @property
    def shape(self) -> str:
        """The ranks in words."""
        backend = "NCCL" if self.device.type == "cuda" else "Gloo"
        return f"{self.nodes} x {self.local} ranks over {backend}"

    def of_all(self, value: Any) -> list[Any]:
        """Return what each rank has. Collective."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def policies_of_several(ranks: Ranks) -> Row:
    """Every policy trains on several GPUs as on as many ranks on CPU."""
    cpu = torch.device("cpu")
    losses = {
        device: ranks.of_all(policies.losses_by_policy(ranks.sizes.loss, device, nodes=ranks.nodes, local=ranks.local))
        for device in dict.fromkeys((ranks.device, cpu))
    }
    found = list(policies.differences(losses[ranks.device], losses[cpu]))
    name = f"{dist.get_world_size()} x {ranks.device.type.upper()}"
    return policies.policies_row(found, ranks.sizes.loss, ranks.shape, name)


def step_of_several(ranks: Ranks) -> Row:
    """A step of each placement against FSDP2 and, on several nodes, HSDP."""
    times = _step_times(ranks)
    medians = {name: statistics.median(of) for name, of in times.items()}
    peers = {name: seconds for name, seconds in medians.items() if name not in _OURS}
    ours = {name: seconds for name, seconds in medians.items() if name in _OURS}
    each = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in medians.items())
    return ratio_row(
        claim="step time on several GPUs, the best of laconic's placements / the best of FSDP2 and HSDP",
        ratio=min(ours.values()) / min(peers.values()),
        note=f"{ranks.sizes.step}, fp32 with bf16 compute, fused AdamW, {ranks.shape}; the slowest rank's medians of "
        f"{BLOCKS} alternating blocks of {STEPS_PER_BLOCK} steps: {each}.",
    )  # fmt: skip


def _step_times(ranks: Ranks) -> dict[str, list[float]]:
    """The seconds of a step by contestant, block by block, of the slowest rank."""
    world, device = dist.get_world_size(), ranks.device
    mesh = laconic.init_mesh(device.type, nodes=ranks.nodes, local=ranks.local)
    meshes = {"fsdp2": init_device_mesh(device.type, (world,))}
    if ranks.nodes > 1:
        names = ("replicate", "shard")
        meshes["hsdp"] = init_device_mesh(device.type, (ranks.nodes, ranks.local), mesh_dim_names=names)
    options = {**{name: {} for name in meshes}, **_OURS}
    times: dict[str, list[float]] = {}
    for block in range(BLOCKS):
        for name in sorted(options, reverse=bool(block % 2)):  # one model at a time: all together would not fit
            kind = "fsdp2" if name in meshes else "host" if name == "4bit" else name
            model = ranks.sizes.step.build(device, torch.float32)
            training = Training(kind, model, ranks.sizes.step, meshes.get(name, mesh), BF16, **options[name])
            training.warm_up()
            seconds = max(ranks.of_all(seconds_per_step(training, device)))
            times.setdefault(name, []).append(seconds)
            del training, model
    return times


def gathers_of_several(ranks: Ranks) -> Row:
    """The bytes a second that a gather brings, on each level."""
    cluster = Cluster.of(laconic.init_mesh(ranks.device.type, nodes=ranks.nodes, local=ranks.local))
    numel = _GATHERED_BYTES // 2 if ranks.device.type == "cuda" else 1 << 12
    rates = {}
    for level, group in cluster.gather_groups.items():
        if group is None or group.size() == 1:
            continue
        part = torch.ones(numel // group.size(), dtype=torch.bfloat16, device=ranks.device)
        whole = torch.empty(part.numel() * group.size(), dtype=part.dtype, device=ranks.device)
        gather = partial(_compat.all_gather_flat, whole, part, group=group, async_op=False)
        seconds = max(ranks.of_all(_seconds(gather)))
        rates[level] = (whole.nbytes - part.nbytes) / seconds
    return Row(
        claim="what a gather brings to a GPU, bytes a second, by level",
        measured="; ".join(f"{level} {rate / 1e9:.2f} GB/s" for level, rate in rates.items()) or "one rank",
        note=f"{numel * 2 / 1e6:.1f} MB in bf16, {ranks.shape}; the slowest rank's median of {_REPEATS}. "
        "`laconic doctor --out` writes such rates into a cluster file.",
    )


def _seconds(move: Callable[[], Any]) -> float:
    """The median seconds of a transfer until this rank's device has done it."""
    move()
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        start_s = now_s()
        move()
        times.append(now_s() - start_s)
    return statistics.median(times)


def communicators_of_several(ranks: Ranks) -> Row:
    """The communicators of a cluster, and the device memory that they take."""
    cluster = Cluster.of(laconic.init_mesh(ranks.device.type, nodes=ranks.nodes, local=ranks.local))
    groups = cluster.communicators
    return Row(
        claim="communicators of a rank on the device",
        measured=str(len(groups)),
        note=f"{ranks.shape}: {'; '.join(groups)}; {started_bytes() / 2**20:.0f} MiB of device memory when laconic let "
        "them begin. FSDP2 has one, HSDP three.",
    )


ROWS: dict[str, Callable[[Ranks], Row]] = {
    "several-policies": policies_of_several, "several-step": step_of_several, "several-gathers": gathers_of_several,
    "several-communicators": communicators_of_several,
}  # fmt: skip


def main() -> int:
    """Measure the rows on all ranks, in order of worth; the first rank prints them, and records them one by one."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node GPUS -m benchmarks.gpu.several", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rows", default=",".join(ROWS), metavar="A,B,...", help="default: all")
    parser.add_argument("--quick", action="store_true", help="toy sizes; record nothing")
    options = parser.parse_args()
    chosen = options.rows.split(",")
    if unknown := sorted(set(chosen) - ROWS.keys()):
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    is_quick, has_gpu = options.quick, torch.cuda.is_available()
    if not (has_gpu or is_quick):
        print("benchmarks.gpu.several: torch finds no CUDA device here; --quick tries the rows on CPU", file=sys.stderr)
        return 1
    if "RANK" not in os.environ:
        print("benchmarks.gpu.several: start it with torchrun --nproc-per-node GPUS", file=sys.stderr)
        return 1
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    nodes = dist.get_world_size() // local
    if nodes == 1 and local >= 4 and local % 2 == 0:
        nodes, local = 2, local // 2
    ranks = Ranks(sizes=TOY if is_quick else FULL, device=device, nodes=nodes, local=local)
    found = {}
    for key in (key for key in ROWS if key in chosen):
        row = found[BENCHMARK.name, key] = replace(ROWS[key](ranks), key=key)
        if dist.get_rank() == 0 and not is_quick:
            _record(row)
    if dist.get_rank() == 0:
        print(rows_table(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _record(row: Row) -> None:
    Record(
        BENCHMARK.name, [row], [*BENCHMARK.rows, *ROWS], ["--rows", row.key], module="benchmarks.gpu.several",
        measures=BENCHMARK.measures, imported=imported_here(),
    ).save()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
