"""The kinds of parameters that share a bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic.layout.bucket import BucketLayout
from laconic.shard.api import BucketKind, group_by_kind
from laconic.shard.policies import Wire

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


def test_parameters_that_differ_in_dtype_trainability_or_slice_are_apart() -> None:
    half = {"dtype": torch.bfloat16}
    parameters: dict[str, dict[str, Any]] = {
        "base": {"is_trained": False}, "half": half, "up_slice0": {"part": 0}, "up_slice1": {"part": 1}, "adapter": {},
        "other": {"is_trained": False}, "down_slice0": {"part": 0}, "last": half,
    }  # fmt: skip
    assert list(group_by_kind(parameters, lambda name: kind(**parameters[name])).values()) == [
        ["base", "other"], ["half", "last"], ["up_slice0", "down_slice0"], ["up_slice1"], ["adapter"],
    ]  # fmt: skip
