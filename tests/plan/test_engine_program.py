"""Rehearsed steps of laconic's strategies, against closed formulas and figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.config import Config, OptimizerConfig, ShardConfig, SyncConfig, TrainConfig
from laconic.optim.muon import cost_of
from laconic.plan.machine import KINDS, Reading
from laconic.plan.rehearsed import LocalStepsProgram, RehearsedStep
from laconic.rehearse.kernels import PASSES_OF_LOOPS
from laconic.rehearse.rings import Places
from tests.plan.traces import MadeTrace, ParameterSpec, cluster, spec, trace, work
from tests.support.step_bytes import step_bytes

WIDTH = 480  # rows that all of these numbers of ranks divide


def layers(count: int = 3, **keys: Any) -> list[list[ParameterSpec]]:
    return [[spec("weight", WIDTH, WIDTH, **keys)] for _ in range(count)]


def run(
    model: MadeTrace, nodes: int, local: int, *, device: str = "cpu", micro_batches: int = 1, cache: Any = "host",
    budget: int = 0, wire: str | None = None, dtype: str | None = None, optimizer: str = "adamw", **figures: object,
) -> Reading:  # fmt: skip
    """The reading of a job's step."""
    shard = ShardConfig.of_keys({"cache": cache, "device_budget_bytes": budget, "wire": wire, "param_dtype": dtype})
    optimization = OptimizerConfig(name=optimizer)  # type: ignore[arg-type]
    config = Config(shard=shard, train=TrainConfig(accumulation=micro_batches), optimizer=optimization)
    to_do = work(model, config, Places(nodes=nodes, local=local), device)
    return RehearsedStep(cluster(nodes, local, **figures), to_do).read()


def with_islands(model: MadeTrace, local: int, **keys: Any) -> tuple[Reading, LocalStepsProgram]:
    """Islands of one node without a cache."""
    sync, places = SyncConfig.of_keys({"mode": "local", **keys}), Places(nodes=1, local=local, islands=keys["islands"])
    config = Config(sync=sync, shard=ShardConfig.of_keys({"cache": "none"}))
    program = LocalStepsProgram(cluster(places.islands, local), work(model, config, places))
    return program.read(), program


def moved(reading: Reading, level: str, local: int) -> float:
    return local * sum(
        size for (each, purpose), size in reading.sent_bytes.items() if each == level and purpose != "control"
    )


