"""Weights and gradients that cross between nodes in few bits equal the twin of the whole protocol, to the bit."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
import laconic.optim
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.shard.bucket import Bucket
from laconic.shard.difference import CopyState
from tests.ranks import run_ranks
from tests.reference.wire import Twin
from tests.shard.helpers import buckets, build, full_parameters, inputs, moved, shard, squared_error, train_step

LR = 0.01


class Toy(nn.Module):
    """Parameters whose gradients are their own elements plus the input's, exactly: sums of one term."""

    def __init__(self, num_units: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ToyBlock(13 + 8 * index) for index in range(num_units))
        self.head = nn.Parameter(torch.randn(7, 41))
        self.bias = nn.Parameter(torch.randn(11))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        total = pull(self.head, x["head"]) + pull(self.bias, x["bias"])
        for index, block in enumerate(self.blocks):
            total = total + block(x[f"blocks.{index}.weight"], x[f"blocks.{index}.wide"], x[f"blocks.{index}.norm"])
        return total


class ToyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(19, width))
        self.wide = nn.Parameter(torch.randn(3, 5, 29) * 1e-3)
        self.norm = nn.Parameter(torch.randn(width))

    def forward(self, weight: Tensor, wide: Tensor, norm: Tensor) -> Tensor:
        return pull(self.weight, weight) + pull(self.wide, wide) + pull(self.norm, norm)


def pull(parameter: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient is x * parameter: one rounding for each element."""
    return (parameter.square() * x).sum() / 2


def toy_inputs(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def runs_of(model: Any) -> dict[str, list[tuple[int, int]]]:
    """The run of every parameter that each shard holds, by the parameter's name in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for bucket in buckets(model):
        for index, parameter in enumerate(bucket.sharded):
            extents = [bucket.layout.extent(index, s) for s in range(bucket.layout.num_shards)]
            found[names[id(parameter)]] = [(e.start, e.stop) if e else (0, 0) for e in extents]
    return found


def computed_weights(model: Any) -> dict[str, Tensor]:
    """The weights with which this rank computes now. Collective."""
    units = [module for module in model.modules() if hasattr(module, "unshard")]
    for unit in units:
        unit.unshard()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return weights


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5)


