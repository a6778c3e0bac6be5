"""Weights and gradients that cross in few bits equal the twin of the whole protocol, to the bit; bytes are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
import laconic.optim
from laconic.codec import CODECS
from laconic.codec.payload import few_bits_of, shards_of_nodes
from laconic.policy import from_keys
from laconic.shard.bucket import Bucket
from laconic.shard.policies import ShardPolicy
from laconic.strategies.known.engine import VALUES_WIRE, ZERO_PLUS_PLUS
from tests.reference.messages import Run, int4_bytes, int8_bytes, message_bytes
from tests.reference.wire import Twin
from tests.shard.wire_helpers import Aligned, Toy, computed_weights, crossings_after, cuts_of, runs_of, toy_inputs
from tests.support.launch import on_ranks
from tests.support.sharded_net import (
    accumulate,
    buckets,
    build,
    full_parameters,
    inputs,
    micro_batches,
    moved,
    shard,
    squared_error,
)
from tests.support.step_bytes import step_bytes

LR = 0.01


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5)


def assert_equals_twin(
    model: Any,
    twin: Twin,
    optimizer: torch.optim.Optimizer,
    make: Callable[[], nn.Module] = Toy,
    *,
    steps: int,
    accumulation: int,
    exactly: set[int],
) -> None:
    """Train both; every step's gradients, exact weights and computed weights must have the same bits."""
    rank, world, shards = dist.get_rank(), dist.get_world_size(), twin.num_nodes * twin.num_local
    whole = build(make)
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
            if name not in twin.trained:
                assert parameter.grad is None
                continue
            want = torch.cat([twin.shards[name, s].grad for s in range(shards)])  # type: ignore[list-item]
            assert torch.equal(parameter.grad.full_tensor().flatten(), want), f"step {step}: gradient of {name}"
        optimizer.step()
        theirs.step()
        model.zero_grad()
        for name, value in full_parameters(model).items():
            want = torch.cat([twin.shards[name, s].detach() for s in range(shards)])
            assert torch.equal(value.flatten(), want), f"step {step}: exact {name}, {names[name]}"


def twin_of(model: Any, wire: laconic.Wire, make: Callable[[], nn.Module] = Toy) -> Twin:
    cluster = model._laconic_unit.cluster
    parameters = {name: p.detach() for name, p in build(make).named_parameters()}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return Twin(
        parameters, runs_of(model), num_nodes=cluster.num_nodes, num_local=cluster.num_local,
        num_islands=cluster.num_islands, cuts=cuts_of(model), frozen=frozen,
        weights=wire.weights if cluster.num_nodes > 1 else "exact", gradients=wire.gradients, feedback=wire.feedback,
        as_values=wire.as_values, codes_frozen=wire.frozen,
    )  # fmt: skip


WIRES = {
    "4bit": laconic.Wire.of("4bit"),
    "bf16": laconic.Wire(weights="bf16", gradients="bf16"),
    "e2m1": laconic.Wire(weights="int4", gradients="e2m1"),
    "feedback": laconic.Wire(weights="int4", gradients="int2", feedback=True),
    "due": laconic.Wire(weights="int4", gradients="int4", exact_every=2),
}


@pytest.mark.parametrize(
    ("world", "local", "islands", "wire_name", "cache", "accumulation", "shares"),
    [
        (2, 1, 1, "e2m1", "host", 2, None),
        (2, 1, 1, "bf16", "host", 2, None),
        (4, 2, 1, "4bit", "host", 1, [3.0, 1.0, 2.5, 2.0]),
        (3, 1, 1, "due", "host", 1, None),
        (2, 1, 1, "feedback", "device", 2, None),
        (3, 1, 3, "4bit", "host", 2, None),
        (4, 1, 2, "feedback", "device", 1, None),
    ],
)
@on_ranks("world", local="local")
def test_equals_the_twin_to_the_bit(
    islands: int, wire_name: str, cache: str, accumulation: int, shares: list[float] | None
) -> None:
    """Messages of unequal shards are as long as the longest one's codes; what they stand for does not depend on it."""
    wire, mesh = WIRES[wire_name], laconic.init_mesh("cpu", islands=islands)
    model = shard(build(Toy), mesh=mesh, cache=cache, wire=wire, shares=shares)
    exactly = {2} if wire.exact_every == 2 else set()
    twin, optimizer = twin_of(model, wire), sgd(model.parameters())
    assert_equals_twin(model, twin, optimizer, steps=3, accumulation=accumulation, exactly=exactly)
    assert not all(bucket.wire.is_exact for bucket in buckets(model))


