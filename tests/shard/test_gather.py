"""Overlap: the units whose gathers run while another unit computes, and how far they run ahead."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import Prefetch
from laconic.shard.states import GatherState
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
            is_idle, crossings = gather.state is GatherState.IDLE, list(gather.crossings())
            begin(**options)
            if is_idle or list(gather.crossings()) != crossings:  # what stays whole is never idle
                events.append(f"gather {name or 'root'}")

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
    model = sharded_net.shard(sharded_net.build(partial(sharded_net.Net, 4)), cache="none")
    batch = sharded_net.inputs(0, dist.get_rank())
    forward = events_of(model, lambda: sharded_net.squared_error(model, batch))
    assert not gathered_before(forward, "forward blocks.1"), "no order is recorded yet"
    sharded_net.train_step(model)
    loss = sharded_net.squared_error(model, batch)
    gathers = [event for event in events_of(model, loss.backward) if event.startswith("gather")]
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
    oracle = sharded_net.oracle_of(model, partial(sharded_net.Net, 4))
    sharded_net.assert_gradients(model, oracle, sharded_net.micro_batches(1))
    sharded_net.assert_nothing_gathered(model)


@on_ranks(4, local=2)
def test_another_order_than_the_recorded_one_is_only_slower() -> None:
    """The numbers stay right. The blocks in a batch's order run; without a graph, useless gathers are freed as well."""

    def loss_of(net: Any, batch: tuple[Tensor, Sequence[int]]) -> Tensor:
        x, order = batch
        net.forward = lambda x: net.out(functools.reduce(lambda x, index: net.blocks[index](x), order, net.inp(x)))
        return net(x).square().mean()

    model = sharded_net.shard(sharded_net.build(partial(sharded_net.Net, 4)), cache="host")
    oracle = sharded_net.oracle_of(model, partial(sharded_net.Net, 4), loss_of)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (1, 2), (2, 2, 0)):
        batches = [[(sharded_net.inputs(0, rank)[0], order) for rank in range(4)]]
        sharded_net.accumulate(model, batches, loss_of)
        sharded_net.assert_nothing_gathered(model)
        _, want = oracle.gradients(batches)
        torch.testing.assert_close(sharded_net.full_gradients(model), want)
        model.zero_grad()
        with torch.no_grad():
            loss_of(model, (batches[0][0][0], order[:0:-1]))
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
    assert gather.version != gather.bucket.stored.version
    batches = sharded_net.micro_batches(1)
    sharded_net.accumulate(model, batches)
    sharded_net.assert_gradients(model, sharded_net.oracle_of(model), batches)


# -- how far: the sizes of units decide, alike on all ranks, or a policy -----------------------------------------------


class Uneven(sharded_net.Net):
    """Large and small blocks, of odd sizes."""

    def __init__(self, sizes: Sequence[int] = (61, 3, 3, 3, 3, 61, 5)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(sharded_net.Block(17, h) for h in sizes)


def _ahead_of_each(model: Any) -> list[set[str]]:
    """The units whose gathers begin with the forward of each unit, in a step after one that recorded the order."""
    batch = sharded_net.inputs(0, dist.get_rank())
    events = events_of(model, lambda: sharded_net.squared_error(model, batch).backward())
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, events)
    assert all(theirs == events for theirs in by_rank)
    num_gathers = sum(event.startswith("gather") for event in events)
    assert num_gathers == 2 * len(model.blocks) + 1, "each unit once each way, and the root"
    sharded_net.assert_nothing_gathered(model)
    found: list[set[str]] = [set()]
    for kind, name in (event.split() for event in events[: 2 * len(model.blocks) + 2]):
        if kind == "gather":
            found[-1].add(name)
        else:
            found[-1].discard(name)
            found.append(set())
    return found[:-1]


@pytest.mark.parametrize(("world", "local", "cache"), [(3, 1, "none"), (4, 2, "host")])
@on_ranks("world", local="local")
def test_as_many_units_are_gathered_ahead_as_the_reference_says(cache: str) -> None:
    """Small units go together; a cache takes node shards early."""
    sample = random.Random(cache)
    for budget in (None, None, 1, 1300, 9000, 13_800, 22_000):
        sizes = [sample.choice((3, 5, 61, 61)) for _ in range(sample.randint(1, 8))]
        model = sharded_net.build(partial(Uneven, sizes))
        model = sharded_net.shard(model, cache=cache, prefetch=Prefetch(budget_bytes=budget))
        sharded_net.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gathers = [unit._laconic_unit.gather for unit in (model, *model.blocks)]
        at_home = {place for place, gather in enumerate(gathers) if gather.begins_without_memory}
        whole, node = ([getattr(gather, name) for gather in gathers] for name in ("whole_bytes", "node_bytes"))
        want = ahead(whole, node, {0}, at_home=at_home, budget_bytes=budget)
        names = ["root", *(f"blocks.{index}" for index in range(len(sizes)))]
        begun: set[str] = set()
        for place, found in enumerate(_ahead_of_each(model)):
            early = [each for each in want[place][1] if gathers[each].can_begin_early]
            expected = {names[each] for each in (*want[place][0], *early)} - begun
            assert found == expected, (sizes, budget, place)
            begun |= found


@on_ranks(2, local=1)
def test_a_policy_may_set_a_number_of_units() -> None:
    model = sharded_net.shard(sharded_net.build(Uneven), cache="host", prefetch=Prefetch(units=3))
    sharded_net.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    root, first, *others = _ahead_of_each(model)
    assert root | first == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    assert others == [{"blocks.4"}, {"blocks.5"}, {"blocks.6"}, set(), set(), set()]


@on_ranks(2, local=1)
def test_two_units_that_stay_whole_are_gathered_ahead() -> None:
    """They take no memory for that. In backward there is nothing to gather."""
    model = sharded_net.shard(sharded_net.build(Uneven), cache="rank")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the order is known after the first one
        batch = sharded_net.inputs(0, dist.get_rank())
        events = events_of(model, lambda: sharded_net.squared_error(model, batch).backward())  # noqa: B023
        optimizer.step()
    units = ["root", *(f"blocks.{index}" for index in range(len(model.blocks)))]
    assert [event for event in events if event.startswith("gather")] == [f"gather {name}" for name in units]
    assert gathered_before(events, "forward blocks.3") >= {"blocks.4", "blocks.5"}


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