def assert_equals_twin(
    model: Any, twin: Twin, optimizer: torch.optim.Optimizer, *, steps: int, accumulation: int, exactly: set[int]
) -> None:
    """Train both; every step's gradients, exact weights and computed weights must have the same bits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = build(Toy)
    names = {name: p.shape for name, p in whole.named_parameters()}
    theirs = sgd(list(twin.shards.values()))
    for step in range(steps):
        expected = twin.cross(exactly=step in exactly)
        seeds = [[1000 * step + 100 * a + r for r in range(world)] for a in range(accumulation)]
        for a in range(accumulation):
            model.set_requires_gradient_sync(a == accumulation - 1)
            model(toy_inputs(whole, seeds[a][rank])).backward()
        got = computed_weights(model)
        for name, value in expected.items():
            assert torch.equal(got[name], value), f"step {step}: computed {name}"
        micro_batches = [
            [{name: value * expected[name] for name, value in toy_inputs(whole, seed).items()} for seed in row]
            for row in seeds
        ]
        twin.set_gradients(micro_batches)
        for name, parameter in model.named_parameters():
            want = torch.cat([twin.shards[name, s].grad for s in range(world)])  # type: ignore[list-item]
            assert torch.equal(parameter.grad.full_tensor().flatten(), want), f"step {step}: gradient of {name}"
        optimizer.step()
        theirs.step()
        model.zero_grad()
        for name, value in full_parameters(model).items():
            want = torch.cat([twin.shards[name, s].detach() for s in range(world)])
            assert torch.equal(value.flatten(), want), f"step {step}: exact {name}, {names[name]}"


def twin_of(model: Any, wire: laconic.Wire) -> Twin:
    cluster = model._laconic_unit.cluster
    parameters = {name: p.detach() for name, p in build(Toy).named_parameters()}
    return Twin(
        parameters, runs_of(model), num_nodes=cluster.num_nodes, num_local=cluster.num_local,
        weights=wire.weights, gradients=wire.gradients, feedback=wire.feedback,
    )  # fmt: skip


WIRES = {
    "4bit": laconic.Wire.of("4bit"),
    "8bit": laconic.Wire.of("8bit"),
    "bf16": laconic.Wire(weights="bf16", gradients="bf16"),
    "int3": laconic.Wire(weights="int3", gradients="e2m1"),
    "gradients": laconic.Wire(gradients="int3"),
    "feedback": laconic.Wire(weights="int4", gradients="int2", feedback=True),
    "due": laconic.Wire(weights="int4", gradients="int4", exact_every=2),
}


def job_twin(runs: list[tuple[str, str, int]]) -> None:
    for wire_name, cache, accumulation in runs:
        wire = WIRES[wire_name]
        model = shard(build(Toy), cache=cache, wire=wire)
        twin = twin_of(model, wire)
        exactly = {2} if wire.exact_every == 2 else set()
        optimizer = sgd(model.parameters())
        assert_equals_twin(model, twin, optimizer, steps=4, accumulation=accumulation, exactly=exactly)
        states = [bucket.wire.weights for bucket in buckets(model)]
        assert states.count("exact") < len(states) or wire.weights == "exact"


@pytest.mark.parametrize(
    ("mesh", "runs"),
    [
        ((2, 1), [("4bit", "host", 1), ("8bit", "device", 2), ("feedback", "host", 1), ("int3", "host", 3)]),
        ((2, 2), [("4bit", "device", 1), ("bf16", "host", 2), ("due", "host", 1)]),
        ((3, 1), [("4bit", "host", 2), ("gradients", "none", 1)]),
        ((4, 1), [("4bit", "host", 1)]),
        ((3, 2), [("4bit", "host", 1), ("feedback", "device", 2)]),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_equals_the_twin_to_the_bit(mesh: tuple[int, int], runs: list[tuple[str, str, int]]) -> None:
    run_ranks(job_twin, mesh[0] * mesh[1], runs, local=mesh[1])


# -- exact crossings ---------------------------------------------------------------------------------------------------


def crossings(model: Any) -> list[Any]:
    """The differences of all coded buckets."""
    units = {module._laconic_unit for module in model.modules() if hasattr(module, "_laconic_unit")}
    gathers = [gather for unit in units for gather in unit.gather._gathers]
    return [gather._crossing for gather in gathers if gather.bucket.wire.sends_differences]


def states(model: Any) -> set[CopyState]:
    return {each.state for each in crossings(model)}


def assert_nodes_agree(model: Any) -> None:
    """Assert that all ranks compute with equal weights."""
    weights = torch.cat([value.flatten() for value in computed_weights(model).values()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    for rank, theirs in enumerate(everyone):
        assert torch.equal(theirs, weights), f"rank {rank} computes with other weights"


def is_exact(model: Any) -> bool:
    """Whether the weights of the next forward are those of the optimizer. Collective."""
    exact = full_parameters(model)
    return all(torch.equal(value, exact[name]) for name, value in computed_weights(model).items())


def job_causes(folder: str) -> None:
    model = shard(build(), cache="host", wire="4bit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(seed: int = 0) -> None:
        train_step(model, optimizer, seed)

    step()
    assert states(model) == {CopyState.EXACT}, "the first crossing is exact"
    step()
    assert states(model) == {CopyState.DECODED}
    assert not is_exact(model)
    assert_nodes_agree(model)

    def expect_exact(cause: str) -> None:
        assert is_exact(model), cause
        assert_nodes_agree(model)
        step()
        step()
        assert states(model) == {CopyState.DECODED}, f"differences again after {cause}"

    with torch.no_grad():  # one rank of one node edits
        for parameter in model.parameters():
            parameter.mul_(1.25)
    expect_exact("an edit")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expect_exact("a state dict")
    model.load_state_dict(state)
    expect_exact("a load")
    if dist.get_rank() == 1:  # its memory was lost
        crossings(model)[0].forget()
    step()
    assert {each.state for each in crossings(model)} == {CopyState.EXACT, CopyState.DECODED}
    step()
    loss = squared_error(model, failing_inputs(3))
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    model.zero_grad()
    step()  # the weights are the same, so nothing crosses before its forward
    step()
    assert states(model) == {CopyState.EXACT}, "after a backward that failed"
    step()
    for _ in range(2):  # a skipped step changes nothing, so nothing crosses
        with moved(model) as m:
            squared_error(model, inputs(5, dist.get_rank())).backward()
        model.zero_grad()
    assert m.weights == 0


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("on purpose")


def failing_inputs(seed: int) -> tuple[Tensor, Tensor]:
    x, y = inputs(seed, dist.get_rank())
    return FailsInBackward.apply(x.requires_grad_()), y


@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)], ids=str)
def test_weights_cross_exactly_for_each_cause(mesh: tuple[int, int], tmp_path: Path) -> None:
    run_ranks(job_causes, mesh[0] * mesh[1], str(tmp_path), local=mesh[1])


def job_disagree() -> None:
    model = shard(build(), cache="host", wire=laconic.Wire(weights="int4", exact_every=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    damaged = next(each for each in crossings_after(model, optimizer) if "up" in each.bucket.layout.slots[0].name)
    for attempt in range(2):
        if dist.get_rank() == 0:
            damaged.bucket.cached.buffer()[0] += 1  # a flipped bit
        if attempt == 0:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for seed in range(4):
                    train_step(model, optimizer, seed)
            assert any("different copies of 1 buckets, those of up.weight" in str(each.message) for each in seen)
            assert_nodes_agree(model)
            continue
        with pytest.raises(RuntimeError, match=r"different copies of 1 buckets, those of up\.weight.*is damaged"):
            crossings_after(model, optimizer, steps=8)


def crossings_after(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Any]:
    for seed in range(steps):
        train_step(model, optimizer, seed)
    return crossings(model)


def test_copies_that_differ_are_made_equal_once_and_then_named() -> None:
    run_ranks(job_disagree, 2, local=1)


class Interrupted(Exception):
    """Stands for what may arrive while a difference is added."""


def job_interrupted() -> None:
    """An exception comes in the middle of adding a difference. The weights cross exactly next time, on all ranks."""
    model = shard(build(), units=[], cache="host", wire="4bit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (victim,) = crossings_after(model, optimizer)
    finish = victim._messages.finish

    def interrupted(node_shard: Tensor) -> Any:
        arrived = list(finish(node_shard))
        yield arrived[0]
        raise Interrupted

    victim._messages.finish = interrupted
    with pytest.raises(Interrupted):
        model.unshard()
    victim._messages.finish = finish
    assert victim.state is CopyState.LOST
    model.reshard()
    assert is_exact(model)
    assert victim.state is CopyState.EXACT
    crossings_after(model, optimizer)
    assert_nodes_agree(model)


def test_a_difference_that_is_added_in_part_is_never_a_base() -> None:
    run_ranks(job_interrupted, 2, local=1)


def job_resumed(folder: str) -> None:
    """A run that saves, and one that resumes from what it saved, go on with the same bits."""
    wire = laconic.Wire(weights="int4", gradients="int2", feedback=True)
    model = shard(build(), cache="host", wire=wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(4):
        train_step(model, optimizer, seed)
    save_checkpoint(folder, 4, model=model, optimizer=optimizer, extra={})
    for seed in range(4, 8):
        train_step(model, optimizer, seed)
    resumed = shard(build(seed=1), cache="device", wire=wire)
    second = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    assert load_checkpoint(folder, model=resumed, optimizer=second) is not None
    for seed in range(4, 8):
        train_step(resumed, second, seed)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, full_parameters(resumed)[name]), name


def test_a_resumed_run_has_the_bits_of_the_one_that_saved(tmp_path: Path) -> None:
    run_ranks(job_resumed, 4, str(tmp_path), local=2)


# -- bytes -------------------------------------------------------------------------------------------------------------


def int4_bytes(numel: int, multiple: int = 1) -> int:
    numel = -(-numel // multiple) * multiple
    return math.ceil(numel / 2) + 2 * math.ceil(numel / 128)


def message_bytes(bucket: Bucket, multiple: int) -> int:
    """The bytes of one shard, matrices in four bits: those of the longest message on this rank's way."""
    local, nodes = bucket.cluster.local_rank, bucket.cluster.num_nodes
    totals = []
    for shard_index in range(local * nodes, (local + 1) * nodes):
        extents = [bucket.layout.extent(i, shard_index) for i in range(len(bucket.layout.slots))]
        totals.append(
            sum(
                int4_bytes(extent.numel, multiple) if len(slot.shape) > 1 else 4 * extent.numel
                for slot, extent in zip(bucket.layout.slots, extents, strict=True)
                if extent
            )
        )
    return max(totals)


