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
from tests.support.launch import on_ranks

NUM_LAYERS, NUM_STEPS = 4, 12


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
def agreeing(way: str) -> Iterator[list[bool]]:
    """Let ranks agree as under Gloo ("hosts"), or as under NCCL ("lane"). Then the list gets whether each one waits."""
    waited: list[bool] = []
    if way == "hosts":
        yield waited
        return
    unite = grad._unite_on_lane

    def noted(*args: Any, is_needed: bool) -> Tensor:
        waited.append(is_needed)
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


@pytest.mark.machine
@pytest.mark.parametrize("way", ["hosts", "lane"])
@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize(
    ("world", "local", "islands", "keeps"), [(3, 1, 1, False), (3, 1, 1, True), (5, 5, 1, True), (6, 1, 2, False)]
)
@on_ranks("world", local="local")
def test_a_parameter_has_a_gradient_if_any_rank_has_used_it(
    way: str, has_hooks: bool, islands: int, keeps: bool
) -> None:
    """With `keeps` rank 0 keeps the gradients of the step before as zeros, and the others clear theirs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, model = Chosen(), Chosen()
    model.load_state_dict(plain.state_dict())
    laconic.fully_shard(model, mesh=laconic.init_mesh("cpu", islands=islands))
    seen: list[Tensor] = []
    for parameter in model.parameters() if has_hooks else ():
        parameter.register_post_accumulate_grad_hook(seen.append)
    x = torch.randn(world, 2, 3)
    kept: set[int] = set()
    waits = []
    with agreeing(way) as waited:
        for step in range(NUM_STEPS):
            chosen = choices(step, world)
            waits.append(any(has_hooks or index not in kept for index in set(range(NUM_LAYERS)) - set(chosen[rank])))
            model(x[rank], chosen[rank]).square().sum().backward()
            plain.zero_grad()
            for each, layers in enumerate(chosen):
                (plain(x[each], layers).square().sum() / world).backward()
            used = {index for layers in chosen for index in layers}
            for index, layer in enumerate(model.layers):
                assert (layer.weight.grad is None) == (index not in used | kept), (step, index)
                if index in used:
                    torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.layers[index].weight.grad)  # type: ignore[union-attr, operator]
            assert [id(each) for each in seen] == [id(model.layers[index].weight) for index in sorted(used)] * has_hooks
            seen.clear()
            if keeps and rank == 0:
                kept |= used
            model.zero_grad(set_to_none=not kept)
    assert waited == (waits if way == "lane" else [])


@on_ranks(6, local=3)
def test_flags_on_the_lane_cost_a_byte_a_parameter() -> None:
    """Each level sums them as a ring does, whether this rank needs the answer or not."""
    model: Any = laconic.fully_shard(Chosen())
    for chosen in ([0, 1, 2, 3], [0]):
        before = model.traffic.snapshot()
        with agreeing("lane"):
            model(torch.ones(1, 3), chosen).sum().backward()
        moved = model.traffic.snapshot() - before
        for level, size in (("local", 3), ("node", 2)):
            assert moved.total(level, "control", "sent") == 2 * (size - 1) * NUM_LAYERS // size
        model.zero_grad()