@pytest.mark.parametrize(
    ("strategy", "nodes", "local", "exactness"),
    [
        ("none", 2, 2, 1e-9), ("host", 3, 1, 1e-9), ("host", 1, 4, 1e-9), ("device", 2, 3, 1e-9),
        # The formula counts all parameters as coded, and these have no vector; last blocks of a shard may be short.
        ("8bit", 2, 2, 1e-3), ("4bit", 2, 2, 1e-3),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_closed_formulas(strategy: str, nodes: int, local: int, exactness: float) -> None:
    keys = {"wire": strategy} if "bit" in strategy else {"cache": strategy}
    reading = run(trace(layers()), nodes, local, **keys)  # type: ignore[arg-type]
    weights = 3 * WIDTH * WIDTH * 4
    formula = step_bytes(strategy, nodes=nodes, local=local, weights_bytes=weights, gradients_bytes=weights)
    assert moved(reading, "node", local) == pytest.approx(formula.node, rel=exactness)
    assert moved(reading, "local", local) == pytest.approx(formula.local, rel=exactness)


def test_frozen_weights_cross_once_in_a_run() -> None:
    base = [[*own, spec("lora", 8, WIDTH)] for own in layers(is_trained=False)]
    reading = run(trace(base), 2, 1)
    adapters = 3 * 8 * WIDTH * 4  # small, so each rank holds them whole, and sums their gradients in a ring of two
    assert moved(reading, "node", 1) == adapters
    assert reading.held["parameters"] == adapters  # frozen shards live in the cache alone
    without = run(trace(base), 2, 1, cache="none")
    assert moved(without, "node", 1) == 2 * (3 * WIDTH * WIDTH * 4) / 2 + adapters


def test_micro_batches_cross_once_with_a_cache_and_mixed_precision_halves_the_crossings() -> None:
    weights = 3 * WIDTH * WIDTH * 4
    host = run(trace(layers()), 2, 1, micro_batches=3)
    none = run(trace(layers()), 2, 1, micro_batches=3, cache="none")
    half = run(trace(layers()), 2, 1, micro_batches=3, dtype="bfloat16")
    assert moved(host, "node", 1) == 2 * weights / 2
    assert moved(none, "node", 1) == (2 * 3 + 1) * weights / 2
    assert 2 * moved(half, "node", 1) == moved(host, "node", 1)
    assert half.held["parameters"] == host.held["parameters"]


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_orders_the_caches(device: str) -> None:
    """A device cache holds the weights of a node's share more. A budget holds as much of them as it says."""
    node_shard = WIDTH * WIDTH * 4
    model = trace(layers(4), saved_bytes=1000)
    found = {}
    for name, budget in (("none", 0), ("host", 0), ("device", 0), ("host", 2 * node_shard)):
        reading = run(model, 2, 1, cache=name, budget=budget, device=device)
        found[name, budget] = reading.peak_bytes, reading.host_bytes
        assert reading.held["activations"] == reading.held["transfers"] == reading.held["gradients"] == 0
    assert found["host", 0][0] <= found["none", 0][0] < found["host", 2 * node_shard][0] < found["device", 0][0]
    assert [host for _, host in found.values()] == [0, 4 * node_shard, 0, 2 * node_shard]


def test_compute_hides_the_wire_where_it_can() -> None:
    """Two nodes of one rank, 10 MB/s: half of the weights and half of the gradients cross.

    If compute takes no time, all of it shows. If each layer computes ten times as long as it crosses, only the first
    gather and the last reduction do.
    """
    one = WIDTH * WIDTH * 4 / 2 / 1e7
    reading = run(trace(layers()), 2, 1, device_memory_bytes_per_s=1e15)
    assert reading.seconds == pytest.approx(2 * 3 * one, rel=1e-3)
    model = trace(layers(4), forward_s=10 * one, backward_s=20 * one)
    reading = run(model, 2, 1, device_memory_bytes_per_s=1e15)
    assert reading.seconds == pytest.approx((4 * 30 + 2) * one, rel=1e-3)


def test_a_device_waits_for_copies_to_a_slow_host() -> None:
    one = WIDTH * WIDTH * 4 / 2 / 1e7
    model = trace(layers(4), forward_s=one, backward_s=one)
    fast = run(model, 2, 1, device="cuda", host_to_device_bytes_per_s=1e12, device_to_host_bytes_per_s=1e12)
    slow = run(model, 2, 1, device="cuda", host_to_device_bytes_per_s=1e6, device_to_host_bytes_per_s=1e6)
    cached = run(model, 2, 1, device="cuda", cache="device")
    assert slow.seconds > 3 * fast.seconds
    assert cached.seconds < 1.05 * fast.seconds  # a cache on the device is copied into the full buffer as well


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lossless_coding_takes_time_and_no_memory_that_stays(device: str) -> None:
    """Of each value one rank reads two and writes two, and the other one reads its message and writes one."""
    figures: dict[str, Any] = {"wire_bits_per_s": 1e15, "wire_latency_s": 1e-9, "device_memory_bytes_per_s": 1e9}
    exact = run(trace(layers()), 2, 1, device=device, dtype="bfloat16", **figures)
    coded = run(trace(layers()), 2, 1, device=device, dtype="bfloat16", wire="lossless", **figures)
    numel, message = 3 * WIDTH * WIDTH / 2, 3 / 8
    loops = {"cuda": 0, "cpu": PASSES_OF_LOOPS * (2 + 2) * 2}[device]
    assert coded.seconds - exact.seconds > 0.95 * numel * (2 * 4 + message + 2 + loops) / 1e9
    assert coded.held["transfers"] <= 3 * 4, "whether each message fitted"


def test_islands_share_bytes_out_over_their_interval_and_overlap_hides_an_exchange() -> None:
    numel = 3 * WIDTH * WIDTH // 2
    for every, fragments, codec, nbytes in ((10, 1, "fp32", 4 * numel), (12, 3, "bf16", 2 * numel)):
        reading, program = with_islands(trace(layers()), 2, islands=3, every=every, fragments=fragments, codec=codec)
        assert reading.sent_bytes["island", "outer"] == pytest.approx(2 * 2 / 3 * nbytes / every, rel=1e-6)
        assert ("node", "weights") not in reading.sent_bytes
        assert program.inexact
    model, keys = trace(layers(), forward_s=0.1, backward_s=0.1), {"islands": 2, "every": 5, "codec": "fp32"}
    alone, hidden = (with_islands(model, 1, **keys, overlap=overlap)[0].seconds for overlap in (0, 1))
    assert alone > hidden


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("device", "count", "micro_batches", "keys"),
    [
        ("cpu", 2, 4, {"cache": "none"}),
        ("cuda", 6, 1, {"wire": "4bit"}),
    ],
)
def test_a_few_layers_stand_for_all(
    device: str, count: int, micro_batches: int, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[Note: A few layers for all] in plan/rehearsed.py, against a rehearsal of all layers and micro-batches."""
    model = trace(layers(count), forward_s=0.02, backward_s=0.05, saved_bytes=10**6)
    few = run(model, 2, 2, device=device, micro_batches=micro_batches, **keys)
    monkeypatch.setattr("laconic.plan.rehearsed._KEPT", count)
    monkeypatch.setattr("laconic.plan.rehearsed._MICRO_BATCHES", 4)
    whole = run(model, 2, 2, device=device, micro_batches=micro_batches, **keys)
    assert few.sent_bytes == pytest.approx(whole.sent_bytes)
    assert few.peak == pytest.approx(whole.peak)
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert few.host_bytes == pytest.approx(whole.host_bytes)
    assert [few.held[kind] for kind in KINDS] == pytest.approx([whole.held[kind] for kind in KINDS])


@pytest.mark.heavy
def test_owners_own_what_they_own_of_all_layers() -> None:
    """How many matrices a rank owns does not follow from those of a few layers: 9 on 4 ranks are 3 on the first."""
    for count, owned in ((8, 2), (9, 3)):
        reading = run(trace(layers(count)), 2, 2, cache="none", optimizer="shampoo")
        # two factors, their two roots, and Adam's two moments
        assert reading.held["optimizer"] == 6 * owned * WIDTH * WIDTH * 4


def test_products_of_the_optimizer_take_their_time() -> None:
    """Muon on one rank: the FLOPs of Newton-Schulz at the rate of bfloat16."""
    seconds = []
    for rate in (1e6, 2e6):
        rates = {"float32": 1e10, "bfloat16": rate}
        reading = run(trace(layers()), 1, 1, cache="none", optimizer="muon", device_flops_per_s=rates)
        seconds.append(reading.seconds)
    flops = 3 * 2 * cost_of(WIDTH, WIDTH, OptimizerConfig().ns_steps)
    assert seconds[0] - seconds[1] == pytest.approx(flops / 1e6 - flops / 2e6)
