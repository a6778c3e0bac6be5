"""An audit sees a rank that computes other bits, disturbs nothing, and says what it cannot compare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic import Checks, CorruptionError
from laconic.guard.audit import _as_if_nothing_was
from tests.support import sharded_net
from tests.support.flips import flipping_in_gradients, flipping_in_use
from tests.support.launch import on_ranks


class Noisy(sharded_net.Net):
    """Draws random numbers, changes a buffer in each forward, and has a parameter that no unit takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(17)
        self.dropout = nn.Dropout(0.4)
        self.own = nn.Parameter(torch.ones(17))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.out(self.own * self.norm(x) + self.norm.running_mean)


def _build(**policies: Any) -> Any:
    model: Any = sharded_net.build(Noisy)
    return sharded_net.shard(model, ignored_params=[model.own], **policies)


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _batch(seed: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    x, y = sharded_net.inputs(seed, rank, rows=4 + rank)  # each rank has another number of rows
    return {"x": x, "y": y}


def _train(model: Any, *, audits: bool) -> list[Tensor]:
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        with model.no_sync():
            _loss(model, _batch(10 + step)).backward()
        if audits:
            before = model.traffic.snapshot()
            laconic.audit(model, _batch(step), _loss)
            assert (model.traffic.snapshot() - before).total("node", "gradients", "sent") == 0
        loss = _loss(model, _batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return [*losses, *whole, *model.buffers(), torch.get_rng_state()]


@on_ranks(4, local=2)
def test_an_audit_disturbs_nothing() -> None:
    checks = Checks(interval=1, unnoticed_edits=True)
    plain, audited = (_train(_build(cache="host", checks=checks), audits=audits) for audits in (False, True))
    assert all(torch.equal(one, two) for one, two in zip(plain, audited, strict=True))


_DIFFERENT = "ranks (0 and 1|1 and 2) computed different bits from the same batch"


@on_ranks(3, local=1)
def test_damage_on_one_rank_is_seen_by_all() -> None:
    model = _build(cache="host")
    torch.manual_seed(dist.get_rank())
    for injure in (flipping_in_use, flipping_in_gradients):
        for number in (0, 3):
            with injure(number, bit=22, seed=number), pytest.raises(CorruptionError, match=_DIFFERENT):
                laconic.audit(model, _batch(0), _loss)
            model.reset_iter_state()
    with (
        flipping_in_gradients(0, bit=3, seed=0),
        pytest.raises(CorruptionError, match=r"the gradient of blocks\.2\.up\.weight"),
    ):
        laconic.audit(model, _batch(0), _loss)
    laconic.audit(model, _batch(0), _loss)


@on_ranks(2, local=1)
def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"module of laconic\.fully_shard, got Linear"):
        laconic.audit(nn.Linear(2, 2), None, _loss)
    alone = sharded_net.shard(sharded_net.build(), mesh=laconic.init_mesh("cpu", islands=2, nodes=1, local=1))
    with pytest.raises(ValueError, match="one rank in an island"):
        laconic.audit(alone, _batch(0), _loss)
    batch = _batch(0) | ({"ids": torch.zeros(1, dtype=torch.int64)} if dist.get_rank() else {})
    with pytest.raises(ValueError, match="one structure on all ranks"):
        laconic.audit(_build(mesh=laconic.init_mesh("cpu", nodes=2, local=1)), batch, _loss)


def test_the_random_numbers_of_a_device_are_those_without_an_audit() -> None:
    """A stand-in is the device, whose state is one number."""
    device, state = torch.device("cuda", 1), {"cuda:0": torch.tensor(5), "cuda:1": torch.tensor(7)}
    module = SimpleNamespace(
        get_rng_state=lambda device: state[str(device)].clone(),
        set_rng_state=lambda value, device: state.update({str(device): value}),
    )
    layer, before = nn.Linear(2, 2), torch.get_rng_state()
    with mock.patch.object(torch, "get_device_module", return_value=module):
        with _as_if_nothing_was(layer, device):
            state["cuda:1"] += 1
            torch.rand(3)
        assert (state["cuda:0"], state["cuda:1"]) == (5, 7)
    assert torch.equal(torch.get_rng_state(), before)
