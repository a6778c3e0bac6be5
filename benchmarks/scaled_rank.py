"""A step of a model whose weights are gathered in few bits: its bytes on 2 nodes x 2 ranks, and its losses without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import laconic
from laconic.optim import AdamW8bit
from laconic.shard.bucket import Bucket
from laconic.shard.unit import unit_of
from tests.support.launch import launch

BF16 = "bf16"
NODES, LOCAL = 2, 2
_HIDDEN, _INNER, _HEADS, _LAYERS = 256, 1024, 4, 2
_TIMEOUT_S = 600.0
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Module):
    """A layer of a Llama without weights of norms: all of its parameters are those of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(_HIDDEN, _HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(_HIDDEN, _INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(_INNER, _HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x, x.shape[-1:])
        heads = (each(normed).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = functional.rms_norm(x, x.shape[-1:])
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's bytes of a step, and the losses of all steps."""

    wire_bytes: int
    """The weights that it sends across nodes."""
    cache_bytes: int
    """The weights that rest in its cache."""
    losses: list[float]
    unsharded: list[float]
    """The losses of the same rank's batches, of the whole model in one process; none of bf16, for which bytes count."""


def _build(weight_format: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(_LAYERS)))
    return laconic.convert_to_scaled_training(model, weight_format) if weight_format != BF16 else model  # type: ignore[arg-type]


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(1, 64, _HIDDEN, generator=generator) for _ in range(2))
    return (model(x.bfloat16()).float() - y).square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in fp32. laconic's own gives the same bits however a parameter is cut; torch's does not."""
    return AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=2**62)


def train(weight_format: str, steps: int) -> Measured:
    """Train for some steps, on one rank of several; then the whole model alone, on the batches of all."""
    mesh, rank = laconic.init_mesh("cpu"), dist.get_rank()
    model: Any = _build(weight_format)
    for layer in model:
        laconic.fully_shard(layer, mesh=mesh, mp_policy=PRECISION, cache="host")
    laconic.fully_shard(model, mesh=mesh, mp_policy=PRECISION, cache="host")
    optimizer, losses = _optimizer(model), []
    for step in range(steps):
        before = model.traffic.snapshot()
        loss = _loss(model, step, rank)
        loss.backward()
        moved = model.traffic.snapshot() - before
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    buckets: list[Bucket] = [bucket for each in model for bucket in unit_of(each).buckets]  # type: ignore[union-attr]
    return Measured(
        wire_bytes=moved.total("node", "weights", "sent"),
        cache_bytes=sum(bucket.node_shard.nbytes for bucket in buckets),
        losses=losses,
        unsharded=[] if weight_format == BF16 else _unsharded(weight_format, steps, rank),
    )


def _unsharded(weight_format: str, steps: int, rank: int) -> list[float]:
    """The losses of one rank. Gradients are summed in fp32, in the order in which nodes and ranks sum them."""
    model = _build(weight_format)
    optimizer, losses = _optimizer(model), []
    for step in range(steps):
        nodes = []
        for node in range(NODES):
            ranks = range(node * LOCAL, (node + 1) * LOCAL)
            nodes.append(_sum([_gradients(model, step, each, losses if each == rank else []) for each in ranks]))
        for parameter, gradient in zip(model.parameters(), _sum(nodes), strict=True):
            parameter.grad = gradient / (NODES * LOCAL)
        optimizer.step()
    return losses


def _gradients(model: nn.Module, step: int, rank: int, losses: list[float]) -> list[Tensor]:
    model.zero_grad()
    loss = _loss(model, step, rank)
    loss.backward()
    losses.append(loss.item())
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def _sum(rows: list[list[Tensor]]) -> list[Tensor]:
    return [sum(each[1:], each[0]) for each in zip(*rows, strict=True)]


def measure(weight_format: str, steps: int) -> list[Measured]:
    """Measure one format, or bf16, on all ranks."""
    return launch(train, weight_format, steps, num_ranks=NODES * LOCAL, num_local=LOCAL, timeout_s=_TIMEOUT_S)


def largest_difference(measured: list[Measured]) -> float:
    """The largest difference between a loss and that of the whole model; 0 if all are equal to the bit."""
    pairs = [pair for each in measured for pair in zip(each.losses, each.unsharded, strict=True)]
    assert all(math.isfinite(loss) for pair in pairs for loss in pair)
    return max(abs(one - other) for one, other in pairs)
