"""The programs of DeepSpeed and of torchft's DiLoCo."""

import math
from typing import Any

import pytest

from laconic import registry
from laconic.contestants.deepspeed_fetch import Coordinator, FetchSizes, Parameter
from laconic.plan.candidates import CANDIDATES
from laconic.plan.machine import Simulator
from laconic.plan.prediction import Refusal
from laconic.plan.program import Shape, work_of
from laconic.strategies.under import job_under
from tests.plan.test_peers import estimated, model_numels, padded_numel, payload, predict
from tests.plan.traces import LAYERS, cluster, job


def padded(config: Any, ranks: int) -> int:
    """The elements of the model, each parameter padded to a multiple of the ranks."""
    shapes, _ = model_numels(config)
    return sum(-(-math.prod(shape) // ranks) * ranks for shape in shapes)


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 1)])
def test_zero_3_moves_three_passes_but_for_what_stays_over_the_turn(nodes: int, local: int) -> None:
    """Weights move in forward and backward, but for those gathered ahead when forward ends; gradients once.

    At most the root and two layers stay.
    """
    config, ranks = job(), nodes * local
    found = estimated(config, cluster(nodes, local), "deepspeed")
    numel = padded(config, ranks)
    pass_bytes = local * (ranks - 1) / ranks * 4 * numel  # one edge of the ring for each rank of a node
    moved = {"weights": 0.0, "gradients": 0.0}
    for (_, purpose), size in found.sent_bytes.items():
        if purpose in moved:
            moved[purpose] += local * size
    assert moved["gradients"] == pytest.approx(pass_bytes)
    assert (2 - 2.5 / LAYERS) * pass_bytes < moved["weights"] < 2 * pass_bytes
    twice = estimated(
        job(train={"accumulation": 2}), cluster(nodes, local), "deepspeed"
    )  # reduces in every micro-batch
    for kind, size in found.sent_bytes.items():
        assert kind[1] not in moved or twice.sent_bytes[kind] == pytest.approx(2 * size)


def test_hpz_gathers_again_inside_the_node() -> None:
    """Weights cross the wire once, gradients once; the node's copy takes memory until the optimizer's step."""
    config = job()
    plain, hpz = (estimated(config, cluster(2, 2), name) for name in ("deepspeed", "deepspeed-hpz"))
    numel = padded(config, 4)
    assert payload(hpz, is_wire=True) == pytest.approx(2 * 3 / 4 * 4 * numel)
    assert payload(hpz, is_wire=False) > payload(plain, is_wire=False)
    assert hpz.resting_bytes == pytest.approx(plain.resting_bytes)
    assert plain.peak_bytes < hpz.peak_bytes


