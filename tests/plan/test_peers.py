"""The programs of peers: their bytes against closed formulas, the memory they must keep, and the jobs they refuse."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from laconic.comm.traffic import WIRE_LEVELS
from laconic.config import Config
from laconic.hf.layers import layers_to_shard
from laconic.plan.candidates import CANDIDATES
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.model_trace import build_untrained
from laconic.plan.prediction import Predictor, Refusal
from tests.plan.traces import LAYERS, cluster, job
from tests.support.step_bytes import step_bytes

FSDP2 = ("fsdp2", "fsdp2-gloo", "fsdp2-hpz", "fsdp2-two-level", "hsdp")


_predictors: dict[str, Predictor] = {}
_found: dict[str, Estimate | Refusal] = {}


def predict(config: Config, on: ClusterSpec, name: str, device_type: str = "cpu") -> Estimate | Refusal:
    """Predict one strategy, once. The predictions of a model share its traces and rehearsals."""
    key = repr((config, on, name, device_type))
    if key not in _found:
        model = repr((config.model, config.lora, config.train.micro_batch_size, device_type))
        first = _predictors.setdefault(model, Predictor(config, on, device_type=device_type))
        _found[key] = first.with_job(config, same_model=True).on(on).estimate(CANDIDATES[name])
    return _found[key]


def estimated(config: Config, on: ClusterSpec, name: str, device_type: str = "cpu") -> Estimate:
    """The estimate, which there must be."""
    found = predict(config, on, name, device_type)
    assert isinstance(found, Estimate), found.reason
    return found


def payload(estimate: Estimate, *, is_wire: bool) -> float:
    """The bytes of one node's step without control messages."""
    return estimate.ranks_per_node * sum(
        size
        for (level, purpose), size in estimate.sent_bytes.items()
        if (level in WIRE_LEVELS) == is_wire and purpose != "control"
    )


