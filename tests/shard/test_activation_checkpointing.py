"""Activation checkpointing: recomputed forwards send no more bytes and hold no more memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laconic.shard.unit import UnitPhase, unit_of
from tests.support import sharded_net
from tests.support.launch import on_ranks, run_ranks


class Checkpointed(sharded_net.Net):
    """Blocks are recomputed: each in a checkpoint, or two in one, or the inside of a block."""

    def __init__(self, kind: str, reentrant: bool) -> None:
        super().__init__()
        self.kind, self.reentrant = kind, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.kind == "pair":

            def pair(h: Tensor) -> Tensor:
                return self.blocks[1](self.blocks[0](h))

            x = checkpoint(pair, x, use_reentrant=self.reentrant)
            x = self.blocks[2](x)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class InnerCheckpoint(sharded_net.Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda h: self.down(torch.relu(self.up(h))), x, use_reentrant=False)


def make_checkpointed(kind: str, reentrant: bool) -> nn.Module:
    if kind != "inner":
        return Checkpointed(kind, reentrant)
    model = sharded_net.Net()
    for block in model.blocks:
        block.__class__ = InnerCheckpoint
    return model


def job_checkpointing(cache: str, kind: str, reentrant: bool) -> None:
    model = sharded_net.shard(sharded_net.build(lambda: make_checkpointed(kind, reentrant)), cache=cache)
    reference, oracle = sharded_net.shard(sharded_net.build(), cache=cache), sharded_net.oracle_of(model)
    for seed in range(2):
        batches = sharded_net.micro_batches(2, seed)
        measured, peaks = [], []
        for net in (reference, model):
            net.reset_peak_memory()
            with sharded_net.moved(net) as m:
                for number, batch in enumerate(batches):
                    net.set_requires_gradient_sync(number == 1)
                    sharded_net.squared_error(net, batch[dist.get_rank()]).backward()
            measured.append((m.weights, m.gradients, m.sent("local", "weights"), m.sent("local", "gradients")))
            peaks.append(net.memory().device_peak_bytes)
            sharded_net.assert_nothing_gathered(net)
        assert measured[0] == measured[1], "recomputing sends no more bytes"
        assert peaks[1] <= peaks[0], "recomputing holds no more memory"
        sharded_net.assert_gradients(model, oracle, batches)
        for net in (reference, model):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0)
            net.zero_grad()


@pytest.mark.parametrize(
    ("kind", "reentrant"), [("each", False), ("each", True), ("pair", False), ("pair", True), ("inner", False)]
)
def test_activation_checkpointing_gathers_no_more_often(kind: str, reentrant: bool) -> None:
    cache = {"each": "host", "pair": "none", "inner": "device"}[kind]
    run_ranks(job_checkpointing, 4, cache, kind, reentrant, local=2)


@on_ranks(2, local=1)
def test_a_recomputed_forward_is_part_of_backward() -> None:
    model = sharded_net.shard(sharded_net.build(lambda: Checkpointed("each", False)), cache="none")
    units = [unit_of(block) for block in model.blocks]
    states: list[bool] = []
    for unit in units:
        assert unit is not None
        unit.modules[0].up.register_full_backward_hook(
            lambda *_, unit=unit: states.append(unit.phase is UnitPhase.BACKWARD)
        )  # type: ignore[union-attr, misc]
    for _ in range(2):
        states.clear()
        sharded_net.train_step(model)
        assert states == [True] * len(units), "a recomputed forward took a unit out of its backward"
        sharded_net.assert_nothing_gathered(model)
