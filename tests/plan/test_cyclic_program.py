"""The program of the cyclic schedule, against a count of messages by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from laconic.config import Config, ConfigError, JobError, OptimizerConfig, ScheduleConfig
from laconic.cyclic.schedule import Rule
from laconic.plan.cyclic import CyclicProgram
from laconic.plan.machine import Reading, Simulator
from laconic.plan.phase import LayerInput
from laconic.plan.program import work_of
from tests.plan.traces import cluster, spec, trace

WIDTH = 64


INPUTS = (LayerInput(nbytes=100, requires_grad=True), LayerInput(nbytes=13, requires_grad=False))
"""Hidden states and a mask, which messages fill up to multiples of 16 bytes."""
SAVED_BYTES = 10**7


def num_devices(states: str, workers: int) -> int:
    return workers * (workers + 1) // 2 if states == "shared" else workers


def program(
    ranks: int, rule: Any = "lag2", states: Any = "replicated", *, machine: Simulator, seconds: float = 1.0,
    max_grad_norm: float = 0.0, **changes: object,
) -> CyclicProgram:  # fmt: skip
    """One layer for each worker, and no parameters outside of layers."""
    schedule = ScheduleConfig(kind="cyclic", rule=rule, states=states, cut_by="parameters")
    config = Config(schedule=schedule, optimizer=OptimizerConfig(max_grad_norm=max_grad_norm))
    layers = [[spec("weight", WIDTH, WIDTH)] for _ in range(ranks)]
    model = trace(layers, forward_s=seconds, backward_s=2 * seconds, saved_bytes=SAVED_BYTES)
    model = dataclasses.replace(model, layer_inputs=INPUTS, **changes)  # type: ignore[arg-type]
    return CyclicProgram(machine, work_of(config, device_type="cpu", trace=model))


def run(ranks: int, rule: Any = "lag2", states: Any = "replicated", seconds: float = 1.0, **figures: object) -> Reading:
    machine = Simulator(cluster(num_devices(states, ranks), 1, **figures), device_type="cpu")
    return program(ranks, rule, states, machine=machine, seconds=seconds).read(machine)


@pytest.mark.parametrize(("ranks", "rule"), [(2, "v1"), (3, "lag2")])
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


@pytest.mark.parametrize("rule", ["clip", "dp"])
def test_clipping_sends_the_norm_to_all(rule: str) -> None:
    """The last worker has all totals' squares, and sends 8 bytes to each other one. A baton has as many."""
    machine = Simulator(cluster(3, 1), device_type="cpu")
    reading = program(3, rule, machine=machine, max_grad_norm=1.0).read(machine)
    assert reading.sent_bytes["node", "control"] * 3 == pytest.approx(2 * 8 + 2 * 8)


@pytest.mark.parametrize(("workers", "rule"), [(2, "v2"), (3, "lag2")])
def test_bytes_of_shared_states(workers: int, rule: str) -> None:
    """N - j devices hold stage j. All activations cross, and all gradients but those of a stage with one device."""
    reading = run(workers, rule, "shared")
    devices = num_devices("shared", workers)
    stage_bytes, activation_bytes, gradient_bytes = WIDTH * WIDTH * 4, 112 + 16, 112
    borders = workers * (workers - 1)
    assert reading.sent_bytes["node", "activations"] * devices == pytest.approx(
        borders * (activation_bytes + gradient_bytes)
    )
    sums = sum(workers - 1 for stage in range(workers) if workers - stage > 1)
    totals = sum(workers - stage - 1 for stage in range(workers))
    assert reading.sent_bytes["node", "gradients"] * devices == pytest.approx((sums + totals) * stage_bytes)
    assert set(reading.sent_bytes) == {("node", "activations"), ("node", "gradients")}


def test_memory_of_a_device_and_the_weights_that_sharded_states_send_twice() -> None:
    """A worker saves the activations of all stages; a device of a shared stage those of one micro-batch's stage."""
    stage_bytes, workers, sent = WIDTH * WIDTH * 4, 2, {}
    for states, kept, saved in (("replicated", workers, workers), ("sharded", 1, workers), ("shared", 1, 1)):
        machine = Simulator(cluster(num_devices(states, workers), 1))
        reading = program(workers, states=states, machine=machine).read(machine)
        sent[states] = reading.sent_bytes.get(("node", "weights"))
        assert reading.peak["activations"] == saved * SAVED_BYTES
        assert machine.held["parameters"] + machine.held["transfers"] >= kept * stage_bytes
        assert machine.held["optimizer"] == pytest.approx(2 * stage_bytes, rel=1e-3)  # and the count of steps
    assert sent["sharded"] == 2 * sent["replicated"]


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
    with pytest.raises(ConfigError, match="one rank"):
        run(1)
    machine = Simulator(cluster(2, 1))
    with pytest.raises(JobError, match="2 ranks does not fit; start 3 ranks"):
        program(2, states="shared", machine=machine)
    with pytest.raises(ConfigError, match=r"wte.*second name.*untie"):
        program(2, machine=machine, tied=("wte.weight",))
