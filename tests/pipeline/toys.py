"""A small language model as blocks, and the oracle: one process that sees the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic.pipeline import Pipeline, PipelineCut, PipelinePolicy, cut_pipeline

VOCABULARY, D, TOKENS = 13, 16, 3


class Embedding(nn.Embedding):
    """Hands on hidden states, and a mask that needs no gradient."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(tokens), tokens > 2


class Block(nn.Module):
    """A residual MLP, which leaves masked places alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, width), nn.Linear(width, D)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.down(torch.tanh(self.up(x))) * mask.unsqueeze(-1), mask


class Head(nn.Linear):
    """Logits of hidden states."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x)


def blocks(num_layers: int = 7, *, tied: bool = False) -> nn.ModuleList:
    """An embedding, layers of unequal widths, and a head: odd numbers of all."""
    torch.manual_seed(0)
    layers = [Block(7 + 4 * (number % 3)) for number in range(num_layers)]
    made = nn.ModuleList([Embedding(VOCABULARY, D), *layers, Head(D, VOCABULARY, bias=False)])
    if tied:
        made[-1].weight = made[0].weight
    return made


def logits_of(model: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """One process."""
    values = (tokens,)
    for block in model:
        values = block(*values)
    return values  # type: ignore[return-value]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def batch(step: int, rows: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (rows, tokens)."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(VOCABULARY, (2, rows, tokens), generator=generator)
    return x, y


def meshes(num_ranks: int, inner: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The axis of the pipeline, and the axes inside a stage."""
    laconic.init_mesh("cpu")
    whole = init_device_mesh("cpu", (num_ranks, 1, inner), mesh_dim_names=("pipeline", "node", "local"))
    return whole["pipeline"], whole["node", "local"]


def start(
    policy: PipelinePolicy,
    num_ranks: int,
    inner: int,
    *,
    model: nn.ModuleList | None = None,
    cut: PipelineCut | None = None,
    **sharding: object,
) -> Pipeline:
    """A pipeline over the ranks, whose stages and blocks are sharded; not sharded with inner=0."""
    along, within = meshes(num_ranks, max(inner, 1))
    if cut is None:
        cut = cut_pipeline(blocks() if model is None else model, policy.num_stages(num_ranks), by="parameters", carry=0)
    own = {number: cut.stages[number] for number in policy.stages_of(along.get_local_rank(), num_ranks)}
    for stage in own.values() if inner else ():
        for child in [each for each in stage.children() if isinstance(each, Embedding | Block | Head)]:
            laconic.fully_shard(child, mesh=within, **sharding)  # type: ignore[arg-type]
        laconic.fully_shard(stage, mesh=within, **sharding)  # type: ignore[arg-type]
    return Pipeline(own, cut, mesh=along, loss_fn=loss_of, policy=policy)


def curve(policy: PipelinePolicy, num_ranks: int, num_steps: int) -> list[float]:
    """The losses of a pipeline that learns to tell the token after the next one, on one batch."""
    pipeline = start(policy, num_ranks, 1)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.02)
    losses = []
    for _ in range(num_steps):
        losses.append(float(pipeline.step(*batch(0, 8))))
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses
