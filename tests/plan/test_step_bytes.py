"""The closed formulas of a step's bytes, against figures worked out by hand; benchmarks.wire counts them."""

from __future__ import annotations

import pytest

from tests.support.step_bytes import StepBytes, step_bytes


def in_weights(strategy: str, nodes: int, local: int) -> StepBytes:
    """Full training, in multiples of the weights."""
    return step_bytes(strategy, nodes=nodes, local=local, weights_bytes=1, gradients_bytes=1)


@pytest.mark.parametrize(
    ("strategy", "on_2x2", "on_4x1"),
    [
        ("fsdp2", 2.25, 2.25), ("fsdp2-gloo", 3.0, 3.0), ("hsdp", 1.0, 1.5), ("ddp", 1.5, 1.5), ("none", 1.5, 2.25),
        ("host", 1.0, 1.5), ("device", 1.0, 1.5), ("ddp-zero1", 2.25, 2.25),
    ],
)  # fmt: skip
def test_weights_on_the_wire(strategy: str, on_2x2: float, on_4x1: float) -> None:
    assert in_weights(strategy, 2, 2).node == pytest.approx(on_2x2)
    assert in_weights(strategy, 4, 1).node == pytest.approx(on_4x1)
    assert in_weights(strategy, 4, 1).local == 0
    assert in_weights(strategy, 1, 4).node == 0


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (3, 3), (64, 8)])
def test_a_cache_crosses_like_hsdp_and_never_more_than_zero_3(nodes: int, local: int) -> None:
    hsdp, host, none, fsdp2, hpz = (
        in_weights(name, nodes, local) for name in ("hsdp", "host", "none", "fsdp2", "fsdp2-hpz")
    )
    assert host == hsdp
    assert host.node < none.node <= fsdp2.node
    assert hpz.node == pytest.approx(2 / 3 * fsdp2.node)


def test_frozen_weights_cross_only_without_a_cache() -> None:
    lora = {"nodes": 2, "local": 2, "weights_bytes": 101.0, "gradients_bytes": 1.0, "frozen_bytes": 100.0}
    assert step_bytes("host", **lora).node == 1.0
    assert step_bytes("none", **lora).node == 101.5
    assert step_bytes("fsdp2", **lora).node == 0.75 * 203
    assert step_bytes("host", **lora).local == 203
    int8, int4 = 130 / 128 / 4, 66 / 128 / 4
    assert step_bytes("values", **lora).node == pytest.approx((int8 + int4) / 2)
    assert step_bytes("zero++", **lora).node == pytest.approx((101 * int8 + int4) / 2)


def test_codes_cross_in_as_many_bits_as_they_have() -> None:
    """In multiples of fp32 weights, on two nodes: half of weights and half of gradients cross."""
    assert in_weights("4bit", 2, 2).node == pytest.approx((66 / 128 + 66 / 128) / 4 / 2)
    assert in_weights("8bit", 2, 2).node == pytest.approx(130 / 128 / 4)
    assert in_weights("zero++", 2, 2).node == pytest.approx((130 / 128 + 66 / 128) / 4 / 2)
    assert in_weights("4bit", 2, 2).local == in_weights("host", 2, 2).local
    in_bf16 = step_bytes("4bit", nodes=2, local=1, weights_bytes=1, gradients_bytes=1, itemsize=2)
    assert in_bf16.node == pytest.approx(66 / 128 / 2)
