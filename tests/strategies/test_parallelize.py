"""The arguments that a job gives to the engine."""

from __future__ import annotations

from typing import Any

import pytest

import laconic
from laconic.config.sections import OptimizerConfig, ShardConfig
from laconic.strategies.parallelize import shard_policy


@pytest.mark.parametrize(
    ("optimizer", "wire", "expected"),
    [
        ("adamw", "4bit", {"weights": "int4", "gradients": "int4"}),
        ("muon", "4bit", {"weights": "int4", "gradients": "int8"}),
        ("shampoo", "4bit", {"weights": "int4", "gradients": "int8"}),
        ("muon", {"weights": "int4", "gradients": "int4"}, {"weights": "int4", "gradients": "int4"}),
        ("muon", "8bit", {"weights": "int8", "gradients": "int8"}),
        ("shampoo", None, {}),
    ],
)
def test_matrix_optimizers_get_gradients_in_eight_bits(optimizer: Any, wire: Any, expected: dict[str, Any]) -> None:
    shard = ShardConfig.of_keys({"wire": wire})
    assert shard_policy(shard, OptimizerConfig(name=optimizer)).wire == laconic.Wire(**expected)
