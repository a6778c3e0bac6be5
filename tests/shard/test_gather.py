"""Overlap: the units whose gathers run while another unit computes, and how far they run ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import Prefetch
from laconic.shard.gather import GatherState, Order
from laconic.shard.unit import unit_of
from tests.reference.prefetch import ahead
from tests.support import sharded_net
from tests.support.launch import on_ranks


def events_of(model: Any, run: Callable[[], Any]) -> list[str]:
    """Record the events of `run`: `gather X` when X's gather begins, `forward X` when X's forward begins."""
    events: list[str] = []
    handles, gathers = [], []
    for name, module in model.named_modules():
        unit = unit_of(module)
        if unit is None:
            continue

        def begin(gather: Any = unit.gather, begin: Any = unit.gather.begin, name: str = name, **options: bool) -> None:
            if gather.state is GatherState.IDLE:
                events.append(f"gather {name or 'root'}")
            begin(**options)

        look = partial(lambda name, *_: events.append(f"forward {name or 'root'}"), name)
        handles.append(module.register_forward_pre_hook(look))
        gathers.append(unit.gather)
        unit.gather.begin = begin  # type: ignore[method-assign]
    run()
    for handle, gather in zip(handles, gathers, strict=True):
        handle.remove()
        del gather.begin
    return events


def gathered_before(events: list[str], compute: str) -> set[str]:
    """Return the units whose gather began before the event `compute` and whose forward did not."""
    place = events.index(compute)
    begun = {event.split()[1] for event in events[:place] if event.startswith("gather")}
    return begun - {event.split()[1] for event in events[: place + 1] if event.startswith("forward")}


@on_ranks(4, local=2)
def test_the_next_unit_is_gathered_while_this_one_computes() -> None:
    model = sharded_net.shard(sharded_net.build(lambda: sharded_net.Net(4)), cache="none")
    batch = sharded_net.inputs(0, dist.get_rank())
    forward = events_of(model, lambda: sharded_net.squared_error(model, batch))
    assert not gathered_before(forward, "forward blocks.1"), "no order is recorded yet"
    sharded_net.train_step(model)
    forward = events_of(model, lambda: sharded_net.squared_error(model, batch))
    for index in range(3):
        assert gathered_before(forward, f"forward blocks.{index}") == {f"blocks.{index + 1}"}
    assert gathered_before(forward, "forward root") == {"blocks.0"}
    assert not gathered_before(forward, "forward blocks.3"), "after the last block there is only the root"
    backward = events_of(model, sharded_net.squared_error(model, batch).backward)
    gathers = [event for event in backward if event.startswith("gather")]
    assert gathers == [f"gather blocks.{index}" for index in (3, 2, 1, 0)], "each once, in reverse"
    model.zero_grad()

    for block, following in zip(list(model.blocks), [*list(model.blocks)[2:], None, None], strict=True):
        block.set_modules_to_forward_prefetch([following] if following else [])
        block.set_modules_to_backward_prefetch([])
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.set_modules_to_backward_prefetch([model.blocks[3], model.blocks[2]])
    forward = events_of(model, lambda: sharded_net.squared_error(model, batch).backward())
    for index, name in enumerate(("root", "blocks.0", "blocks.1")):
        assert gathered_before(forward, f"forward {name}") == {f"blocks.{index}", f"blocks.{index + 1}"}
    assert sum(event.startswith("gather") for event in forward) == 1 + 2 * 4
    oracle = sharded_net.oracle_of(model, lambda: sharded_net.Net(4))
    sharded_net.assert_gradients(model, oracle, sharded_net.micro_batches(1))
    sharded_net.assert_nothing_gathered(model)


@on_ranks(4, local=2)
def test_another_order_than_the_recorded_one_is_only_slower() -> None:
    """An order that differs from the recorded one makes prefetching useless; the numbers stay right."""

    class Reordered(sharded_net.Net):
        order = (0, 1, 2, 3)

        def __init__(self) -> None:
            super().__init__(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index in self.order:
                x = self.blocks[index](x)
            return self.out(x)

    model = sharded_net.shard(sharded_net.build(Reordered), cache="host")
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (1, 2), (2, 2, 0)):
        Reordered.order = order
        batches = sharded_net.micro_batches(1, seed=sum(order))
        sharded_net.accumulate(model, batches)
        _, want = sharded_net.oracle_of(model, Reordered).gradients(batches)
        torch.testing.assert_close(sharded_net.full_gradients(model), want)
        sharded_net.assert_nothing_gathered(model)
        model.zero_grad()
    for order in ((0, 1), (2, 1, 0)):  # without a graph: useless gathers must be freed as well
        Reordered.order = order
        with torch.no_grad():
            model(sharded_net.inputs(0, 0)[0])
        sharded_net.assert_nothing_gathered(model)


class Interrupted(Exception):
    """Stands for what may arrive while a gather waits."""


@pytest.mark.parametrize("cache", ["none", "host", "rank"])
@on_ranks(2, local=1)
def test_a_gather_that_is_cut_short_is_begun_anew(cache: str) -> None:
    """An exception cuts a gather short: what arrived counts as nothing, and the next use gathers anew."""
    model = sharded_net.shard(sharded_net.build(), cache=cache)
    gather = model.blocks[1]._laconic_unit.gather._gathers[0]
    finish = gather.crossing.finish

    def interrupted(node_shard: Tensor) -> None:
        finish(node_shard)
        node_shard.fill_(float("nan"))
        raise Interrupted

    gather.crossing.finish = interrupted
    with pytest.raises(Interrupted):
        model.blocks[1].unshard()
    gather.crossing.finish = finish
    assert gather.is_stale
    batches = sharded_net.micro_batches(1)
    sharded_net.accumulate(model, batches)
    sharded_net.assert_gradients(model, sharded_net.oracle_of(model), batches)


# -- how far: the sizes of units decide, alike on all ranks, or a policy -----------------------------------------------


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


class Uneven(sharded_net.Net):
    """Large and small blocks, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(sharded_net.Block(17, h) for h in (61, 3, 3, 3, 3, 61, 5))


@on_ranks(3, local=1)
def test_the_policy_decides_alike_on_all_ranks() -> None:
    """A number of units, of bytes, or neither: small units go together, and a cache takes node shards early."""

    def events_with(**options: Any) -> list[str]:
        model = sharded_net.shard(sharded_net.build(Uneven), **options)
        sharded_net.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = sharded_net.inputs(0, dist.get_rank())
        events = events_of(model, lambda: sharded_net.squared_error(model, batch).backward())
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, events)
        assert all(theirs == events for theirs in by_rank)
        assert sum(event.startswith("gather") for event in events) == 2 * 7 + 1, "each unit once each way, and the root"
        sharded_net.assert_nothing_gathered(model)
        return events

    sized = Prefetch(budget_bytes=1300)  # two small blocks, of some 500 bytes each
    for options, ahead_of in (
        ({"cache": "none"}, {0: [1], 1: [2, 3, 4], 4: [5]}),
        ({"cache": "host"}, {0: [1, 2], 5: [6]}),
        ({"cache": "host", "prefetch": Prefetch(units=3)}, {0: [1, 2, 3], 1: [2, 3, 4], 5: [6]}),
        ({"prefetch": sized}, {0: [1, 2], 4: [5]}),
    ):
        events = events_with(**options)  # type: ignore[arg-type]
        for index, following in ahead_of.items():
            expected = {f"blocks.{each}" for each in following}
            assert gathered_before(events, f"forward blocks.{index}") == expected, (options, index)


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
