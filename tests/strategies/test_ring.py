"""The baselines' ring reduce-scatter: sums, bits and bytes, and FSDP2 that trains with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from laconic import _compat
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, ModelConfig, ShardConfig
from laconic.strategies import ring
from laconic.strategies.checks import check_job
from laconic.strategies.ring import RingReduceScatter, use_rings
from tests.support.launch import on_ranks, run_ranks

SIZES = (1, 2, 7, 1001)


class SentBytes:
    """Counts what this rank sends through `dist.isend`."""

    def __init__(self) -> None:
        self.total = 0
        self._isend = dist.isend

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.total += tensor.nbytes
        return self._isend(tensor, *args, **kwargs)


def inputs(numel: int, dtype: torch.dtype, *, whole: bool) -> list[torch.Tensor]:
    """One input for every rank; whole numbers have the same sum in any order."""
    generator = torch.Generator().manual_seed(numel)
    made = [torch.randn(numel, generator=generator) for _ in range(dist.get_world_size())]
    return [(tensor.mul(8).round() if whole else tensor).to(dtype) for tensor in made]


def check_sums(sent: SentBytes) -> None:
    group = dist.group.WORLD
    assert group is not None
    size, rank = dist.get_world_size(), dist.get_rank()
    reduce_scatter = RingReduceScatter()
    for part_numel in SIZES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            for dtype in (torch.float32, torch.bfloat16):
                given = inputs(size * part_numel, dtype, whole=dtype == torch.float32)
                expected = torch.empty(part_numel, dtype=dtype)
                _compat._reduce_scatter_flat(expected, given[rank].clone(), op=op)
                output, before = torch.full_like(expected, float("nan")), sent.total
                reduce_scatter(output, given[rank].clone(), group, op)
                if dtype == torch.float32:
                    assert torch.equal(output, expected)
                else:
                    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.1)
                assert sent.total - before == (size - 1) * output.nbytes
        # in the ring's own order: part r begins on rank r + 1
        given = inputs(size * part_numel, torch.float32, whole=False)
        parts = [tensor.view(size, -1)[rank] for tensor in given]
        total = parts[(rank + 1) % size].clone()
        for step in range(2, size + 1):
            total += parts[(rank + step) % size]
        output = torch.empty(part_numel)
        reduce_scatter(output, given[rank].clone(), group, dist.ReduceOp.SUM)
        assert torch.equal(output, total)
    with pytest.raises(ValueError, match="SUM or AVG"):
        reduce_scatter(output, given[rank], group, dist.ReduceOp.MAX)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks("world_size")
def test_the_ring_sums_like_gloo_with_half_its_bytes() -> None:
    sent = dist.isend = SentBytes()
    for segments in (1, 4, 64):
        ring._SEGMENTS = segments
        check_sums(sent)


def trained(shape: tuple[int, ...], *, rings: bool, reduce_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The parameters after three steps with two micro-batches, on odd sizes."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(7, 7), *layers)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    if rings:
        use_rings([model, *layers])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)  # type: ignore[operator]
            model(torch.randn(2, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def job_trains(*shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        for reduce_dtype in (None, torch.bfloat16):
            expected = trained(shape, rings=False, reduce_dtype=reduce_dtype)
            tolerance = 1e-5 if reduce_dtype is None else 0.05
            for ours, theirs in zip(trained(shape, rings=True, reduce_dtype=reduce_dtype), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [(3, [(3,)]), (4, [(2, 2)]), pytest.param(4, [(4,), (4, 1), (1, 4)], marks=pytest.mark.campaign)],
)
def test_fsdp2_and_hsdp_train_the_same_with_rings(world_size: int, shapes: list[tuple[int, ...]]) -> None:
    run_ranks(job_trains, world_size, *shapes)


def test_gloos_own_collectives_are_refused_on_a_gpu() -> None:
    config = Config(model=ModelConfig(config={"model_type": "llama"}), shard=ShardConfig(strategy="fsdp2-gloo"))
    ranks = RankInfo(rank=0, world_size=2, local_rank=0, num_local=2, num_nodes=1)
    with pytest.raises(JobError, match="use 'fsdp2' on cuda"):
        check_job(config, ranks, "cuda")
