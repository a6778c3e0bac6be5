"""Overlap: whose weights are on their way while whose compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.shard.gather import GatherState, UnitGather
from laconic.shard.unit import unit_of
from tests.ranks import run_ranks
from tests.shard.helpers import (
    Net,
    assert_gradients,
    assert_nothing_gathered,
    buckets,
    build,
    full_gradients,
    gather_bytes,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    shard,
    squared_error,
    train_step,
)


def events_of(model: Any, run: Callable[[], Any]) -> list[str]:
    """What happens in `run`: `gather X` when X's gather begins, `forward X` when X computes."""
    events: list[str] = []
    names = {unit.gather: name or "root" for name, m in model.named_modules() if (unit := unit_of(m)) is not None}
    handles = []
    for name, module in model.named_modules():
        if unit_of(module) is not None:
            name = name or "root"
            handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: events.append(f"forward {name}"))  # type: ignore[misc]
            )
    original = UnitGather.begin

    def begin(self: UnitGather) -> None:
        if self.stage is GatherState.IDLE and self in names:
            events.append(f"gather {names[self]}")
        original(self)

    UnitGather.begin = begin  # type: ignore[method-assign]
    try:
        run()
    finally:
        UnitGather.begin = original  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
    return events


def gathered_before(events: list[str], compute: str) -> set[str]:
    """Units whose gather had begun when `compute` happened, and which had not computed yet."""
    place = events.index(compute)
    begun = {event.split()[1] for event in events[:place] if event.startswith("gather")}
    return begun - {event.split()[1] for event in events[: place + 1] if event.startswith("forward")}


def job_prefetch() -> None:
    model = shard(build(lambda: Net(4)), cache="none")
    batch = inputs(0, dist.get_rank())
    forward = events_of(model, lambda: squared_error(model, batch))
    assert not gathered_before(forward, "forward blocks.1"), "nothing is known of the order yet"
    train_step(model)
    forward = events_of(model, lambda: squared_error(model, batch))
    for index in range(3):
        assert gathered_before(forward, f"forward blocks.{index}") == {f"blocks.{index + 1}"}
    assert gathered_before(forward, "forward root") == {"blocks.0"}
    assert not gathered_before(forward, "forward blocks.3"), "behind the last block there is only the root"
    backward = events_of(model, squared_error(model, batch).backward)
    gathers = [event for event in backward if event.startswith("gather")]
    assert gathers == [f"gather blocks.{index}" for index in (3, 2, 1, 0)], "each once, in reverse"
    model.zero_grad()

    for block, following in zip(list(model.blocks), [*list(model.blocks)[2:], None, None], strict=True):
        block.set_modules_to_forward_prefetch([following] if following else [])
        block.set_modules_to_backward_prefetch([])
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.set_modules_to_backward_prefetch([model.blocks[3], model.blocks[2]])
    with moved(model) as m:
        forward = events_of(model, lambda: squared_error(model, batch).backward())
    assert gathered_before(forward, "forward root") == {"blocks.0", "blocks.1"}
    assert gathered_before(forward, "forward blocks.0") == {"blocks.1", "blocks.2"}
    assert gathered_before(forward, "forward blocks.1") == {"blocks.2", "blocks.3"}
    assert m.weights == 2 * gather_bytes("node", buckets(model.blocks)) + gather_bytes(
        "node", model._laconic_unit.buckets
    )
    assert_gradients(model, oracle_of(model, lambda: Net(4)), micro_batches(1))
    assert_nothing_gathered(model)


def test_the_next_unit_is_gathered_while_this_one_computes() -> None:
    run_ranks(job_prefetch, 4, local=2)


def job_prefetch_with_cache() -> None:
    """Slices that land where they rest cost no more memory early: then two gathers across nodes are begun ahead."""
    model = shard(build(lambda: Net(4)), cache="host")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer)
    forward = events_of(model, lambda: squared_error(model, inputs(0, dist.get_rank())))
    for index in range(4):
        ahead = {f"blocks.{i}" for i in (index + 1, index + 2) if i < 4}
        assert gathered_before(forward, f"forward blocks.{index}") == ahead
    assert [event for event in forward if event.startswith("gather")] == ["gather root"] + [
        f"gather blocks.{index}" for index in range(4)
    ]


def test_with_a_cache_two_units_are_gathered_ahead() -> None:
    run_ranks(job_prefetch_with_cache, 4, local=2)


def job_changing_order() -> None:
    """The order of execution may differ from the recorded one: then prefetching is off the mark, not the numbers."""

    class Reordered(Net):
        order = (0, 1, 2, 3)

        def __init__(self) -> None:
            super().__init__(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index in self.order:
                x = self.blocks[index](x)
            return self.out(x)

    model = shard(build(Reordered), cache="host")
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (1, 2), (2, 2, 0), (0, 1, 2, 3)):
        Reordered.order = order
        batches = micro_batches(1, seed=sum(order))
        squared_error(model, batches[0][dist.get_rank()]).backward()
        _, want = oracle_of(model, Reordered).gradients(batches)
        got = full_gradients(model)
        assert set(got) == set(want)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, msg=f"{order}: {name}")
        assert_nothing_gathered(model)
        model.zero_grad()
    for order in ((0, 1), (0,), (0, 1, 2), (2, 1, 0)):  # without a graph: what was begun for nothing must go as well
        Reordered.order = order
        with torch.no_grad():
            model(inputs(0, 0)[0])
        assert_nothing_gathered(model)


def test_another_order_than_the_recorded_one_is_only_slower() -> None:
    run_ranks(job_changing_order, 4, local=2)