def job_bytes() -> None:
    model = shard(build(), cache="host", wire="4bit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    crossings_after(model, optimizer)
    with moved(model) as m:
        for seed in range(3):
            for a in range(2):
                model.set_requires_gradient_sync(a == 1)
                squared_error(model, inputs(seed + 7 * a, dist.get_rank())).backward()
            optimizer.step()
            model.zero_grad()
    weights = gradients = 0
    others = dist.get_world_size() // model._laconic_unit.cluster.num_local - 1
    for bucket in buckets(model):
        assert not bucket.wire.is_exact
        weights += others * message_bytes(bucket, 1)
        gradients += others * message_bytes(bucket, 32)
    assert (m.weights, m.gradients) == (3 * weights, 3 * gradients)


@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)], ids=str)
def test_bytes_are_those_of_the_codes(mesh: tuple[int, int]) -> None:
    run_ranks(job_bytes, mesh[0] * mesh[1], local=mesh[1])


# -- refusals ----------------------------------------------------------------------------------------------------------


def job_refusals() -> None:
    with pytest.raises(ValueError, match=r"sends differences to the copies.*cache='none' keeps none; use cache='host'"):
        shard(build(), wire="4bit")
    with pytest.raises(ValueError, match="wire='5bit' is not known; use one of exact, 8bit, 4bit"):
        shard(build(), cache="host", wire="5bit")
    model = shard(build(), wire=laconic.Wire(weights="int8", as_values=True, gradients="int4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        train_step(model, optimizer, seed)
        assert_nodes_agree(model)


def job_one_node() -> None:
    with pytest.warns(UserWarning, match="wire= does nothing here: all ranks that share the parameters are on one"):
        shard(build(), units=[], cache="host", wire="4bit")


def test_what_cannot_be_is_refused_and_what_does_nothing_says_so() -> None:
    run_ranks(job_refusals, 2, local=1)
    run_ranks(job_one_node, 2, local=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "int5"}, r"Wire\(weights='int5'\) is not known; use one of exact, bf16, int8, int4, int3"),
        ({"gradients": "int1"}, r"Wire\(gradients='int1'\) is not known"),
        ({"weights": "int4", "as_values": True}, "values need 8 bits or more; use 'int8'"),
        ({"exact_every": 0, "weights": "int4"}, r"exact_every=0\) must be positive"),
        ({"feedback": True}, "needs gradients other than 'exact'"),
    ],
)
def test_policies_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.Wire(**arguments)


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def job_not_finite() -> None:
    """A gradient that overflows on one rank makes the norm of all not finite, and a skipped step leaves nothing."""
    wire = laconic.Wire(weights="int4", gradients="int4", feedback=True)
    model = shard(build(), cache="host", wire=wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    crossings_after(model, optimizer)
    loss = squared_error(model, inputs(0, dist.get_rank()))
    (loss * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not math.isfinite(float(norm))
    model.zero_grad()
    for seed in range(3):
        train_step(model, optimizer, seed)
    assert all(bool(value.isfinite().all()) for value in full_parameters(model).values())
    assert_nodes_agree(model)


def test_an_overflow_reaches_every_rank_and_passes() -> None:
    run_ranks(job_not_finite, 4, local=2)


# -- beside other features ---------------------------------------------------------------------------------------------


def job_beside() -> None:
    """Coded runs stay near exact ones, and all ranks compute with equal weights."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cases: dict[str, dict[str, Any]] = {
        "bf16 copies": {"mp_policy": bf16},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "stays gathered": {"reshard_after_forward": False},
        "budget": {"cache": laconic.Cache(where="host", device_budget_bytes=4096)},
        "device": {"cache": "device"},
    }
    for what, options in cases.items():
        losses = {}
        for wire in ("exact", "4bit"):
            model = shard(build(), **{"cache": "host", **options}, wire=wire)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses[wire] = torch.stack([train_step(model, optimizer, seed % 3) for seed in range(9)])
            assert_nodes_agree(model)
        torch.testing.assert_close(losses["4bit"], losses["exact"], rtol=0.02, atol=0.01, msg=f"{what}: {losses}")


def test_other_features_go_together_with_it() -> None:
    run_ranks(job_beside, 4, local=2)


def job_frozen() -> None:
    """Frozen weights cross once and exactly; weights that are frozen later keep their exact shard."""
    model = build()
    for parameter in model.blocks.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    model = shard(model, cache="host", wire="4bit")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    crossings_after(model, optimizer)
    assert all(bucket.wire.is_exact for bucket in buckets(*model.blocks))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    exact = full_parameters(model)
    for _ in range(3):
        with torch.no_grad():
            model(inputs(0, dist.get_rank())[0])
    assert all(torch.equal(value, exact[name]) for name, value in full_parameters(model).items())


def test_frozen_weights_stay_exact() -> None:
    run_ranks(job_frozen, 4, local=2)


def job_islands() -> None:
    """Islands that sum their gradients exactly, each with two nodes that send in four bits."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=2, local=1)
    model = shard(build(), mesh=mesh, cache="host", wire="4bit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    crossings_after(model, optimizer, steps=4)
    assert_nodes_agree(model)


def test_replicas_stay_equal() -> None:
    run_ranks(job_islands, 4, local=1)


def job_other_optimizers() -> None:
    """Edits inside any optimizer's step are differences; edits outside are named after a while."""
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        lambda parameters: laconic.optim.AdamW8bit(parameters, lr=1e-2),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
    ):
        granularity = laconic.optim.AdamW8bit.granularity
        model = shard(build(), cache="host", wire="4bit", granularity=granularity)
        crossings_after(model, make(model.parameters()), steps=3)
        assert states(model) == {CopyState.DECODED}
    with pytest.warns(UserWarning, match=r"exactly, not in few bits, because something else than an optimizer's step"):
        edit_by_hand(model)


def edit_by_hand(model: Any) -> None:
    for seed in range(12):
        train_step(model, seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def test_only_optimizers_make_differences() -> None:
    run_ranks(job_other_optimizers, 2, local=1)
