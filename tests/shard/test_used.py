"""Which parameters have a gradient when each rank uses others, in each step: [Note: Agreement on used parameters]."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.comm.collectives import Communicator
from laconic.shard import grad
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import build, full_parameters, moved, shard

NUM_LAYERS, NUM_STEPS = 4, 8


class Chosen(nn.Module):
    """Sums the outputs of some of its layers, which the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        """Run some layers."""
        return sum(self.layers[index](x) for index in chosen)  # type: ignore[return-value]


class StreamOrdered(Communicator):
    """A communicator that says of itself what one of NCCL does. On Gloo its collectives block, and are as right."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_stream_ordered = True

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """See `Communicator.all_reduce`."""
        assert op == dist.ReduceOp.MAX, "in a byte, a sum of 256 flags is zero"
        return super().all_reduce(tensor, op)


@contextlib.contextmanager
def agreeing_on_the_lane() -> Iterator[dict[int, list[bool]]]:
    """Let ranks agree as under NCCL. By rank, the result says whether each agreement was waited for."""
    waited: dict[int, list[bool]] = {}
    unite = grad._unite_on_lane

    def noted(*args: Any, is_needed: bool) -> Tensor:
        waited.setdefault(dist.get_rank(), []).append(is_needed)
        return unite(*args, is_needed=is_needed)

    with (
        mock.patch.object(grad, "Communicator", StreamOrdered),
        mock.patch.object(grad, "_unite_on_lane", noted),
        mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
    ):
        yield waited


def choices(step: int, world: int) -> list[list[int]]:
    """The layers that each rank uses in a step. Neighbouring steps are often alike, or differ on one rank only."""
    chosen = []
    for rank in range(world):
        kept = random.Random(f"{step // 3}/{rank}")
        changes = random.Random(f"{step}/{rank}")
        source = changes if changes.random() < 0.2 else kept
        chosen.append(sorted(source.sample(range(NUM_LAYERS - 1), source.randint(1, NUM_LAYERS - 1))))
        if step % 4 == 0 and rank == step % world:
            chosen[-1] = list(range(NUM_LAYERS))
    return chosen


@pytest.mark.parametrize(
    ("world", "local", "islands", "keeps", "has_hooks"),
    [(3, 1, 1, False, True), (3, 3, 1, True, False), (3, 3, 1, True, True), (4, 1, 2, False, False)],
)
def test_a_parameter_has_a_gradient_if_any_rank_has_used_it(
    world: int, local: int, islands: int, keeps: bool, has_hooks: bool
) -> None:
    """As under Gloo and as under NCCL."""
    run_ranks(job_used, world, has_hooks, islands, keeps, local=local)
    with agreeing_on_the_lane() as waited:
        waits = run_ranks(job_used, world, has_hooks, islands, keeps, local=local)
    assert [waited[rank] for rank in range(world)] == waits


def job_used(has_hooks: bool, islands: int, keeps: bool) -> list[bool]:
    """With `keeps` rank 0 keeps the gradients of the step before as zeros, and the others clear theirs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = build(Chosen), build(Chosen)
    laconic.fully_shard(model, mesh=laconic.init_mesh("cpu", islands=islands))
    seen: list[Tensor] = []
    for parameter in model.parameters() if has_hooks else ():
        parameter.register_post_accumulate_grad_hook(seen.append)
    x = torch.randn(world, 2, 3, generator=torch.Generator().manual_seed(1))
    kept: set[int] = set()
    waits = []
    for step in range(NUM_STEPS):
        chosen = choices(step, world)
        waits.append(any(has_hooks or index not in kept for index in set(range(NUM_LAYERS)) - set(chosen[rank])))
        model(x[rank], chosen[rank]).square().sum().backward()
        plain.zero_grad()
        for each, layers in enumerate(chosen):
            (plain(x[each], layers).square().sum() / world).backward()
        used = {index for layers in chosen for index in layers}
        for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
            assert (layer.weight.grad is None) == (index not in used | kept), (step, index)
            if index in used:
                torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.layers[index].weight.grad)  # type: ignore[index, union-attr]
        assert [id(each) for each in seen] == [id(model.layers[index].weight) for index in sorted(used)] * has_hooks  # type: ignore[index, union-attr]
        seen.clear()
        if keeps and rank == 0:
            kept |= used
        model.zero_grad(set_to_none=not kept)
    return waits


def test_flags_on_the_lane_cost_a_byte_a_parameter() -> None:
    """Each level sums them as a ring does, whether this rank needs the answer or not."""
    with agreeing_on_the_lane():
        run_ranks(job_flags, 6, local=3)


def job_flags() -> None:
    model: Any = laconic.fully_shard(Chosen())
    for chosen in ([0, 1, 2, 3], [0]):
        with moved(model) as bytes_moved:
            model(torch.ones(1, 3), chosen).sum().backward()
        for level, size in (("local", 3), ("node", 2)):
            assert bytes_moved.sent(level, "control") == 2 * (size - 1) * NUM_LAYERS // size  # type: ignore[arg-type]
        model.zero_grad()


@on_ranks(2, local=1)
def test_unused_parameters_get_zeros_if_asked() -> None:
    """So do those of a unit that no forward has called, and of one whose output nobody uses, but no frozen ones."""
    plain: Any = build(Chosen)
    model: Any = build(Chosen)
    shard(model, units=list(model.layers[:2]))
    model.layers[0].requires_grad_(False)
    for fills in (True, False):
        model.set_reduce_scatter_unused_params(fills)
        for syncs in (False, True):
            model.set_requires_gradient_sync(syncs)
            model(torch.ones(3), [0, 2] if syncs else [2]).sum().backward()
        found = [layer.weight.grad for layer in model.layers]
        assert [each is not None for each in found] == [False, fills, True, fills]
        assert not any(found[index].full_tensor().any() for index in (1, 3) if fills)
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
        model.zero_grad()
        decayed = {f"layers.{index}.weight": plain.layers[index].weight.detach() * 0.95 for index in (1, 3)}
        torch.testing.assert_close({name: full_parameters(model)[name] for name in decayed}, decayed)
