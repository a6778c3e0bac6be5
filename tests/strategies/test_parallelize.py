"""The arguments that a job gives to the engine."""

from __future__ import annotations

from typing import Any

import pytest

import laconic
from laconic.config import Config
from laconic.config.sections import OptimizerConfig, ShardConfig
from laconic.strategies.parallelize import wire_policy


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
    config = Config(optimizer=OptimizerConfig(name=optimizer), shard=ShardConfig(wire=wire))
    assert wire_policy(config) == laconic.Wire(**expected)