@pytest.mark.parametrize("keys", [{"cache": "device", "wire": VALUES_WIRE}, ZERO_PLUS_PLUS], ids=["values", "zero++"])
@on_ranks(4, local=2)
def test_adapters_beside_frozen_weights_equal_the_twin(keys: dict[str, Any]) -> None:
    """As with LoRA: most weights of a block are frozen, and the rest has a bucket of its own."""
    policy = from_keys(ShardPolicy, keys)
    whole = build(Toy)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(not name.endswith((".wide", ".norm")))
    wire = policy.wire
    model = shard(whole, cache=policy.cache, wire=wire)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    assert_equals_twin(model, twin_of(model, wire), optimizer, steps=2, accumulation=2, exactly=set())


@on_ranks(3, local=1)
def test_tensors_that_are_coded_together_equal_the_twin() -> None:
    """Tensors that are coded together have the codes that each would have alone.

    Gradients cross in int8, which are not rotated: the bits of a product of matrices depend on its size.
    """
    wire = laconic.Wire(weights="int4", gradients="int8")
    model = shard(build(Aligned), units=[], cache="host", wire=wire)
    (bucket,) = buckets(model)
    parts = shards_of_nodes(bucket.layout, bucket.geometry.peers)
    payload = few_bits_of(bucket.layout, parts, CODECS["int4"], plain=torch.float32, device_type="cpu")
    num_runs = sum(start < stop for runs in runs_of(model).values() for start, stop in runs)
    assert sum(map(len, payload._pieces.values())) < num_runs
    twin = twin_of(model, wire, Aligned)
    assert_equals_twin(model, twin, sgd(model.parameters()), Aligned, steps=3, accumulation=1, exactly=set())


def shard_bytes(bucket: Bucket, multiple: int) -> int:
    """The bytes of one shard, matrices in four bits: those of the longest message on this rank's way."""
    local, nodes = bucket.cluster.local_rank, bucket.cluster.num_nodes
    shards = range(local * nodes, (local + 1) * nodes)
    return max(message_bytes(message_runs(bucket, shard), partial(int4_bytes, multiple=multiple)) for shard in shards)


def message_runs(bucket: Bucket, shard: int) -> list[Run]:
    found = []
    for index, slot in enumerate(bucket.layout.slots):
        extent, offset = bucket.layout.extent(index, shard), bucket.layout.offset_in_shard(index, shard)
        if extent:
            found.append((offset, offset + extent.numel, len(slot.shape) < 2))
    return found


@on_ranks(4, local=2)
def test_bytes_are_those_of_the_codes() -> None:
    model = shard(build(), cache="host", wire="4bit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    crossings_after(model, optimizer)
    with moved(model) as m:
        accumulate(model, micro_batches(2))
    others = model._laconic_unit.cluster.num_nodes - 1
    assert not any(bucket.wire.is_exact for bucket in buckets(model))
    assert m.weights == sum(others * shard_bytes(bucket, 1) for bucket in buckets(model))
    assert m.gradients == sum(others * shard_bytes(bucket, 32) for bucket in buckets(model))


@on_ranks(3, local=1)
def test_bytes_of_replicas_are_those_of_two_trips() -> None:
    """Two trips over the islands: every other island's part in four bits, then this island's in eight bits."""
    world = dist.get_world_size()
    model = shard(build(), mesh=laconic.init_mesh("cpu", islands=world), wire=laconic.Wire(gradients="int4"))
    with moved(model) as m:
        squared_error(model, inputs(0, dist.get_rank())).backward()
    expected = 0
    for bucket in buckets(model):
        size = -(-bucket.layout.shard_numel // (world * 128)) * 128
        parts = []
        for island in range(world):
            begin, end = island * size, (island + 1) * size
            cut = [(max(first, begin), min(last, end), flat) for first, last, flat in message_runs(bucket, 0)]
            parts.append([(first, last, flat) for first, last, flat in cut if first < last])
        there = max(message_bytes(runs, partial(int4_bytes, multiple=32)) for runs in parts)
        back = max(message_bytes(runs, int8_bytes) for runs in parts)
        expected += (world - 1) * (there + back)
    assert m.sent("island", "gradients") == expected


@on_ranks(4, local=2)
def test_bytes_of_zero_plus_plus_are_those_of_the_formula() -> None:
    """All weights in int8 in every forward, frozen ones too, and gradients in int4 in every backward."""
    model = build(lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))))
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    policy = from_keys(ShardPolicy, ZERO_PLUS_PLUS)
    shard(model, list(model), cache=policy.cache, wire=policy.wire)  # type: ignore[call-overload]
    layer_bytes = 4 * 256 * 256
    expected = step_bytes(
        "zero++", nodes=2, local=2, weights_bytes=3 * layer_bytes, frozen_bytes=layer_bytes,
        gradients_bytes=2 * layer_bytes,
    )  # fmt: skip
    x = torch.ones(1, 256)
    for _ in range(3):
        with moved(model) as m:
            model(x).sum().backward()
        assert 2 * (m.weights + m.gradients) == expected.node
