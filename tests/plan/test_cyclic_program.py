"""The program of the cyclic schedule, against a count of messages by hand."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.config import Config, ConfigError, OptimizerConfig, ScheduleConfig
from laconic.cyclic.schedule.rule import Rule
from laconic.plan.cyclic import CyclicProgram
from laconic.plan.machine import Machine, Reading
from tests.plan.traces import cluster, spec, trace

WIDTH = 64


def run(ranks: int, rule: Any = "lag2", states: Any = "replicated", seconds: float = 1.0, **figures: object) -> Reading:
    """One layer for each rank, and no parameters outside of layers."""
    schedule = ScheduleConfig(kind="cyclic", rule=rule, states=states, cut_by="parameters")
    config = Config(schedule=schedule, optimizer=OptimizerConfig(max_grad_norm=0.0))
    layers = [[spec("weight", WIDTH, WIDTH)] for _ in range(ranks)]
    model = trace(layers, forward_s=seconds, backward_s=2 * seconds, saved_bytes=1000)
    machine = Machine(cluster(ranks, 1, **figures), device_type="cpu")
    return CyclicProgram(machine, config, model).read(machine)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("rule", ["v2", "lag2", "v1"])
def test_bytes_of_replicated_states(ranks: int, rule: str) -> None:
    """A stage's weights pass N - 1 times, its gradient N - 1 times, and once more if its owner is not the last."""
    reading = run(ranks, rule)
    stage_bytes = WIDTH * WIDTH * 4
    owners = [Rule.named(rule, ranks).owner(stage) for stage in range(ranks)]
    totals = sum(owner != ranks - 1 for owner in owners)
    assert reading.sent_bytes["node", "weights"] * ranks == pytest.approx(ranks * (ranks - 1) * stage_bytes)
    hops = ranks * (ranks - 1) + totals
    assert reading.sent_bytes["node", "gradients"] * ranks == pytest.approx(hops * stage_bytes)
    assert reading.sent_bytes["node", "control"] * ranks == pytest.approx((ranks - 1) * 8)


def test_sharded_states_send_weights_twice() -> None:
    assert run(3, states="sharded").sent_bytes["node", "weights"] == 2 * run(3).sent_bytes["node", "weights"]


def test_a_fast_wire_leaves_compute_alone() -> None:
    """Each worker computes three layers: 3 x (1 + 2) seconds."""
    reading = run(3, wire_bits_per_s=1e14, device_memory_bytes_per_s=1e15)
    assert reading.seconds == pytest.approx(9.0, rel=1e-3)


def test_a_slow_wire_sets_the_pace() -> None:
    """A worker sends at most N gradients or totals, and N - 1 or so versions of weights, in a step."""
    reading = run(3, seconds=1e-6, wire_bits_per_s=1e6)
    message_s = WIDTH * WIDTH * 4 * 8 / 1e6
    assert 4 * message_s < reading.seconds < 7 * message_s


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="shared"):
        run(3, states="shared")
    with pytest.raises(ConfigError, match="one rank"):
        run(1)
