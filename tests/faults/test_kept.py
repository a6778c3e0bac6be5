"""Models that are dropped leave nothing: a small sample of `tests.faults.kept`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.faults.kept import MAX_GROWTH_BYTES, growth_of
from tests.support.helpers import Block, Net, build, shard, train_step
from tests.support.launch import run_ranks

SAMPLE = (
    "cache host",
    "wire 4bit",
    "offload",
    "replicas",
    "islands",
    "cyclic, not closed",
    "asynchronous checkpoints",
)


@pytest.mark.parametrize("strategy", SAMPLE)
def test_dropped_models_leave_nothing(strategy: str) -> None:
    growth = growth_of(strategy, rounds=2, warm_up=3)
    assert growth.pop("resident bytes") <= MAX_GROWTH_BYTES
    assert not growth


def job_classes() -> None:
    """A class that the user makes anew for each model goes with the model, and so do the classes made of it."""
    made: list[weakref.ref[Any]] = []
    for _ in range(2):

        class Own(Net):
            make_block = Block

        model = shard(build(Own))
        assert type(shard(build(Own))) is type(model)
        train_step(model)
        made += [weakref.ref(Own), weakref.ref(type(model))]
        del model, Own
    gc.collect()
    assert [reference() for reference in made] == [None] * 4


def test_classes_go_with_their_models() -> None:
    run_ranks(job_classes, 1)