def padded_numel(shape: tuple[int, ...], size: int) -> int:
    """The elements of a parameter whose dim 0 is padded to a multiple of the ranks."""
    return -(-shape[0] // size) * size * math.prod(shape[1:])


def powersgd_numel(shape: tuple[int, ...]) -> int:
    """The elements that cross of a gradient: two factors of rank 4, if that halves it."""
    factors = 4 * sum(shape)
    return factors if len(shape) == 2 and 2 * factors < math.prod(shape) else math.prod(shape)


def parameters_of(config: Config) -> list[nn.Parameter]:
    from laconic.models.build import build_model

    return list(build_model(config.model, config.lora, device="meta").parameters())


def model_numels(config: Config) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of all parameters, and the number of their elements."""
    shapes = [tuple(each.shape) for each in parameters_of(config)]
    return shapes, sum(map(math.prod, shapes))


@pytest.mark.parametrize(
    ("name", "nodes", "local"),
    [
        *((name, 2, 2) for name in (*FSDP2, "ddp", "ddp-bf16", "ddp-powersgd", "ddp-zero1")),
        ("fsdp2", 3, 1),
        ("ddp-zero1", 3, 1),
        *(pytest.param(name, 3, 1, marks=pytest.mark.heavy) for name in ("ddp-bf16", "ddp-powersgd")),
        pytest.param("fsdp2-two-level", 2, 3, marks=pytest.mark.heavy),
        ("fsdp2-hpz", 1, 4),
    ],
)
def test_bytes_equal_the_closed_formulas(name: str, nodes: int, local: int) -> None:
    """With padding counted by hand, every shape moves what [Note: Bytes of a step] says."""
    config = job()
    shapes, numel = model_numels(config)
    ranks = nodes * local
    if name in FSDP2:
        numel = sum(padded_numel(shape, local if name == "hsdp" else ranks) for shape in shapes)
    reduced = sum(map(powersgd_numel, shapes)) if name == "ddp-powersgd" else numel
    expected = step_bytes(
        name if nodes > 1 or name != "fsdp2-hpz" else "fsdp2",
        nodes=nodes, local=local, weights_bytes=4 * numel, gradients_bytes=4 * reduced,
    )  # fmt: skip
    found = estimated(config, cluster(nodes, local), name)
    assert payload(found, is_wire=True) == pytest.approx(expected.node)
    assert payload(found, is_wire=False) == pytest.approx(expected.local)


def test_a_scalar_is_refused_as_fsdp2_does() -> None:
    """FSDP2 cannot cut a scalar."""

    def build(config: Config) -> nn.Module:
        model = build_untrained(config)
        layers_to_shard(model)[0].register_parameter("scale", nn.Parameter(torch.empty((), device="meta")))
        return model

    predictor = Predictor(job(), cluster(2, 2), device_type="cpu")
    predictor._rehearsals.build = build
    found = predictor.estimate(CANDIDATES["fsdp2"])
    assert isinstance(found, Refusal)
    assert "scalar" in found.reason


def test_micro_batches_move_weights_again_and_gradients_once() -> None:
    """FSDP2 gathers in each of them, and reduces in the last. Whole gradients stay; DDP's own, beside its buckets."""
    _, numel = model_numels(job())
    for name in ("fsdp2", "ddp", "ddp-zero1"):
        one, two = (estimated(job(train={"accumulation": count}), cluster(2, 2), name) for count in (1, 2))
        more_bytes = two.peak_bytes - one.peak_bytes
        assert 4 * numel * (1 - 2 / LAYERS) < more_bytes <= 4 * numel + 4  # and the loss of the first
        for level in ("node", "local"):
            assert two.sent_bytes[level, "gradients"] == pytest.approx(one.sent_bytes[level, "gradients"])
            if name == "fsdp2":
                assert two.sent_bytes[level, "weights"] == pytest.approx(2 * one.sent_bytes[level, "weights"])


def test_micro_batches_reduce_inside_the_node_and_replicas_agree_once() -> None:
    """HSDP whose gradients are cut between micro-batches: they, and no whole ones, stay until the last."""
    config = job(train={"accumulation": 3})
    whole, cut = (estimated(config, cluster(2, 2), name) for name in ("hsdp", "hsdp-reduced"))
    assert cut.sent_bytes["node", "gradients"] == pytest.approx(whole.sent_bytes["node", "gradients"])
    assert cut.sent_bytes["local", "gradients"] == pytest.approx(3 * whole.sent_bytes["local", "gradients"])
    _, numel = model_numels(config)
    assert cut.peak_bytes < whole.peak_bytes - numel  # of four bytes each, half stay


def test_what_hooks_of_ddp_keep_counts() -> None:
    """PowerSGD keeps what it has lost of each gradient, and the factors of the last step; bfloat16 keeps nothing."""
    shapes, numel = model_numels(job())
    plain, rounded, factored = (estimated(job(), cluster(2, 2), name) for name in ("ddp", "ddp-bf16", "ddp-powersgd"))
    assert rounded.resting_bytes == plain.resting_bytes
    factors = sum(powersgd_numel(shape) for shape in shapes if powersgd_numel(shape) < math.prod(shape))
    assert factored.resting_bytes - plain.resting_bytes == pytest.approx(4 * (numel + factors), rel=1e-3)
    assert rounded.seconds < plain.seconds
    assert factored.seconds < rounded.seconds
    assert all(each.inexact and each.is_peer for each in (rounded, factored))


def test_lora_reduces_adapters_alone_and_gathers_the_base_where_backward_comes() -> None:
    """Frozen parameters share the gather, and have no gradient."""
    adapters = {"enabled": True, "rank": 4, "alpha": 8.0}
    config = job(lora={**adapters, "targets": ["q_proj", "v_proj"]})
    found = estimated(config, cluster(2, 2), "fsdp2")
    numels = [(padded_numel(tuple(each.shape), 4), each.requires_grad) for each in parameters_of(config)]
    assert 2 * found.sent_bytes["node", "weights"] == pytest.approx(2 * 3 / 4 * 4 * sum(numel for numel, _ in numels))
    trained = sum(numel for numel, is_trained in numels if is_trained)
    assert 2 * found.sent_bytes["node", "gradients"] == pytest.approx(3 / 4 * 4 * trained)
    # Backward ends in the last layer, whose gather ahead of the one before goes to waste, and is freed.
    of_the_last = job(lora={**adapters, "targets": [f"layers.{LAYERS - 1}.self_attn.q_proj"]})
    last = estimated(of_the_last, cluster(2, 2), "fsdp2")
    assert last.resting["transfers"] == pytest.approx(0)
    assert last.sent_bytes["local", "weights"] < found.sent_bytes["local", "weights"]


def test_precision_halves_what_travels() -> None:
    """Weights travel in param_dtype, gradients in reduce_dtype; shards and states stay in the model's dtype."""
    plain = estimated(job(), cluster(2, 2), "fsdp2")
    on = cluster(2, 2, device_flops_per_s={"float32": 1e10, "bfloat16": 1e10})
    mixed = estimated(job(shard={"param_dtype": "bfloat16", "reduce_dtype": "float32"}), on, "fsdp2")
    assert mixed.sent_bytes["node", "weights"] == pytest.approx(plain.sent_bytes["node", "weights"] / 2)
    assert mixed.sent_bytes["node", "gradients"] == pytest.approx(plain.sent_bytes["node", "gradients"])
    assert mixed.resting_bytes == pytest.approx(plain.resting_bytes)


@pytest.mark.parametrize("name", ["fsdp2", "ddp", "host"])
def test_a_compiled_job_is_planned_as_any_other(name: str) -> None:
    """Layers that play a trace have nothing to compile; a note says what the plan leaves out."""
    plain, compiled = (estimated(job(train={"compile": each}), cluster(2, 2), name) for each in (False, True))
    assert compiled.seconds == plain.seconds
    assert compiled.peak == plain.peak


def test_without_resharding_weights_move_once_and_stay() -> None:
    """`reshard_after_forward = False` keeps the whole model from forward to backward."""
    plain = estimated(job(), cluster(2, 2), "fsdp2")
    kept = estimated(job(shard={"reshard_after_forward": False}), cluster(2, 2), "fsdp2")
    padded = sum(padded_numel(shape, 4) for shape in model_numels(job())[0])
    assert 2 * kept.sent_bytes["node", "weights"] == pytest.approx(3 / 4 * 4 * padded)
    assert kept.sent_bytes["node", "gradients"] == plain.sent_bytes["node", "gradients"]
    assert plain.peak["parameters"] < kept.peak["parameters"]
    assert kept.resting_bytes == plain.resting_bytes


def test_memory_is_in_the_order_of_what_ranks_keep() -> None:
    """A rank keeps 1 / R of all states under FSDP2, 1 / L under HSDP, all under DDP; hpZ adds a node's copy.

    Between two steps there are shards and the optimizer's two states of each, and DDP's buckets.
    """
    names = ("fsdp2", "fsdp2-hpz", "hsdp", "ddp")
    flat, hpz, hsdp, ddp = (estimated(job(), cluster(2, 2), name) for name in names)
    assert flat.resting_bytes == pytest.approx(hpz.resting_bytes)
    assert hsdp.resting_bytes == pytest.approx(2 * flat.resting_bytes, rel=0.05)
    _, numel = model_numels(job())
    assert ddp.resting_bytes == pytest.approx(16 * numel, rel=1e-3)  # parameters, two states, buckets; counts of steps
    assert flat.peak_bytes < hpz.peak_bytes < ddp.peak_bytes
    assert flat.peak_bytes < hsdp.peak_bytes < ddp.peak_bytes
    for each in (flat, hpz, hsdp, ddp):
        resting = {kind: size for kind, size in each.resting.items() if size}
        shards = resting.pop("parameters")
        assert resting.pop("optimizer") == pytest.approx(2 * shards, rel=0.002)  # and the numbers of their steps
        assert resting == ({"gradients": pytest.approx(shards, rel=0.001)} if each is ddp else {})  # no buffers


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["fsdp2", "ddp"])
def test_a_fast_network_is_hidden_and_a_slow_one_is_not(name: str) -> None:
    """On CUDA transfers overlap with compute, so on a fast network a step takes little more than its compute."""
    config = job(train={"micro_batch_size": 64})
    fast = estimated(config, cluster(2, 2, wire_bits_per_s=1e13, local_bytes_per_s=1e13), name, "cuda")
    slow = estimated(config, cluster(2, 2, wire_bits_per_s=1e5), name, "cuda")
    assert fast.bound_by.value == "compute"
    assert sum(fast.waits_s.values()) < 0.05 * fast.seconds
    assert slow.bound_by.value == "wire"
    wire_s = slow.wire_bytes * 8 / 1e5 * slow.header_factor
    assert wire_s <= slow.seconds < wire_s + 2 * fast.seconds


