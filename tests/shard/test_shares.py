"""`fully_shard(shares=)`: shards in proportion to the memory of ranks, and nothing else changes.

Sums have the order of equal shards, element by element, so losses and weights have the same bits. What sums over
shards, as the norm of gradients, adds up in another order.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import laconic
from laconic import Cache, Checks, CorruptionError, LocalSteps
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.errors import RanksDifferError
from laconic.optim import Muon, matrices_and_rest
from laconic.shard.bucket import Bucket
from tests.reference.gather import shard_of
from tests.shard.test_conversion import BF16InChunks
from tests.shard.test_scaled import converted, make
from tests.support import sharded_net
from tests.support.flips import Flip, flipping
from tests.support.launch import on_ranks, run_ranks
from tests.support.scenario import Scenario, adamw, assert_equals_oracle, assert_same_bits
from tests.support.sharded_net import buckets, build, full_parameters, shard, train_step

SHARES = [3.0, 1.0, 2.5, 2.0, 7.0, 0.5]
"""The shares of as many ranks as a mesh has."""
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def lora() -> nn.Module:
    """Blocks that are frozen but for their `down`: two kinds of buckets in each."""
    net = sharded_net.Net()
    for block in net.blocks:
        block.up.requires_grad_(False)
    return net


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(local=2, cache="host", precision=HALF, make=lora),
        Scenario(cache=Cache(where="device", gradients="rank"), micro_batches=2, optimizer=adamw),
        Scenario(nodes=4, islands=2),
    ],
)
def test_unequal_shards_train_as_equal_ones_to_the_bit(scenario: Scenario) -> None:
    """Random trees have shares, too, and are compared with the unsharded model."""
    shares = SHARES[: scenario.nodes * scenario.local // scenario.islands]
    (equal, *_), (other, *_) = (replace(scenario, options={"shares": each}).run() for each in (None, shares))
    assert_same_bits(equal, other)


def under_local_steps(shares: Sequence[float] | None) -> dict[str, Tensor]:
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=2)
    model = shard(build(), mesh=mesh, shares=shares)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    local = LocalSteps(model, optimizer, mesh=mesh, every=2, codec="fp32")
    for step in range(2):
        sharded_net.squared_error(model, sharded_net.inputs(step, dist.get_rank())).backward()
        local.step()
        local.zero_grad()
    return full_parameters(model)


def with_owners_of_matrices(shares: Sequence[float] | None) -> dict[str, Tensor]:
    model = shard(build(), shares=shares, cache="host")
    optimizer = Muon(matrices_and_rest(model), lr=0.05)
    for step in range(2):
        train_step(model, optimizer, step)
    return full_parameters(model)


def in_scaled_formats(shares: Sequence[float] | None) -> dict[str, Tensor]:
    """Packed shards: messages of one length, whose sections are as long as a rank's blocks need."""
    model: Any = shard(converted(build(make), "fp8_1x128"), cache="host", shares=shares)
    assert any(bucket.form.is_packed and (bucket.layout.stops or not shares) for bucket in buckets(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    losses = {str(step): train_step(model, optimizer, step) for step in range(2)}
    return losses | full_parameters(model)


def beside_tensor_parallelism(shares: Sequence[float] | None) -> dict[str, Tensor]:
    """Ranks hold halves of a matrix by tensor parallelism, and shares cut each half."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(14, 22, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    laconic.fully_shard(model, mesh=mesh["dp"], shares=shares)
    optimizer = Muon(model.parameters(), lr=0.05)
    [bucket] = buckets(model)
    [parameter], extent = bucket.sharded, bucket.stored.specs[0].extent
    assert extent is not None
    for _ in range(2):
        whole = distribute_tensor(torch.randn(22, 14), mesh["tp"], [Shard(0)]).to_local()
        parameter.grad = parameter.like(whole.reshape(-1)[extent.start : extent.stop].clone())  # type: ignore[attr-defined]
        optimizer.step()
    return full_parameters(model)


@pytest.mark.parametrize(
    ("run", "shares"),
    [
        (under_local_steps, [1, 3]),
        (with_owners_of_matrices, SHARES[:4]),
        (in_scaled_formats, SHARES[:4]),
        (beside_tensor_parallelism, [1, 4]),
    ],
)
@on_ranks(4, local=2)
def test_what_works_on_shards_has_the_bits_of_equal_ones(run: Any, shares: list[float]) -> None:
    equal, other = run(None), run(shares)
    for name, value in equal.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("nodes", "local", "cache", "of_root", "of_blocks"), [(2, 2, "none", 2, 4), (3, 1, "host", 1, 1)]
)
def test_bytes_gradients_and_norms(nodes: int, local: int, cache: str, of_root: int, of_blocks: int) -> None:
    """Two micro-batches: gathers and sums inside the node run in each, those across nodes as the cache says."""
    options = {"shares": SHARES[: nodes * local]}
    scenario = Scenario(nodes=nodes, local=local, cache=cache, micro_batches=2, max_norm=0.1, steps=1, options=options)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    for rank in runs:
        root, blocks = rank.model._laconic_unit.buckets, buckets(rank.model.blocks)
        for level, purpose, which in (
            ("node", "weights", [*root * of_root, *blocks * of_blocks]),
            ("local", "weights", [*root * 2, *blocks * 4]),
            ("node", "gradients", [*root, *blocks]),
            ("local", "gradients", [*root, *blocks] * 2),
        ):
            for direction in ("sent", "received"):
                found = rank.sent[0].snapshot.total(level, purpose, direction)  # type: ignore[arg-type]
                expected = sum(_bytes_of(bucket, level, purpose)[direction] for bucket in which)
                assert found == expected, (level, direction, purpose)


def _bytes_of(bucket: Bucket, level: str, purpose: str) -> dict[str, int]:
    """The bytes of one gather or one reduction of a bucket out of this rank and into it."""
    n, loc = bucket.cluster.num_nodes, bucket.cluster.num_local
    sizes = [bucket.layout.size(shard) for shard in range(n * loc)]
    node, place = bucket.cluster.node_rank, bucket.cluster.local_rank
    peers = sizes[place * n : (place + 1) * n]
    ranks, own, whole = (n, peers[node], sum(peers)) if level == "node" else (loc, sum(peers), sum(sizes))
    alike, others = 4 * (ranks - 1) * own, 4 * (whole - own)  # to each other rank this one's part; all other parts
    return {"sent": alike, "received": others} if purpose == "weights" else {"sent": others, "received": alike}


@on_ranks(4, local=2)
def test_audits_are_quiet_and_checks_find_damage() -> None:
    model: Any = shard(build(), shares=SHARES[:4])
    laconic.audit(model, sharded_net.inputs(1, dist.get_rank()), sharded_net.squared_error)
    checks = Checks(interval=1, on_damage="regather", unnoticed_edits=True)
    model = shard(build(lora), cache="host", shares=SHARES[:4], checks=checks)
    train_step(model)
    damaged = next(bucket for bucket in buckets(model.blocks) if bucket.stored.is_frozen)
    assert damaged.layout.stops
    kept = damaged.node_shard.kept()
    begin = damaged.layout.start(damaged.geometry.peers.start) - damaged.layout.start(damaged.cluster.shard_index)
    other = 0 if begin else damaged.layout.size(damaged.cluster.shard_index)  # an element of the other node's shard
    if dist.get_rank() == 1:
        kept[other].mul_(3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train_step(model)
        dist.barrier()
    assert dist.get_rank() or any("are gathered again" in str(each.message) for each in seen)
    model = shard(build(), shares=SHARES[:4], checks=Checks(interval=1))
    for purpose, level in (("weights", "node"), ("gradients", "local")):
        flip = Flip(rank=1, purpose=purpose, level=level, bit=15)  # type: ignore[arg-type]
        with flipping(flip), pytest.raises(CorruptionError, match="rank 1"):
            train_step(model)
        model.reset_iter_state()
        model.zero_grad()


# -- states ------------------------------------------------------------------------------------------------------------


@on_ranks(4, local=2)
def test_weights_gradients_and_states_take_memory_as_the_shares_say() -> None:
    """The cache rests in host memory."""
    shares = [24, 24, 12, 12]
    model = shard(build(partial(sharded_net.Net, 5, 192, 500)), shares=shares, cache="host")
    optimizer = torch.optim.AdamW(model.parameters())
    sharded_net.accumulate(model, sharded_net.micro_batches(1))
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values() if hasattr(each, "to_local")]
    weights = list(model.parameters())
    held = [
        *(sum(each.to_local().nbytes for each in tensors) for tensors in (weights, [p.grad for p in weights], states)),
        model.memory().device_bytes,
    ]
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, held)
    for of_ranks in zip(*by_rank, strict=True):
        for nbytes, share in zip(of_ranks, shares, strict=True):
            assert nbytes == pytest.approx(sum(of_ranks) * share / sum(shares), rel=0.03), by_rank


def _job_of_checkpoint(shares: Sequence[float] | None, folder: str, step: int) -> dict[str, Tensor]:
    model = shard(build(seed=step), cache="host", shares=shares)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if step:
        load_checkpoint(folder, model=model, optimizer=optimizer)
    sharded_net.squared_error(model, sharded_net.inputs(7, 0)).backward()  # the same batch for any number of ranks
    optimizer.step()
    save_checkpoint(folder, step + 1, model=model, optimizer=optimizer, extra={})
    return {name: value.detach() for name, value in full_parameters(model).items()}


def test_a_checkpoint_of_unequal_shards_loads_on_other_ones(tmp_path: Path) -> None:
    """3 ranks unequal -> 2 otherwise unequal, beside a run of equal ones from beginning to end."""
    sizes: list[Any] = [(3, 1, [3, 1, 2]), (2, 1, [1, 2])]
    for step, (world, local, shares) in enumerate(sizes):
        found = run_ranks(_job_of_checkpoint, world, shares, str(tmp_path), step, local=local)[0]
    always = Scenario(nodes=1, steps=2, optimizer=adamw, batch=lambda step, rank: sharded_net.inputs(7, 0))
    torch.testing.assert_close(found, always.run()[0].parameters)


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(4, local=2)
def test_shares_belong_to_ranks() -> None:
    """The order is that of ranks, though a bucket's is another one; equal shares are equal shards."""
    model = shard(build(), shares=[40, 30, 20, 10])
    sizes: list[int] = [0] * 4
    dist.all_gather_object(sizes, sum(bucket.shard.numel() for bucket in buckets(model)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(4 * sizes[3], rel=0.1)
    (bucket, *_) = buckets(model)
    for node, place in itertools.product(range(2), range(2)):
        assert bucket.layout.size(shard_of((node, place), 2)) <= 0.42 * bucket.layout.numel
    assert all(bucket.layout.stops == () for bucket in buckets(shard(build(), shares=[7.5] * 4)))


@on_ranks(2)
def test_shares_that_make_no_sense_are_refused() -> None:
    for shares, message in (
        ([1], r"shares=\[1\] must have one number for each of the 2 ranks of the mesh"),
        ([1, 2, 3], "must have one number for each of the 2 ranks"),
        ([1, 0], r"shares=\[1, 0\]\) must be a positive number"),
        ([1, float("nan")], "must be a positive number"),
        ([1, "2"], "must be a list of numbers, one for each rank of an island"),
        ("12", "must be a list of numbers"),
        ([], "must be a list of numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            laconic.fully_shard(nn.Linear(3, 5), shares=shares)  # type: ignore[arg-type]
    model = shard(build(), shares=[1, 2 + dist.get_rank()])
    with pytest.raises(RanksDifferError, match=r"rank 1 differs from rank 0.*layout"):
        train_step(model)


@on_ranks(2)
def test_what_has_no_shares() -> None:
    """Experts, cut over a mesh of their own, beside parameters that all ranks share; conversions in equal chunks."""
    meshes = [laconic.init_mesh("cpu"), init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "rest"))["rest"]]

    class Placed:
        def __init__(self) -> None:
            self.placement, self.mesh_info = Shard(0), self
            self.mesh = meshes[1]

    with pytest.raises(ValueError, match=r"shard_placement_fn cuts weight over 1 ranks of another mesh; leave shares"):
        laconic.fully_shard(nn.Linear(3, 5), mesh=meshes[0], shares=[1, 2], shard_placement_fn=lambda _: Placed())
    model: Any = build()
    model.out.weight = nn.Parameter(BF16InChunks(model.out.weight.detach()))
    with pytest.raises(NotImplementedError, match=r"does not go with out.weight, whose conversion needs FSDP2's"):
        shard(model, shares=[1, 2])
