"""Models and questions that the tests of coded crossings share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.shard.crossing import CopyState
from tests.support.sharded_net import buckets, full_parameters, train_step


class Toy(nn.Module):
    """Parameters whose gradients are their own elements plus the input's, exactly: sums of one term."""

    def __init__(self, num_units: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ToyBlock(13 + 8 * index) for index in range(num_units))
        self.head = nn.Parameter(torch.randn(7, 41))
        self.bias = nn.Parameter(torch.randn(11))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        total = pull(self.head, x["head"]) + pull(self.bias, x["bias"])
        for index, block in enumerate(self.blocks):
            total = total + block(x[f"blocks.{index}.weight"], x[f"blocks.{index}.wide"], x[f"blocks.{index}.norm"])
        return total


class ToyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(19, width))
        self.wide = nn.Parameter(torch.randn(3, 5, 29) * 1e-3)
        self.norm = nn.Parameter(torch.randn(width))

    def forward(self, weight: Tensor, wide: Tensor, norm: Tensor) -> Tensor:
        return pull(self.weight, weight) + pull(self.wide, wide) + pull(self.norm, norm)


class Aligned(nn.Module):
    """Matrices that end on borders of blocks of 128, one that does not, and vectors between them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"a": (4, 128), "b": (2, 64), "n": (128,), "c": (3, 128), "d": (5, 27), "e": (2, 128), "m": (9,)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.stack([pull(parameter, x[name]) for name, parameter in self.named_parameters()]).sum()


def pull(parameter: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient is x * parameter: one rounding for each element."""
    return (parameter.square() * x).sum() / 2


def toy_inputs(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def runs_of(model: Any) -> dict[str, list[tuple[int, int]]]:
    """The run of every parameter that each shard holds, by the parameter's name in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for bucket in buckets(model):
        for index, parameter in enumerate(bucket.sharded):
            extents = [bucket.layout.extent(index, s) for s in range(bucket.layout.num_shards)]
            found[names[id(parameter)]] = [(e.start, e.stop) if e else (0, 0) for e in extents]
    return found


def cuts_of(model: Any) -> dict[str, list[list[int]]]:
    """The borders between the islands' parts, counted from the begin of each run of a parameter in a shard."""
    names = {id(p): name for name, p in model.named_parameters()}
    islands = model._laconic_unit.cluster.num_islands
    found: dict[str, list[list[int]]] = {}
    for bucket in buckets(model):
        for index, parameter in enumerate(bucket.sharded):
            cuts = found[names[id(parameter)]] = []
            for s in range(bucket.layout.num_shards):
                size = -(-bucket.layout.size(s) // (islands * 128)) * 128
                extent, offset = bucket.layout.extent(index, s), bucket.layout.offset_in_shard(index, s)
                numel = extent.numel if extent else 0
                inner = [min(max(island * size - offset, 0), numel) for island in range(1, islands)]
                cuts.append([0, *inner, numel])
    return found


def computed_weights(model: Any) -> dict[str, Tensor]:
    """The weights with which this rank computes now. Collective."""
    units = [module for module in model.modules() if hasattr(module, "unshard")]
    for unit in units:
        unit.unshard()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return weights


def crossings(model: Any) -> list[Any]:
    """The differences of all coded buckets."""
    units = {module._laconic_unit for module in model.modules() if hasattr(module, "_laconic_unit")}
    gathers = [gather for unit in units for gather in unit.gather._gathers]
    return [gather.crossing for gather in gathers if gather.bucket.wire.sends_differences]


def states(model: Any) -> set[CopyState]:
    return {each.state for each in crossings(model)}


def assert_nodes_agree(model: Any) -> None:
    """Assert that all ranks compute with equal weights."""
    weights = torch.cat([value.flatten() for value in computed_weights(model).values()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    for rank, theirs in enumerate(everyone):
        assert torch.equal(theirs, weights), f"rank {rank} computes with other weights"


def is_exact(model: Any, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the weights of the next forward are those of the optimizer, in a dtype. Collective."""
    exact = full_parameters(model)
    return all(torch.equal(value, exact[name].to(dtype)) for name, value in computed_weights(model).items())


def crossings_after(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Any]:
    for seed in range(steps):
        train_step(model, optimizer, seed)
    return crossings(model)