@pytest.mark.parametrize(
    ("name", "sections", "shape", "reason"),
    [
        ("fsdp2-hpz", {}, (3, 1), "at least 2 ranks"),
        ("fsdp2-two-level", {}, (3, 1), "gathers between nodes and then inside them, so it needs at least 2 ranks"),
        ("ddp-bf16", {"shard": {"param_dtype": "bfloat16"}}, (2, 2), "no mixed precision"),
        ("fsdp2", {"optimizer": {"name": "muon"}}, (2, 2), "whole blocks or matrices"),
        ("ddp", {"shard": {"param_dtype": "bfloat16"}}, (2, 2), "no mixed precision"),
        ("ddp-zero1", {"optimizer": {"name": "muon"}}, (2, 2), "set shard.strategy to 'ddp' or 'laconic'"),
        ("fsdp2-gloo", {}, (2, 2), "CPU"),
    ],
)
def test_refusals_say_why(name: str, sections: dict[str, Any], shape: tuple[int, int], reason: str) -> None:
    found = predict(job(**sections), cluster(*shape), name, "cuda" if name == "fsdp2-gloo" else "cpu")
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(("nodes", "local"), [(3, 1), (1, 1)])
def test_zero1_keeps_the_states_of_the_fullest_rank(nodes: int, local: int) -> None:
    """Each rank's parameters and states are those of torch's own partition, which is not even."""
    ranks = nodes * local
    shapes, numel = model_numels(job())
    parts = [0] * ranks
    for is_vector in (False, True):
        for shape in sorted((each for each in shapes if (len(each) < 2) is is_vector), key=math.prod, reverse=True):
            parts[parts.index(min(parts))] += math.prod(shape)
    whole, cut = (estimated(job(), cluster(nodes, local), name) for name in ("ddp", "ddp-zero1"))
    assert cut.resting["optimizer"] == pytest.approx(8 * max(parts), rel=1e-3)
    assert cut.resting["parameters"] == whole.resting["parameters"] == pytest.approx(4 * numel, rel=1e-3)  # and buffers
    assert cut.resting["gradients"] == whole.resting["gradients"]
    assert (cut.resting_bytes < whole.resting_bytes) is (ranks > 1)
    sent = [each.sent_bytes.get(("node", "gradients")) for each in (cut, whole)]
    assert sent[0] == sent[1]


@pytest.mark.heavy
def test_ddp_runs_optimizers_of_whole_matrices() -> None:
    """DDP cuts nothing, so Muon runs, with one state for each matrix."""
    on = cluster(2, 2, device_flops_per_s={"float32": 1e10, "bfloat16": 1e10})
    plain, muon = (estimated(job(optimizer={"name": name}), on, "ddp") for name in ("adamw", "muon"))
    assert muon.resting["optimizer"] < plain.resting["optimizer"]
    assert not any(purpose == "optimizer" and size for (_, purpose), size in muon.sent_bytes.items())
