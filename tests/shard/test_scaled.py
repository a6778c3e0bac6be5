"""Weights that are gathered in scaled formats, against the same rounding of whole weights in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import laconic
from laconic.layers.scaled import SCALED_FORMATS
from laconic.layers.scaled_linear import ScaledWeight
from laconic.optim import AdamW8bit
from laconic.partial.patterns import sliced_layer
from laconic.partial.updates import partial_updates
from tests.reference.scaled import rounding
from tests.reference.step import Oracle
from tests.support import sharded_net
from tests.support.launch import on_ranks

NAMES = [f"blocks.{index}.{layer}" for index in range(2) for layer in ("up", "down")]
make = partial(sharded_net.Net, 2, 48, 304)  # three blocks of 128 rows, or one; a block of 128 columns is partial
LR = 0.125  # a power of two: no step depends on how a product and a sum are rounded


def converted(model: nn.Module, weight_format: str, **options: Any) -> nn.Module:
    def is_in_block(_: nn.Module, name: str) -> bool:
        return name in NAMES

    return laconic.convert_to_scaled_training(model, weight_format, module_filter_fn=is_in_block, **options)  # type: ignore[arg-type]


def train_beside_oracle(model: Any, oracle: Oracle, *, exact: bool, steps: int = 2) -> list[sharded_net.Moved]:
    """Train both. Losses are equal to the bit; so are gradients, if `exact`, and else the oracle follows the model."""
    rank, seen = dist.get_rank(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        batches = sharded_net.micro_batches(1, seed=step)
        with sharded_net.moved(model) as moved:
            loss = sharded_net.squared_error(model, batches[0][rank])
            loss.backward()
        seen.append(moved)
        losses, wanted = oracle.gradients(batches)
        assert loss.item() == losses[0][rank].item(), step
        for name, gradient in sharded_net.full_gradients(model).items():
            torch.testing.assert_close(gradient, wanted[name], **({"rtol": 0, "atol": 0} if exact else {}), msg=name)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            masters = sharded_net.full_parameters(model)
            for name, parameter in oracle.parameters().items():
                parameter.copy_(masters[name] if not exact else parameter - LR * wanted[name])
    return seen


@pytest.mark.parametrize(
    ("weight_format", "world", "local", "options"),
    [
        ("fp8_128x128", 3, 1, {}),
        ("mxfp8", 2, 2, {"reshard_after_forward": False}),
        ("nvfp4", 2, 1, {"cache": "host", "offload_policy": CPUOffloadPolicy()}),
    ],
)
@on_ranks("world", local="local")
def test_losses_are_those_of_whole_weights(weight_format: str, world: int, local: int, options: dict[str, Any]) -> None:
    rounded = rounding(sharded_net.build(make), weight_format, NAMES)
    oracle = Oracle(rounded, sharded_net.squared_error, num_nodes=world // local, num_local=local)
    model: Any = sharded_net.shard(converted(sharded_net.build(make), weight_format), **options)
    seen = train_beside_oracle(model, oracle, exact=world != 3, steps=1 if world == 3 else 2)
    packed = [bucket for bucket in sharded_net.buckets(*model.blocks) if bucket.form.is_packed]
    assert packed
    scaled, nodes = SCALED_FORMATS[weight_format], world // local
    for bucket in packed:
        slots, layout = bucket.layout.slots, bucket.layout
        bytes_of_value = max(scaled.nbytes(slot.shape) / slot.numel for slot in slots)
        least = sum(scaled.nbytes(slot.shape) for slot in slots) / world
        assert least <= bucket.form.geometry.numel <= layout.shard_numel * bytes_of_value + 32 * len(slots)
        assert bucket.node_shard.nbytes == nodes * bucket.form.geometry.numel * ("cache" in options), (
            "the cache has few bits"
        )
    gathers = 2 - ("cache" in options or "reshard_after_forward" in options)
    of_blocks, of_root = sharded_net.buckets(*model.blocks), model._laconic_unit.buckets
    crossing = [
        (nodes - 1) * each.form.geometry.numel * each.form.dtype.itemsize for each in of_blocks * gathers + of_root
    ]
    assert seen[-1].weights == sum(crossing)
    if options.get("reshard_after_forward", True):
        sharded_net.assert_nothing_gathered(model)


@pytest.mark.parametrize(
    ("world", "local", "options"),
    [
        (3, 1, {}),
        (2, 2, {"reshard_after_forward": False}),
        pytest.param(4, 2, {"cache": "host", "offload_policy": CPUOffloadPolicy()}, marks=pytest.mark.heavy),
        pytest.param(5, 1, {"cache": "rank"}, marks=pytest.mark.heavy),
    ],
)
@on_ranks("world", local="local")
def test_ranks_may_share_blocks(world: int, local: int, options: dict[str, Any]) -> None:
    """Losses are those of whole weights, and codes are gathered without padding, in their places."""
    rounded = rounding(sharded_net.build(make), "fp8_128x128", NAMES)
    oracle = Oracle(rounded, sharded_net.squared_error, num_nodes=world // local, num_local=local)
    shared = converted(sharded_net.build(make), "fp8_128x128", shares_blocks=True)
    model: Any = sharded_net.shard(shared, **options)
    train_beside_oracle(model, oracle, exact=world == 2, steps=1 if world in (3, 5) else 2)
    of_blocks = sharded_net.buckets(*model.blocks)
    in_codes = [bucket for bucket in of_blocks if bucket.form.dtype == torch.float8_e4m3fn]
    assert len(in_codes) == 2
    assert not any(bucket.form.is_packed for bucket in in_codes), "the gathered codes are views"
    assert all(bucket.layout.padding < 16 * world for bucket in in_codes)
    for bucket in in_codes:
        assert bucket.node_shard.nbytes == (world // local) * bucket.form.geometry.numel * ("cache" in options)


@on_ranks(2, local=1)
def test_inputs_may_stay_exact_and_frozen_weights_cross_once() -> None:
    plain = make()
    oracle = rounding(plain, "nvfp4", NAMES, rounds_input=False)
    model = converted(make(), "nvfp4", scales_input=False)
    model.load_state_dict(plain.state_dict())
    model.blocks.requires_grad_(False)  # type: ignore[union-attr]
    sharded: Any = sharded_net.shard(model, cache="host")
    batch = sharded_net.inputs(0, 0)
    for step in range(2):
        with sharded_net.moved(sharded) as moved:
            sharded_net.squared_error(sharded, batch).backward()
        assert bool(moved.weights) == (step == 0)
        assert torch.equal(sharded(batch[0]), oracle(batch[0]))
        sharded.zero_grad()


@on_ranks(3, local=1)
def test_a_layout_that_would_cut_blocks_is_refused() -> None:
    def shard(granularity: Any, weight_format: str = "fp8_128x128") -> Any:
        return sharded_net.shard(converted(make(), weight_format), granularity=granularity)

    for granularity in (laconic.rows(64), AdamW8bit.granularity, {"*": laconic.elements(128 * 48 + 1)}):
        with pytest.raises(ValueError, match=r"granularity of up.weight is .* which cuts its blocks of 6144: .*Leave"):
            shard(granularity)
    for granularity in (laconic.rows(256), laconic.whole(), {"other": laconic.rows(1), "*.bias": laconic.elements(2)}):
        slots = [slot for bucket in sharded_net.buckets(*shard(granularity).blocks) for slot in bucket.layout.slots]
        matrices = [slot for slot in slots if len(slot.shape) > 1]
        assert all(slot.block == slot.numel or slot.block % (128 * slot.shape[1]) == 0 for slot in matrices)
    AdamW8bit(shard(laconic.rows(128)).parameters())  # both keep their tiles


@on_ranks(2, local=1)
def test_weights_that_another_axis_cuts_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(16, 32)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"weight of 0 is cut over ranks already; call convert_to_scaled_training bef"):
        laconic.convert_to_scaled_training(nn.Sequential(layer), "mxfp8")
    layer = nn.Linear(16, 32)
    local = ScaledWeight(torch.zeros(16, 16), SCALED_FORMATS["mxfp8"])
    layer.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    with pytest.raises(NotImplementedError, match=r"converts itself before the gather .* cut by another parallelism"):
        laconic.fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"is cut over ranks already"):
        laconic.convert_to_scaled_training(sharded_net.shard(make()), "mxfp8")
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(ValueError, match=r"weight that trains in few bits is cut by laconic.fully_shard alone"):
            parallelize_module(converted(make(), "mxfp8").blocks[0].up, mesh["tp"], style)  # type: ignore[arg-type,union-attr]


def test_weights_in_few_bits_are_not_sliced() -> None:
    mlp = sliced_layer(sharded_net.Block, kind="mlp", rows=["up"], columns=["down"])
    with pytest.raises(ValueError, match=r"weight is a ScaledWeight, .* leave it out of convert_to_scaled_training"):
        partial_updates(converted(make(), "mxfp8"), slice_index=0, num_slices=2, include=["mlp"], patterns=[mlp])
