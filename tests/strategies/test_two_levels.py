"""FSDP2 on two levels: what its gathers and reductions leave where, their bytes, and training that equals FSDP2's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from laconic.comm.cluster import make_mesh
from laconic.config import ShardConfig
from laconic.strategies.ring import use_rings
from laconic.strategies.two_levels import (
    TwoLevelGather,
    TwoLevelGatherAhead,
    TwoLevelReduceScatter,
    mesh_of_slices,
    use_two_levels,
)
from tests.strategies.test_ring import SentBytes
from tests.support.jobs import assert_resumed, interrupted, job, train_all
from tests.support.launch import on_ranks, run_ranks

SHAPES = [(2, 2), (3, 2), (2, 3)]


def levels(nodes: int, local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    mesh = make_mesh("cpu", (nodes, local), ("node", "local"))
    return mesh["node"].get_group(), mesh["local"].get_group()


@pytest.mark.parametrize(("world_size", "shape"), [(nodes * local, (nodes, local)) for nodes, local in SHAPES])
@on_ranks("world_size")
def test_slices_come_in_the_order_that_fsdp2_expects(shape: tuple[int, int]) -> None:
    """A slice passes each level once, in both directions."""
    sent = dist.isend = SentBytes()
    group = mesh_of_slices("cpu", *shape).get_group()
    across, inside = levels(*shape)
    size, place = dist.get_world_size(), group.rank()
    assert place == dist.get_rank() % shape[1] * shape[0] + dist.get_rank() // shape[1]
    for numel in (1, 7):
        whole = torch.arange(float(size * numel))
        for gather in (TwoLevelGather(across, inside), TwoLevelGatherAhead(across, inside)):
            output = torch.full_like(whole, float("nan"))
            own = output.view(size, -1)[place].copy_(whole.view(size, -1)[place])
            work = gather(output, own, group)
            if work is not None:
                work.wait()
            assert torch.equal(output, whole)
        for op, total in ((dist.ReduceOp.SUM, size * (size + 1) // 2), (dist.ReduceOp.AVG, (size + 1) / 2)):
            given, output, before = whole * (dist.get_rank() + 1), torch.empty(numel), sent.total
            TwoLevelReduceScatter(across, inside)(output, given, group, op)
            assert torch.equal(output, whole.view(size, -1)[place] * total)
            assert sent.total - before == 4 * ((shape[1] - 1) * shape[0] * numel + (shape[0] - 1) * numel)


def trained(way: str, shape: tuple[int, int], policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
    """The outputs and the parameters of two steps of two micro-batches, on odd sizes, with a frozen weight.

    All numbers of the first step are multiples of a small power of two, so that its sums are exact in any order.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(7, 13), nn.Linear(13, 7), nn.Linear(7, 5)]
    model = nn.Sequential(nn.Linear(7, 7), *layers)
    layers[1].requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.mul(8).round().clamp(-1, 1))
    if way == "flat":
        mesh = make_mesh("cpu", (dist.get_world_size(),), ("shard",))
    else:
        mesh, (across, inside) = mesh_of_slices("cpu", *shape), levels(*shape)
    units: list[Any] = [model, *layers]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    use_rings(units)
    if way == "ahead":
        use_two_levels(units, across, inside)
    for unit in units if way == "waiting" else ():
        unit.set_custom_all_gather(TwoLevelGather(across, inside))
        unit.set_custom_reduce_scatter(TwoLevelReduceScatter(across, inside))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(2):
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)  # type: ignore[operator]
            output = model(torch.randint(-1, 2, (2, 7), generator=generator).float())
            (output.sum() / 16).backward()
            found.append(output.detach().float())
        optimizer.step()
        optimizer.zero_grad()
        found += [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), pytest.param(8, (2, 4), marks=pytest.mark.heavy)])
@on_ranks("world_size")
def test_training_has_the_bits_of_fsdp2(shape: tuple[int, int]) -> None:
    """Where sums are exact in any order. Gathers and reductions that run ahead have those of calls that wait."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float16)):
        flat, ahead, waiting = (trained(way, shape, policy) for way in ("flat", "ahead", "waiting"))
        first = len(flat) // 2 + 2  # and the outputs of the second step
        assert all(map(torch.equal, ahead[:first], flat[:first]))
        assert all(map(torch.equal, ahead, waiting))
        for ours, theirs in zip(ahead, flat, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@on_ranks(4, local=2)
def test_a_failed_gather_ends_forward() -> None:
    model = nn.Linear(7, 7)
    fully_shard(model, mesh=mesh_of_slices("cpu", 2, 2))
    use_two_levels([model], *levels(2, 2))

    def fail(*arguments: Any) -> None:
        raise ConnectionError("the wire is cut")

    with patch.object(TwoLevelGather, "__call__", fail), pytest.raises(ConnectionError, match="the wire is cut"):
        model(torch.ones(2, 7))


@pytest.mark.heavy
def test_exact_baselines_train_alike(tmp_path: Path) -> None:
    """Whatever they gather, reduce and keep when."""
    names = ("fsdp2", "fsdp2-two-level", "fsdp2-hpz", "fsdp2-reduced", "hsdp", "hsdp-reduced")
    configs = [
        job(tmp_path, shard={"strategy": name}, train={"accumulation": 3, "output": str(tmp_path / name)})
        for name in names
    ]
    flat, *others = run_ranks(train_all, 4, configs, local=2)[0]
    for name, other in zip(names[1:], others, strict=True):
        assert other["losses"] == pytest.approx(flat["losses"], rel=1e-5), name
        assert other["grad_norms"] == pytest.approx(flat["grad_norms"], rel=1e-4), name


@pytest.mark.heavy
def test_a_job_trains_as_under_fsdp2_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Its checkpoints go on under FSDP2, too, whose slices lie on other ranks."""
    own, moved = (interrupted(tmp_path, name, 2, shard={"strategy": "fsdp2-two-level"}) for name in ("own", "moved"))
    resumed = replace(moved[2], shard=ShardConfig(strategy="fsdp2"))
    flat = job(tmp_path, shard={"strategy": "fsdp2"}, train={"output": str(tmp_path / "flat")})
    *summaries, _, elsewhere, expected = run_ranks(train_all, 4, [*own, moved[1], resumed, flat], local=2)[0]
    assert_resumed(*summaries)
    assert summaries[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert summaries[0]["losses"][0] == expected["losses"][0]
    assert elsewhere["start_step"] == 2
    assert elsewhere["losses"] == pytest.approx(expected["losses"][2:], rel=1e-5)