def test_hpz_never_gathers_a_frozen_weight_across_nodes_again() -> None:
    """The node shard of a frozen parameter stays for good."""
    config = job(lora={"enabled": True, "rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]})
    plain, hpz = (estimated(config, cluster(2, 2), name) for name in ("deepspeed", "deepspeed-hpz"))
    assert hpz.wire_bytes < 0.2 * plain.wire_bytes
    assert hpz.resting["cache"] > 0


def test_zero_plus_plus_crosses_in_int8_and_int4() -> None:
    """Weights cross once in 8 bits, gradients once in 4, each with scales; vectors and odd matrices in full."""
    config = job()
    found = estimated(config, cluster(2, 2), "deepspeed-zero++", "cuda")
    numel = padded(config, 4)
    weights = 2 * found.sent_bytes["node", "weights"]
    gradients = 2 * found.sent_bytes["node", "gradients"]
    assert 3 / 4 * numel < weights < 1.01 * 3 / 4 * numel
    assert numel / 2 / 2 < gradients < 1.3 * numel / 2 / 2


def test_resting_memory_is_what_stage_3_allocates() -> None:
    """Of each trained parameter a rank keeps its part, fp32 masters, fp32 sums, two states; and one bucket."""
    config = job()
    found = estimated(config, cluster(2, 2), "deepspeed")
    shapes, _ = model_numels(config)
    layer = (padded(config, 1) - 2 * shapes[0][0] * shapes[0][1] - shapes[0][1]) // LAYERS
    assert found.resting_bytes == pytest.approx(20 * padded(config, 4) / 4 + 4 * layer, rel=1e-4)  # a count of steps


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed-hpz", "deepspeed-zero++"])
def test_every_byte_is_freed_between_steps(name: str) -> None:
    """What a program holds between two steps does not grow from step to step."""
    config = job_under(CANDIDATES[name], job(train={"accumulation": 2}))
    machine = Simulator(cluster(2, 2), device_type="cuda")
    work, shape = work_of(config, device_type="cuda"), Shape(nodes=2, local=2)
    program = registry.load(CANDIDATES[name].predict)(machine, work, shape)
    program.step()
    first = dict(machine.held)
    program.step()
    assert dict(machine.held) == pytest.approx(first)
    assert machine.held["transfers"] == pytest.approx(0)


def test_diloco_holds_shards_and_momentum_between_steps() -> None:
    """Shards, the inner optimizer's two states of each, and the outer momentum."""
    resting = {k: v for k, v in estimated(job(), cluster(2, 2), "torchft-diloco", "cuda").resting.items() if v}
    shards = resting.pop("parameters")
    assert resting == {"optimizer": pytest.approx(3 * shards, rel=0.002)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # only the last module, which backward wants at once, is there already if it may stay
        (FetchSizes(prefetch=0, max_live=3, max_reuse=0), [[0], [1], [2], [2], [1], [0]]),
        # 0 is fetched, 1 ahead of it; then each step fetches one ahead; 2 is there at the turn, and stays
        (FetchSizes(prefetch=1, max_live=2, max_reuse=0), [[0], [1], [2], [1], [0]]),
        # with the distance of a whole model nothing is gathered twice
        (FetchSizes(prefetch=0, max_live=9, max_reuse=6), [[0], [1], [2]]),
    ],
)
def test_modules_are_fetched_as_worked_out_by_hand(sizes: FetchSizes, expected: list[list[int]]) -> None:
    """One micro-batch of three modules with a parameter each, forward and backward."""
    given: dict[str, Any] = {"itemsize": 4, "is_trained": True, "has_two_dims": True, "num_scales": 1}
    parameters = [Parameter(numel=1, partition_numel=1, **given) for _ in range(3)]
    messages: list[list[int]] = []

    def send(members: Any) -> tuple[None, float]:
        messages.append([parameters.index(each) for each in members])
        return None, 0.0

    order, machine = [[each] for each in (*parameters, *parameters[::-1])], Simulator(cluster(2, 2), device_type="cuda")
    found = Coordinator(machine, order, sizes, send, lambda parameter: None)
    found.begin()
    for step in range(len(found.order)):
        found.fetch()
        found.release(step)
    found.end()
    assert messages == expected
    assert all(each.message is None for each in parameters)


@pytest.mark.parametrize(
    ("name", "sections", "shape", "device_type", "reason"),
    [
        ("deepspeed-hpz", {}, (3, 1), "cuda", "at least 2 ranks"),
        ("deepspeed-zero++", {}, (2, 2), "cpu", "CUDA kernels"),
        ("deepspeed", {"model": {"dtype": "bfloat16"}}, (2, 2), "cuda", "float32"),
        ("deepspeed", {"optimizer": {"name": "shampoo"}}, (2, 2), "cuda", "whole blocks or matrices"),
        ("torchft-diloco", {"sync": {"mode": "local", "overlap": 2}}, (2, 2), "cuda", "sync.overlap"),
        ("torchft-diloco", {}, (1, 4), "cuda", "2 islands"),
        ("torchft-diloco", {"sync": {"mode": "local", "slices": 2}}, (2, 2), "cuda", "sync.slices"),
    ],
)
def test_refusals_say_why(
    name: str, sections: dict[str, Any], shape: tuple[int, int], device_type: str, reason: str
) -> None:
    """A peer that cannot run the job says so."""
    found = predict(job(**sections), cluster(*shape), name, device_type)
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize("islands", [None, 2])
def test_diloco_sends_its_share_of_an_all_reduce(islands: int | None) -> None:
    """A ring all-reduce of all parameters, once in `every` steps; without islands of its own every node is one."""
    every, fragments = 20, 4
    sync = {"mode": "local", "every": every, "fragments": fragments, "islands": islands}
    found = estimated(job(sync={k: v for k, v in sync.items() if v}), cluster(4, 2), "torchft-diloco")
    count = islands or 4
    ranks = 8 // count
    numel = sum(padded_numel(shape, ranks) for shape in model_numels(job())[0])
    assert ranks * found.sent_bytes["island", "outer"] * every == pytest.approx(2 * (count - 1) / count * 4 * numel)
    assert "20 steps" in found.inexact
    plain = estimated(job(), cluster(2, 2), "torchft-diloco")  # every 100 steps, with every node an island
    numel = sum(padded_numel(shape, 2) for shape in model_numels(job())[0])
    assert plain.wire_bytes * 100 == pytest.approx(4 * numel, rel=0.001)
    assert plain.host_bytes * 2 == pytest.approx(4 * numel)
