"""Sharded modules inside the stages of torch's pipelines, against one process that sees the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.rehearse import RankError, ranks
from tests.support.launch import on_ranks

CACHES = ["none", "host", "device", "rank", "auto"]
FEATURES = ["plain", "LoRA", "checkpointing", "accumulation", "tied", "frozen", "lossless"]
NUM_MICRO_BATCHES, NUM_STEPS, ROWS, D, LR = 4, 2, 2, 16, 0.5


class Adapted(nn.Linear):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__(d, h)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(d, 2, bias=False), nn.Linear(2, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class Block(nn.Module):
    """A residual MLP, which may recompute itself in backward."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        layer = Adapted if feature == "LoRA" else nn.Linear
        self.up, self.down, self.recomputes = layer(D, 24), layer(24, D), feature == "checkpointing"

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False) if self.recomputes else self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks_of(feature: str) -> list[Block]:
    torch.manual_seed(0)
    blocks = [Block(feature) for _ in range(8)]
    if feature == "tied":  # within a stage
        blocks[1].up = blocks[0].up
    if feature == "frozen":
        blocks[0].requires_grad_(False)
    return blocks


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / NUM_MICRO_BATCHES


def place_of(name: str, rank: int) -> list[int]:
    """The stages of a rank, of two."""
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 3 - rank]
    return [rank] if name in ("GPipe", "1F1B") else [rank, rank + 2]


def policies_of(cache: str, feature: str, name: str) -> dict[str, Any]:
    splits_backward = "Zero" in name or name == "DualPipeV"
    policies: dict[str, Any] = {"cache": cache}
    if splits_backward and cache != "rank":
        policies["reshard_after_forward"] = False
    if feature == "lossless":
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        policies |= {"mp_policy": precision, "wire": "lossless" if cache != "none" else "exact"}
    return policies


def make(
    name: str, cache: str, feature: str, pipeline: DeviceMesh, mesh: DeviceMesh
) -> tuple[Any, list[PipelineStage]]:
    """The schedule of this rank and its stages."""
    numbers, blocks = place_of(name, pipeline.get_local_rank()), blocks_of(feature)
    num_stages = 2 * len(numbers)
    size, stages = len(blocks) // num_stages, []
    for number in numbers:
        module = nn.Sequential(*blocks[number * size : (number + 1) * size])
        policies = policies_of(cache, feature, name)
        for block in module if feature != "tied" else ():
            laconic.fully_shard(block, mesh=mesh, **policies)
        laconic.fully_shard(module, mesh=mesh, **policies)
        stages.append(PipelineStage(module, number, num_stages, torch.device("cpu"), group=pipeline.get_group()))
    found = schedules.get_schedule_class(name)
    given: Any = stages if len(stages) > 1 else stages[0]
    return found(given, NUM_MICRO_BATCHES, loss_fn=squared_error, scale_grads=False), stages


def batch(step: int, num_replicas: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, num_replicas, ROWS * NUM_MICRO_BATCHES, D, generator=generator)
    return x, y


def whole_gradients(model: nn.Module, x: Tensor, y: Tensor, *, rounds: bool) -> None:
    """Add the gradients of the mean over replicas, micro-batch by micro-batch, to `.grad`."""
    shown = copy.deepcopy(model).to(torch.bfloat16) if rounds else model
    for own_x, own_y in zip(x, y, strict=True):
        for part, target in zip(own_x.chunk(NUM_MICRO_BATCHES), own_y.chunk(NUM_MICRO_BATCHES), strict=True):
            output = shown(part.to(torch.bfloat16)).float() if rounds else shown(part)
            (squared_error(output, target) / len(x)).backward()
            for parameter, low in zip(model.parameters(), shown.parameters(), strict=True) if rounds else ():
                if low.grad is not None:
                    parameter.grad = low.grad.float() + (0 if parameter.grad is None else parameter.grad)
                    low.grad = None


