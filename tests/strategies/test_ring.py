"""The baselines' ring reduce-scatter: sums, bits and bytes, and FSDP2 that trains with it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

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
from laconic.strategies.ring import RingReduceScatter, pass_around, use_rings
from tests.support.jobs import assert_resumed, interrupted, train_all
from tests.support.launch import on_ranks, run_ranks

SIZES = (1, 2, 7, 1001)
_isend = dist.isend


class SentBytes:
    """Counts what this rank sends through `dist.isend`, which ranks in one process share."""

    by_rank: ClassVar[Counter[int]] = Counter()

    @property
    def total(self) -> int:
        return self.by_rank[dist.get_rank()]

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.by_rank[dist.get_rank()] += tensor.nbytes
        return _isend(tensor, *args, **kwargs)


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
                _compat.bound_reduce_scatter(group, async_op=True, op=op)(expected, given[rank].clone()).wait()
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


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_the_ring_sums_like_gloo_with_half_its_bytes() -> None:
    sent = dist.isend = SentBytes()
    for segments in (1, 4, 64):
        ring._SEGMENTS = segments
        check_sums(sent)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_parts_of_all_sizes_go_around() -> None:
    sent = dist.isend = SentBytes()
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    for sizes in ([1] * size, [7 * (index + 1) for index in range(size)], [1001, *[2] * (size - 1)]):
        whole = [torch.full((numel,), float(index)) for index, numel in enumerate(sizes)]
        parts = [part.clone() if index == rank else torch.empty_like(part) for index, part in enumerate(whole)]
        before = sent.total
        pass_around(parts, group)
        assert all(map(torch.equal, parts, whole))
        assert sent.total - before == 4 * (sum(sizes) - (sizes[(rank + 1) % size] if size > 1 else sum(sizes)))


def trained(
    shape: tuple[int, ...], way: str, *, reduce_dtype: torch.dtype | None = None, syncs_all: bool = False,
    keeps_sums: bool = False, dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:  # fmt: skip
    """The parameters after three steps with two micro-batches, on odd sizes, with frozen ones among them."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(7, 7), *layers).to(dtype)
    layers[1][2].requires_grad_(False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    is_own = way == "behind backward" and len(shape) == 2 and not keeps_sums
    replicas = mesh["replicate"].get_group() if is_own else None
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh["shard"] if replicas else mesh, reshard_after_forward=True, mp_policy=policy)
    if way == "behind backward":
        use_rings([model, *layers], replicas)
    else:  # the same ring, for which FSDP2 waits
        for unit in (model, *layers):
            unit.set_custom_reduce_scatter(RingReduceScatter())  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        for micro_batch in range(2):
            model.set_requires_gradient_sync(syncs_all or keeps_sums or micro_batch == 1)  # type: ignore[operator]
            if keeps_sums:
                model.set_requires_all_reduce(micro_batch == 1)  # type: ignore[operator]
            model(torch.randn(2, 7, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


CASES: dict[str, dict[str, Any]] = {
    "in the parameters' dtype": {},
    "in bfloat16": {"dtype": torch.bfloat16},
    "cast": {"reduce_dtype": torch.bfloat16},
    "added": {"syncs_all": True},
    "kept for the last micro-batch": {"keeps_sums": True},
    "divided": {"reduce_dtype": torch.float16},
}
"""Reductions that FSDP2 does not read at once, and the four that it does."""


class Late(RingReduceScatter):
    """A ring that others overtake."""

    def __call__(self, output_tensor: torch.Tensor, *arguments: Any, **keys: Any) -> None:
        """See `RingReduceScatter`."""
        output_tensor.fill_(float("nan"))
        time.sleep(0.02)
        super().__call__(output_tensor, *arguments, **keys)


@pytest.mark.parametrize(
    ("world_size", "shape"),
    [(2, (2,)), *(pytest.param(size, shape, marks=pytest.mark.heavy) for size, shape in ((2, (1, 2)), (4, (2, 2))))],
)
@on_ranks("world_size")
def test_reductions_behind_backward_have_the_same_bits(shape: tuple[int, ...]) -> None:
    """As FSDP2 and HSDP that wait for the same ring, and for torch's own all-reduce over replicas."""
    begin_mean = ring._begin_mean

    def begin_mean_late(*arguments: Any) -> Any:
        time.sleep(0.02)
        return begin_mean(*arguments)

    for name, case in CASES.items():
        if len(shape) == 2 and case.get("reduce_dtype") == torch.float16:
            continue  # torch's own HSDP has it
        expected = trained(shape, "waiting", **case)
        with patch.object(ring, "RingReduceScatter", Late), patch.object(ring, "_begin_mean", begin_mean_late):
            found = trained(shape, "behind backward", **case)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), (shape, name)


@pytest.mark.machine
@pytest.mark.parametrize(("world_size", "num_replicas"), [(2, 1), (4, 2)])
@on_ranks("world_size")
def test_backward_goes_on_while_a_reduction_is_under_way(num_replicas: int) -> None:
    """The first ring ends after the next layer's backward begins, and the first mean begins a layer later still."""
    layers = [nn.Linear(7, 7) for _ in range(3)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (num_replicas, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh["shard"])
    use_rings([model, *layers], mesh["replicate"].get_group())
    has_begun = [threading.Event() for _ in layers]
    for layer, event in zip(layers, has_begun, strict=True):
        layer.register_full_backward_pre_hook(lambda *_, event=event: event.set())
    begin_mean, rings, means = ring._begin_mean, [], []

    class Held(RingReduceScatter):
        def __call__(self, *arguments: Any, **keys: Any) -> None:
            assert has_begun[1].wait(60), "backward waits for its first ring"
            super().__call__(*arguments, **keys)
            rings.append(threading.current_thread().name)

    def begin_mean_late(*arguments: Any) -> Any:
        assert has_begun[0].wait(60), "backward waits for its first mean"
        means.append(threading.current_thread().name)
        return begin_mean(*arguments)

    with patch.object(ring, "RingReduceScatter", Held), patch.object(ring, "_begin_mean", begin_mean_late):
        model(torch.randn(2, 7, requires_grad=True)).square().sum().backward()
    assert len(rings) == len(means) == 3
    assert all(name.startswith("laconic-ring") for name in (*rings, *means))


@pytest.mark.heavy
def test_hsdp_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """On CPU each replica's shards are on a mesh of their own. Its checkpoints go on under FSDP2, too."""
    own, moved = (interrupted(tmp_path, name, 2, shard={"strategy": "hsdp"}) for name in ("own", "moved"))
    resumed = replace(moved[2], shard=ShardConfig(strategy="fsdp2"))
    *summaries, _, elsewhere = run_ranks(train_all, 4, [*own, moved[1], resumed], local=2)[0]
    assert_resumed(*summaries)
    assert elsewhere["start_step"] == 2
    assert elsewhere["losses"] == pytest.approx(summaries[2]["losses"], rel=1e-5)


@on_ranks(2)
def test_a_failed_reduction_ends_backward() -> None:
    """A reduction that fails ends backward with its error."""
    layers = [nn.Linear(7, 7) for _ in range(2)]
    model = nn.Sequential(*layers)
    for module in (*layers, model):
        fully_shard(module)
    use_rings([model, *layers])

    def fail(*arguments: Any) -> None:
        raise ConnectionError("the wire is cut")

    with patch.object(RingReduceScatter, "__call__", fail), pytest.raises(ConnectionError, match="the wire is cut"):
        model(torch.ones(2, 7)).sum().backward()


def test_gloos_own_collectives_are_refused_on_a_gpu() -> None:
    config = Config(model=ModelConfig(config={"model_type": "llama"}), shard=ShardConfig(strategy="fsdp2-gloo"))
    ranks = RankInfo(rank=0, world_size=2, local_rank=0, num_local=2, num_nodes=1)
    with pytest.raises(JobError, match="use 'fsdp2' on cuda"):
        check_job(config, ranks, "cuda")
