"""The guard hears of the engine's events and changes nothing: without it the engine trains to the same bits."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from laconic.guard.guard import Guard
from laconic.shard import extension
from tests.support import sharded_net
from tests.support.launch import on_ranks


def _trained(observer: type[extension.Observer]) -> list[Tensor]:
    with mock.patch.object(extension, "observer_class", return_value=observer):
        model = sharded_net.shard(sharded_net.build(), cache="host")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = [sharded_net.train_step(model, optimizer, seed) for seed in range(2)]
    assert type(model._laconic_unit.root.observer) is observer  # type: ignore[union-attr]
    return [*losses, *sharded_net.full_parameters(model).values()]


@on_ranks(4, local=2)
def test_the_engine_trains_to_the_same_bits_without_a_guard() -> None:
    assert extension.observer_class() is Guard, "the package attaches the guard"
    for guarded, alone in zip(_trained(Guard), _trained(extension.Observer), strict=True):
        assert torch.equal(guarded, alone)
