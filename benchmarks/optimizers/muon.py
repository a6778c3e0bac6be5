"""The row about the bytes of Muon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import laconic
from benchmarks.llama import Llama, decoder_layers
from benchmarks.optimizers.bench import BENCHMARK, LOCAL, NODES, Bench, sum_over_ranks
from benchmarks.optimizers.collective_bytes import CollectiveBytes
from laconic.optim import Muon, matrices_and_rest
from tests.support.record import Row

_FLOAT32_BYTES = 4


@BENCHMARK.row("muon-bytes")
def muon_bytes(bench: Bench) -> Row:
    measured = bench.on_ranks(measure_muon)
    ratio = measured["rows"] / measured["fsdp2"]
    return Row(
        claim="Muon's extra wire + local bytes per step, in multiples of matrix bytes / against torch.optim.Muon on "
        "FSDP2 / with whole-matrix blocks",
        required="<= 2.0 / <= 0.5x / 0",
        measured=f"{measured['rows']:.2f} / {ratio:.3f}x / {measured['whole']:.0f}",
        is_met=measured["rows"] <= 2 and ratio <= 0.5 and measured["whole"] == 0,
        note=(
            f"hidden matrices of {bench.mix}, {NODES} x {LOCAL} ranks: bytes received, summed over ranks, over the "
            f"matrices' fp32 bytes; FSDP2 {measured['fsdp2']:.2f}, where each collective counts as if it used its best "
            "algorithm, and a gather by which DTensor replaces an all-to-all on CPU counts as the all-to-all."
        ),
    )


def measure_muon(mix: Llama) -> dict[str, float]:
    """Return the bytes that one step of Muon moves, in multiples of the matrices' fp32 bytes, by kind of sharding."""
    return {
        "rows": _laconic_bytes(mix, None),
        "whole": _laconic_bytes(mix, _whole),
        "fsdp2": _torch_bytes(mix),
    }


def sharded(mix: Llama, granularity: Callable[[str, Tensor], int] | None = None) -> Any:
    """Build the model and shard it with laconic."""
    mesh = laconic.init_mesh("cpu")
    model = mix.build(torch.device("cpu"), torch.float32)
    for layer in decoder_layers(model):
        laconic.fully_shard(layer, mesh=mesh, granularity=granularity)
    return laconic.fully_shard(model, mesh=mesh, granularity=granularity)


def _whole(name: str, parameter: Tensor) -> int:
    return parameter.numel()


def _laconic_bytes(mix: Llama, granularity: Callable[[str, Tensor], int] | None) -> float:
    model = sharded(mix, granularity)
    matrices = matrices_and_rest(model)[0]["params"]
    for parameter in matrices:
        parameter.grad = torch.randn_like(parameter)
    before = model.traffic.snapshot()
    Muon(matrices).step()
    moved = model.traffic.snapshot() - before
    return sum_over_ranks(moved.total(purpose="optimizer", direction="received")) / _matrix_bytes(matrices)


def _torch_bytes(mix: Llama) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mix.build(torch.device("cpu"), torch.float32)
    matrices = matrices_and_rest(model)[0]["params"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    chosen = {names[parameter] for parameter in matrices}
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = [parameter for name, parameter in model.named_parameters() if name in chosen]
    for p in parameters:
        assert isinstance(p, DTensor)
        local = torch.randn_like(p.to_local())
        p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    optimizer = torch.optim.Muon(parameters)
    with CollectiveBytes(dist.get_world_size()).counting() as counted:
        optimizer.step()
    return sum_over_ranks(counted.received_bytes) / _matrix_bytes(parameters)


def _matrix_bytes(matrices: list[nn.Parameter]) -> int:
    return _FLOAT32_BYTES * sum(parameter.numel() for parameter in matrices)
