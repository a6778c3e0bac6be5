"""Rows about versions that one rank publishes from the device: the memory that they add, and the time they take."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import laconic
from benchmarks.gpu.training import BENCHMARK, BF16, Bench, Sizes, Training, device_of, now_s
from laconic.publish import Publisher
from laconic.shard.unit import unit_of
from tests.support.record import Row, ratio_row

VERSIONS = {"gaps": 8, "smallest": 4}
"""The versions by encoding: the first one is whole, in the second one all elements change."""
_RATE = 1e-6
_MOST_THREADS = 16
_MEASURES = ("laconic.codec.lossless", "laconic.publish")


@dataclass(frozen=True, kw_only=True)
class Published:
    """The memory and the seconds of versions on the rank."""

    added: dict[str, list[int]]
    """Bytes of device memory above those before, at any moment, by encoding and version; empty without a GPU."""
    unit: int
    """The bytes of the largest unit's shard."""
    seconds: dict[str, list[float]]
    """In `publish`, by encoding and version."""
    writing: dict[str, list[float]]
    """From there to the end of the write, likewise."""
    gather: list[float]


def publish_rank(sizes: Sizes, device_type: str) -> Published:
    """Publish versions of a model that trains with fp32 weights in bf16, and gather one of FSDP2."""
    torch.set_num_threads(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
    device = device_of(device_type)

    def made(kind: str, mesh: Any) -> Training:
        model = sizes.memory.build(device, torch.float32)
        training = Training(kind, model, sizes.memory, mesh, BF16, learning_rate=_RATE)
        training.warm_up()
        return training

    training = made("none", laconic.init_mesh(device_type))
    found = Published(
        added={each: [] for each in VERSIONS},
        unit=_largest_unit(training.model),
        seconds={each: [] for each in VERSIONS},
        writing={each: [] for each in VERSIONS},
        gather=[],
    )
    for encoding, versions in VERSIONS.items():
        with tempfile.TemporaryDirectory() as folder, Publisher(training.model, folder, encoding=encoding) as publisher:  # type: ignore[arg-type]
            for version in range(versions):
                training.step()
                if version == 1:
                    _change_all(training.model)
                before = _begin(device)
                found.seconds[encoding].append(_timed(publisher.publish))
                found.writing[encoding].append(_timed(publisher.wait))
                if device.type == "cuda":
                    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
                    found.added[encoding].append(int(peak) - before)
    del training, publisher
    peer = made("fsdp2", init_device_mesh(device_type, (1,)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def gather() -> None:
        for tensor in get_model_state_dict(peer.model, options=options).values():
            tensor.bfloat16()

    for _ in range(VERSIONS["gaps"]):
        peer.step()
        found.gather.append(_timed(gather))
    return found


def _largest_unit(model: nn.Module) -> int:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return max(sum(bucket.shard.nbytes for bucket in unit.buckets) for unit in units)


@torch.no_grad()
def _change_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def _begin(device: torch.device) -> int:
    """Forget the peak of device memory. Returns the bytes that are held."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def _timed(action: Callable[[], object]) -> float:
    begun_s = now_s()
    action()
    return time.perf_counter() - begun_s


def _published(bench: Bench) -> Published:
    found: Published = bench.launch(publish_rank, num_ranks=1)[0]
    return found


@BENCHMARK.row("publish-memory")
def publish_memory(bench: Bench) -> Row:
    """The device memory that versions add."""
    found = _published(bench)
    claim = "device memory that a publisher adds at any moment, against the largest unit's shard"
    if bench.device_type == "cpu":
        return Row(claim=claim, measured="-", note="No device memory on CPU.")
    each = "; ".join(f"{name} {', '.join(f'{it / 1e6:.1f}' for it in added)}" for name, added in found.added.items())
    row = ratio_row(
        claim=claim,
        ratio=max(max(added) for added in found.added.values()) / found.unit,
        note=f"{bench.sizes.memory}, fp32 with bf16 compute, one rank; the largest unit has {found.unit / 1e6:.1f} MB; "
        f"MB that versions add, in turn: {each}. The first one has all values; in the second one all elements change.",
    )
    return dataclasses.replace(row, measures=_MEASURES)


@BENCHMARK.row("publish-standstill")
def publish_standstill(bench: Bench) -> Row:
    """The time in `publish` against a gather."""
    found = _published(bench)
    later = {name: each[2:] for name, each in found.seconds.items()}
    seconds = {name: statistics.median(each) for name, each in later.items()}
    writing = {name: statistics.median(each[2:]) for name, each in found.writing.items()}
    gather = statistics.median(found.gather[2:])
    row = ratio_row(
        claim="time that training stands still for a version, one rank, against FSDP2's weights brought to the host",
        ratio=seconds["gaps"] / gather,
        note=f"{bench.sizes.memory}, AdamW at {_RATE:g} from a random start; medians without the first two: "
        + ", ".join(f"{name} {seconds[name]:.4f} s, then {writing[name]:.4f} s to write" for name in VERSIONS)
        + f"; FSDP2 {gather:.4f} s, with `full_state_dict`, `cpu_offload` and a cast to bf16. No wire is in between. "
        f"The first version took {found.seconds['gaps'][0]:.4f} s, and one in which all changes "
        f"{found.seconds['gaps'][1]:.4f} s.",
    )
    return dataclasses.replace(row, measures=_MEASURES)
