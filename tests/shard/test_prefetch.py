"""How far gathers run ahead: the sizes of units decide, alike on all ranks, or a `Prefetch` policy."""

from __future__ import annotations

import random
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic import Prefetch
from laconic.shard.gather import Order
from tests.reference.prefetch import ahead
from tests.shard.test_gather import events_of, gathered_before
from tests.support import sharded_net
from tests.support.launch import on_ranks


class _Sized(SimpleNamespace):
    """A unit's gather of which only sizes are known."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    is_late = False

    def begin(self, *, is_early: bool = False) -> None:
        self.begun.append((self.place, is_early))

    def start_local(self) -> None:
        pass


def _order_of(
    sizes: list[tuple[int, int]], outer: bool, policy: Prefetch, at_home: Collection[int] = ()
) -> list[tuple[list[int], list[int]]]:
    """Return the gathers that an `Order` begins in its second forward, whole and early, for each unit.

    With `outer` the forward of unit 0 contains those of all others.
    """
    begun: list[tuple[int, bool]] = []
    gathers: list[Any] = [
        _Sized(
            place=i,
            whole_bytes=whole,
            node_bytes=node,
            can_begin_early=True,
            begins_without_memory=i in at_home,
            stays_whole=False,
            prefetch=policy,
            begun=begun,
        )
        for i, (whole, node) in enumerate(sizes)
    ]
    order, found = Order(), []
    for _ in range(2):
        found.clear()
        order.begin_forward(keeps=False)
        for gather in gathers:
            begun.clear()
            order.enter_forward(gather, None)
            others = [each for each in begun if each[0] != gather.place]
            found.append(([i for i, early in others if not early], [i for i, early in others if early]))
            if gather.place or not outer:
                order.leave_forward(gather, returns=True)
        if outer:
            order.leave_forward(gathers[0], returns=True)
        order.end_forward()
    return found


@pytest.mark.parametrize("outer", [False, True])
def test_the_choice_equals_that_of_the_reference(outer: bool) -> None:
    sample = random.Random(0)
    for _ in range(200):
        sizes = [
            (sample.choice((0, 1, 2, 7, 30, 31)), sample.choice((0, 1, 3, 8))) for _ in range(sample.randint(1, 9))
        ]
        around = {0} if outer and len(sizes) > 1 else set()
        budget = sample.choice((None, 1, 7, 40, 500))
        at_home = {i for i in range(len(sizes)) if sample.random() < 0.5}
        want = ahead([w for w, _ in sizes], [n for _, n in sizes], around, at_home=at_home, budget_bytes=budget)
        assert _order_of(sizes, outer, Prefetch(budget_bytes=budget), at_home) == want, (sizes, budget, at_home)


# -- real ranks --------------------------------------------------------------------------------------------------------


class Uneven(sharded_net.Net):
    """Large and small blocks, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(sharded_net.Block(17, h) for h in (61, 3, 3, 3, 3, 61, 5))


def _trained(**options: Any) -> tuple[Any, list[str]]:
    model = sharded_net.shard(sharded_net.build(Uneven), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded_net.train_step(model, optimizer)
    batch = sharded_net.inputs(0, dist.get_rank())
    events = events_of(model, lambda: sharded_net.squared_error(model, batch).backward())
    return model, events


def _assert_equal_on_all_ranks(events: list[str]) -> None:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, events)
    assert all(theirs == events for theirs in by_rank)
    assert sum(event.startswith("gather") for event in events) == 2 * 7 + 1, "each unit once each way, and the root"


@on_ranks(3, local=1)
def test_small_units_are_gathered_together_on_all_ranks_alike() -> None:
    model, events = _trained(cache="none")
    _assert_equal_on_all_ranks(events)
    assert gathered_before(events, "forward blocks.0") == {"blocks.1"}
    assert gathered_before(events, "forward blocks.1") == {"blocks.2", "blocks.3", "blocks.4"}
    assert gathered_before(events, "forward blocks.4") == {"blocks.5"}
    sharded_net.assert_nothing_gathered(model)


@on_ranks(3, local=1)
def test_a_policy_sets_a_number_of_units_or_of_bytes() -> None:
    model, events = _trained(cache="host", prefetch=Prefetch(units=3))
    _assert_equal_on_all_ranks(events)
    for index in range(7):
        following = {f"blocks.{i}" for i in range(index + 1, min(index + 4, 7))}
        assert gathered_before(events, f"forward blocks.{index}") == following, index
    model.zero_grad()
    micro_batches = sharded_net.micro_batches(1)
    sharded_net.accumulate(model, micro_batches)
    oracle = sharded_net.oracle_of(model, Uneven)
    with torch.no_grad():
        for name, value in sharded_net.full_parameters(model).items():
            oracle.parameters()[name].copy_(value)
    sharded_net.assert_gradients(model, oracle, micro_batches)
    sharded_net.assert_nothing_gathered(model)
    size = model.blocks[1]._laconic_unit.gather.whole_bytes
    _, events = _trained(prefetch=Prefetch(budget_bytes=2 * size))
    _assert_equal_on_all_ranks(events)
    assert gathered_before(events, "forward blocks.0") == {"blocks.1", "blocks.2"}
    assert gathered_before(events, "forward blocks.4") == {"blocks.5"}, "one at least"


@on_ranks(2, local=1)
def test_frozen_units_that_backward_does_not_reach_are_not_gathered_for_it() -> None:
    model = sharded_net.build(Uneven)
    for frozen in (model.inp, *model.blocks[:3]):
        frozen.requires_grad_(False)
    sharded_net.shard(model)
    batch = sharded_net.inputs(0, dist.get_rank())
    events = events_of(model, lambda: sharded_net.squared_error(model, batch).backward())
    gathered = [event.removeprefix("gather ") for event in events if event.startswith("gather blocks")]
    assert sorted(gathered) == sorted([f"blocks.{i}" for i in range(7)] + [f"blocks.{i}" for i in range(3, 7)])
    sharded_net.assert_nothing_gathered(model)


def test_a_policy_is_checked() -> None:
    with pytest.raises(ValueError, match=r"Prefetch\(units=0\) must be at least 1"):
        Prefetch(units=0)
    with pytest.raises(ValueError, match=r"\(units=2\) and Prefetch\(budget_bytes=5\) are two limits; give one"):
        Prefetch(units=2, budget_bytes=5)
