"""A small language model as blocks, for the pipelines of tests and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import stage

import laconic
from laconic.pipeline import Pipeline, PipelineCut, PipelinePolicy, cut_pipeline

VOCABULARY, D, TOKENS = 13, 16, 3
CARRIES_MASKS = hasattr(stage, "InferenceMode")
"""Whether torch's pipelines hand on tensors that need no gradient: not those of torch 2.11."""


class Embedding(nn.Embedding):
    """Hands on hidden states and, where torch does, a mask that needs no gradient."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        hidden = super().forward(tokens)
        return (hidden, tokens > 2) if CARRIES_MASKS else (hidden,)


class Block(nn.Module):
    """A residual MLP, which leaves masked places alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, width), nn.Linear(width, D)

    def forward(self, x: Tensor, *mask: Tensor) -> tuple[Tensor, ...]:
        change = self.down(torch.tanh(self.up(x)))
        return x + (change * mask[0].unsqueeze(-1) if mask else change), *mask


class Head(nn.Linear):
    """Logits of hidden states."""

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        return super().forward(x)


def blocks(num_layers: int = 7, *, tied: bool = False) -> nn.ModuleList:
    """An embedding, layers of unequal widths, and a head: odd numbers of all."""
    torch.manual_seed(0)
    layers = [Block(7 + 4 * (number % 3)) for number in range(num_layers)]
    made = nn.ModuleList([Embedding(VOCABULARY, D), *layers, Head(D, VOCABULARY, bias=False)])
    if tied:
        made[-1].weight = made[0].weight
    return made


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
    ends_alone: bool = True,
    **sharding: object,
) -> Pipeline:
    """A pipeline over the ranks, whose stages and blocks are sharded; not sharded with inner=0.

    The embedding and the head are units of their own, or with the stage's other parameters if not `ends_alone`.
    """
    along, within = meshes(num_ranks, max(inner, 1))
    if cut is None:
        cut = cut_pipeline(blocks() if model is None else model, policy.num_stages(num_ranks), by="parameters", carry=0)
    own = {number: cut.stages[number] for number in policy.stages_of(along.get_local_rank(), num_ranks)}
    for module in own.values() if inner else ():
        for child in [each for each in module.children() if isinstance(each, Block) or ends_alone]:
            laconic.fully_shard(child, mesh=within, **sharding)  # type: ignore[arg-type]
        laconic.fully_shard(module, mesh=within, **sharding)  # type: ignore[arg-type]
    return Pipeline(own, cut, mesh=along, loss_fn=loss_of, policy=policy)


def step_for_ever() -> str:
    """Steps of a pipeline over three ranks until one of them is gone. Returns what this rank is told."""
    pipeline = start(PipelinePolicy(schedule="GPipe"), 3, 0)
    try:
        while True:
            pipeline.step(*batch(0, 8))
    except RuntimeError as error:
        return str(error)


def curve(policy: PipelinePolicy, num_ranks: int, num_steps: int) -> list[float]:
    """The losses of a pipeline that learns one batch by heart, at rates that fall to zero."""
    pipeline, losses = start(policy, num_ranks, 0), []
    for step in range(num_steps):
        losses.append(float(pipeline.step(*batch(0, 8))))
        pipeline.clip_grad_norm_(1.0)
        with torch.no_grad():
            for parameter in pipeline.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.5 * (1 - step / num_steps))
                parameter.grad = None
    return losses
