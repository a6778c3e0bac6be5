"""The kinds of parameters that share a bucket: one rule for the engine and for the planner."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from laconic.layout.bucket import BucketLayout
from laconic.plan.buckets import Shape, Sharding, plan_buckets
from laconic.plan.model_trace import UnitSpec
from laconic.shard.api import BucketKind, group_by_kind
from laconic.shard.policies import Wire
from tests.plan.traces import spec

MATRIX = BucketLayout.whole_in(0, name="weight", shape=(4, 3), num_shards=2)
VECTOR = BucketLayout.whole_in(0, name="bias", shape=(4,), num_shards=2)


def kind(**fields: Any) -> BucketKind:
    return BucketKind(**{"dtype": torch.float32, "is_trained": True, **fields})


def test_kinds_and_members_stay_in_order_of_appearance() -> None:
    groups = group_by_kind("bAaCBc", lambda letter: kind(is_trained=letter.islower()))
    assert [(each.is_trained, members) for each, members in groups.items()] == [
        (True, ["b", "a", "c"]), (False, ["A", "C", "B"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("own", "layout", "nodes", "islands", "is_coded"),
    [
        ({}, MATRIX, 2, 1, True),
        ({}, MATRIX, 1, 1, False),
        ({}, VECTOR, 2, 1, False),
        ({"is_trained": False}, MATRIX, 2, 1, False),
        ({"dtype": torch.int8}, MATRIX, 2, 1, False),
        ({"converted": nn.Parameter}, MATRIX, 2, 1, False),
        ({"part": 1}, MATRIX, 3, 2, True),
    ],
)
def test_trained_matrices_alone_are_coded(
    own: dict[str, Any], layout: BucketLayout, nodes: int, islands: int, is_coded: bool
) -> None:
    policy = Wire.of("4bit")
    found = kind(**own).wire(policy, layout, num_nodes=nodes, num_islands=islands)
    assert found == (policy if is_coded else Wire())


def test_only_gradients_cross_between_islands_of_one_node() -> None:
    found = kind().wire(Wire.of("8bit"), MATRIX, num_nodes=1, num_islands=2)
    assert (found.weights, found.gradients) == ("exact", "int8")


def test_the_planner_makes_a_bucket_for_each_kind() -> None:
    """The engine's buckets are compared with the planner's bytes in tests/plan/test_bytes_counted.py."""
    half = {"dtype": torch.bfloat16}
    parameters = (
        spec("base", 6, 5, is_trained=False), spec("half", 6, 5, **half),
        dataclasses.replace(spec("up_slice0", 6, 5), slice_index=0),
        dataclasses.replace(spec("up_slice1", 6, 5), slice_index=1), spec("adapter", 6, 5),
        spec("other", 6, 5, is_trained=False), dataclasses.replace(spec("down_slice0", 6, 5), slice_index=0),
        spec("last", 6, 5, **half),
    )  # fmt: skip
    planned = plan_buckets(UnitSpec(name="Model", parameters=parameters), Shape(nodes=2, local=1), Sharding())
    assert [{slot.name for slot in bucket.layout.slots} for bucket in planned] == [
        {"base", "other"}, {"half", "last"}, {"up_slice0", "down_slice0"}, {"up_slice1"}, {"adapter"},
    ]  # fmt: skip
    assert [bucket.is_frozen for bucket in planned] == [True, False, False, False, False]
