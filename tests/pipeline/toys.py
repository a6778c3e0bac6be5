"""A small language model as blocks, and the oracle: one process that sees the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic.pipeline import Pipeline, PipelineCut, PipelinePolicy, cut_pipeline
from tests.reference.pipeline import whole_loss

VOCABULARY, D, TOKENS, LR = 13, 16, 3, 0.3


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

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
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
    for stage in own.values() if inner else ():
        for child in [each for each in stage.children() if isinstance(each, Block) or ends_alone]:
            laconic.fully_shard(child, mesh=within, **sharding)  # type: ignore[arg-type]
        laconic.fully_shard(stage, mesh=within, **sharding)  # type: ignore[arg-type]
    return Pipeline(own, cut, mesh=along, loss_fn=loss_of, policy=policy)


def full(value: Any) -> Tensor:
    """A tensor, or all of one that is cut."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_gradients(pipeline: Pipeline, oracle: nn.Module, most: float = 2e-5) -> None:
    """Gradients differ by no more than a part of the largest one."""
    wanted = {name: each.grad for name, each in oracle.named_parameters(remove_duplicate=False)}
    for module in pipeline.modules.values():
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == (wanted[name] is None), name
            goal = wanted[name]
            if goal is not None:
                difference = (full(parameter.grad) - goal).abs().max()
                assert difference <= most * goal.abs().max(), (name, float(difference))


@torch.no_grad()
def descend(pipeline: Pipeline, oracle: nn.Module) -> None:
    """Take a step of both, and clear the gradients."""
    for parameter in (*pipeline.parameters(), *oracle.parameters()):
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=LR)
            parameter.grad = None


def crossing_blocks(pipeline: Pipeline) -> set[int]:
    """The first blocks of the stages whose inputs come from another rank."""
    owners = [pipeline.policy.rank_of(stage, pipeline.num_ranks) for stage in range(pipeline.num_stages)]
    return {pipeline.cut.borders[stage] for stage in range(1, len(owners)) if owners[stage - 1] != owners[stage]}


def assert_trains_as_one_process(pipeline: Pipeline, oracle: nn.ModuleList, rows: int, steps: int = 2) -> None:
    """Losses and gradients are those of the oracle, at some steps."""
    policy = pipeline.policy
    coded = crossing_blocks(pipeline) if policy.wire == "8bit" else ()
    for step in range(steps):
        tokens, target = batch(step, rows, tokens=TOKENS + step // 2)  # other shapes from the third on
        evaluated = pipeline.evaluate(tokens, target)
        loss = whole_loss(oracle, tokens, target, loss_of, micro_batches=policy.micro_batches, coded=coded)
        torch.testing.assert_close(evaluated, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pipeline.step(tokens, target), loss, rtol=1e-5, atol=1e-6)
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)


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