def named(stages: Sequence[PipelineStage]) -> dict[str, nn.Parameter]:
    """The parameters of some stages by their names in the whole model."""
    found = {}
    for stage in stages:
        size = 8 // stage.num_stages
        for name, parameter in stage.submod.named_parameters():
            number, rest = name.split(".", 1)
            found[f"{stage.stage_index * size + int(number)}.{rest}"] = parameter
    return found


def assert_trains_as_one_process(name: str, cache: str, feature: str, pipeline: DeviceMesh, mesh: DeviceMesh) -> None:
    schedule, stages = make(name, cache, feature, pipeline, mesh)
    oracle = nn.Sequential(*blocks_of(feature))
    own = dist.get_rank() % mesh.size()
    is_first, is_last = (any(getattr(stage, each) for stage in stages) for each in ("is_first", "is_last"))
    # a split backward adds up in the dtype of gathered weights, under torch's own FSDP2, too
    most = 2e-5 if feature != "lossless" else 2e-2 if "Zero" in name or name == "DualPipeV" else 1e-3
    for step in range(NUM_STEPS):
        for number in range(2 if feature == "accumulation" else 1):
            x, y = batch(10 * step + number, mesh.size())
            schedule.step(*([x[own]] if is_first else []), **({"target": y[own]} if is_last else {}))
            whole_gradients(oracle, x, y, rounds=feature == "lossless")
        wanted = dict(oracle.named_parameters())
        for key, parameter in named(stages).items():
            gradient = wanted[key].grad
            assert (parameter.grad is None) == (gradient is None), key
            if gradient is not None:
                difference = (parameter.grad.full_tensor() - gradient).abs().max()  # type: ignore[union-attr]
                assert difference <= most * gradient.abs().max(), (cache, feature, key)
        with torch.no_grad():
            for parameter in (*named(stages).values(), *wanted.values()):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LR)
                    parameter.grad = None


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Two stages of two nodes each."""
    laconic.init_mesh("cpu")
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipeline", "node", "local"))
    return whole["pipeline"], whole["node", "local"]


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def split_backward_of_weights_that_have_gone() -> None:
    laconic.init_mesh("cpu")
    whole = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "node"))
    pipeline, number = whole["pipeline"], whole["pipeline"].get_local_rank()
    stages = []
    for index in place_of("ZBVZeroBubble", number):
        module = nn.Sequential(Block("plain"))
        laconic.fully_shard(module[0], mesh=whole["node"])
        laconic.fully_shard(module, mesh=whole["node"])
        stages.append(PipelineStage(module, index, 4, torch.device("cpu"), group=pipeline.get_group()))
    schedule = schedules.ScheduleZBVZeroBubble(stages, NUM_MICRO_BATCHES, loss_fn=squared_error)  # type: ignore[arg-type]
    x, y = (each[0] for each in batch(0, 1))
    is_first, is_last = (any(getattr(stage, each) for stage in stages) for each in ("is_first", "is_last"))
    schedule.step(*([x] if is_first else []), **({"target": y} if is_last else {}))


def test_a_split_backward_of_weights_that_have_gone_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"splits backward looks for .* with reshard_after_forward=False, or with cache"
    ):
        ranks(split_backward_of_weights_that_have_gone, nodes=2, local=1)


def cells(place: int, numbers: Sequence[int]) -> None:
    """Try some caches under one schedule, each with a feature of its own."""
    pipeline, mesh = meshes()
    for number in numbers:
        feature = FEATURES[(place + number) % len(FEATURES)]
        assert_trains_as_one_process(SCHEDULES[place], CACHES[number % len(CACHES)], feature, pipeline, mesh)


@pytest.mark.parametrize("place", range(7), ids=SCHEDULES)
@on_ranks(4, local=1)
def test_stages_train_as_one_process(place: int) -> None:
    cells(place, [place % 5])


@pytest.mark.heavy
@pytest.mark.parametrize("place", range(7), ids=SCHEDULES)
@on_ranks(4, local=1)
def test_stages_train_as_one_process_under_every_cache(place: int) -> None:
    cells(place, range(place, 35, 3))  # each cache twice or more, each feature once or more
