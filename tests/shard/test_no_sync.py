"""`no_sync()`: micro-batches inside it equal one large batch, and their gradients do not cross the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import on_ranks
from tests.support.sharded_net import (
    Net,
    buckets,
    build,
    full_gradients,
    inputs,
    moved,
    reduce_bytes,
    shard,
    squared_error,
)

MICRO_BATCHES = 3


def accumulate(model: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Sum the gradients of micro-batches; return them, and the bytes that each backward sent across the nodes."""
    sent = []
    for number in range(MICRO_BATCHES):
        loss = squared_error(model, inputs(number, dist.get_rank())) / MICRO_BATCHES
        with moved(model) as bytes_moved:
            if number == MICRO_BATCHES - 1:
                loss.backward()
            else:
                with model.no_sync(), model.no_sync():
                    loss.backward()
        sent.append(bytes_moved.gradients)
    return full_gradients(model), sent


def fail_inside(model: Any, units: list[Any]) -> None:
    with model.no_sync():
        assert not any(unit.requires_gradient_sync for unit in units)
        raise ZeroDivisionError


@on_ranks(3, local=1)
def test_accumulation_equals_one_large_batch_and_crosses_the_wire_once() -> None:
    model = shard(build(Net))
    model.blocks[0].set_requires_gradient_sync(False)
    units = [module._laconic_unit for module in (model, *model.blocks)]
    with pytest.raises(ZeroDivisionError):
        fail_inside(model, units)
    assert [unit.requires_gradient_sync for unit in units] == [True, False, True, True]
    model.blocks[0].set_requires_gradient_sync(True)

    got, sent = accumulate(model)
    assert sent == [0, 0, reduce_bytes("node", buckets(model))]
    oracle = build(Net)
    batches = [inputs(n, rank) for n in range(MICRO_BATCHES) for rank in range(dist.get_world_size())]
    large = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    squared_error(oracle, large).backward()
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)
