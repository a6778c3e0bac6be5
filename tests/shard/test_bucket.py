from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from laconic.layout.bucket import row_block
from laconic.layout.packing import plan_bucket
from laconic.shard.bucket import Bucket, ManagedParameter
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Wire
from tests.reference import gather as reference
from tests.support.sharded_net import Block, Place, account, build, places


def bucket_of(module: nn.Module, place: Place, *, compute_dtype: torch.dtype = torch.float32) -> Bucket:
    cluster: Any = place
    managed = [
        ManagedParameter(
            name=name,
            parameter=parameter,
            cluster=cluster,
            places=[(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])],
        )
        for name, parameter in module.named_parameters()
    ]
    shapes = [tuple(item.parameter.shape) for item in managed]
    layout = plan_bucket(
        [item.name for item in managed],
        shapes,
        [row_block(shape) for shape in shapes],
        num_shards=place.size,
        itemsize=compute_dtype.itemsize,
    )
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype)
    return Bucket(managed, layout, precision=precision, offload=OffloadPolicy(), wire=Wire())


def fill_full(bucket: Bucket, shards: list[Tensor]) -> None:
    bucket.full.allocate().copy_(torch.cat(shards))


@pytest.mark.parametrize(("num_nodes", "num_local"), [(1, 1), (3, 1), (1, 3), (3, 2), (2, 3)])
def test_shards_in_order_make_the_bucket_and_gathered_parameters_are_its_views(num_nodes: int, num_local: int) -> None:
    want = dict(build(Block).named_parameters())
    ranks = places(num_nodes, num_local)
    modules = [build(Block) for _ in ranks]
    made = [bucket_of(module, place) for module, place in zip(modules, ranks, strict=True)]
    shards = {(b.cluster.node_rank, b.cluster.local_rank): b.shard for b in made}
    account(made[0])
    made[0].full.allocate().copy_(reference.gather(shards))
    made[0].full.show()
    full = made[0].full.allocate()
    for name, parameter in modules[0].named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, want[name])
        assert parameter.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    for bucket in made:  # the gather across nodes lands in this rank's node shard, which contains its shard
        account(bucket)
        fill_full(bucket, [b.shard for b in made])
        node_shard = bucket.full.node_shard()
        assert torch.equal(node_shard, reference.node_shard_of(full, bucket.cluster.local_rank, num_local))
        assert torch.equal(bucket.own_part(node_shard), bucket.shard)
        assert node_shard.numel() == bucket.node_shard_numel


def test_shards_start_on_sixteen_bytes_in_the_smallest_dtype() -> None:
    bucket = bucket_of(build(Block), Place(3, 1), compute_dtype=torch.bfloat16)
    assert bucket.layout.shard_numel * 2 % 16 == 0
    assert bucket.shard.dtype == torch.float32
    assert bucket.compute_dtype == bucket.reduce_dtype == torch.bfloat16


def test_sharded_parameters_are_views_of_the_shard() -> None:
    bucket = bucket_of(build(Block), Place(2, 1))
    bucket.shard.fill_(7)
    for parameter in bucket.sharded:
        assert parameter.to_local().eq(7).all()  # type: ignore[attr-defined]


def test_every_kind_of_edit_changes_the_version() -> None:
    bucket = bucket_of(build(Block), Place(2, 1))
    parameter: Any = bucket.sharded[0]
    edits = [
        lambda: parameter.mul_(2),
        lambda: parameter.data.add_(1),
        lambda: parameter.detach().zero_(),
        lambda: parameter.to_local().fill_(3),
        lambda: parameter.copy_(torch.ones(parameter.shape)),
        lambda: parameter.normal_(),
        lambda: torch._foreach_add_([parameter], 1.0),
        lambda: bucket.shard.add_(1),
    ]
    with torch.no_grad():
        for edit in edits:
            before = bucket.version
            edit()
            assert bucket.version != before
        before = bucket.version
        _ = parameter + 1, parameter.detach(), parameter.clone(), parameter.to_local().sum()
        assert bucket.version == before


def test_an_edit_of_an_empty_part_changes_the_version() -> None:
    """Ranks that hold nothing of a tensor must agree with the others whether it is stale."""
    bucket = bucket_of(nn.Linear(3, 1), Place(4, 1, node_rank=3))
    parameter: Any = bucket.sharded[0]
    assert parameter.extent is None
    for edit in (parameter.detach().zero_, parameter.to_local().zero_):
        before = bucket.version
        edit()
        assert bucket.version != before


def test_gathering_into_the_full_buffer_is_no_edit_and_editing_it_is_refused() -> None:
    module = build(Block)
    bucket = bucket_of(module, Place())
    account(bucket)
    fill_full(bucket, [bucket.shard])
    bucket.full.show()
    fill_full(bucket, [bucket.shard])
    bucket.full.hide()
    bucket.full.show()
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"up.weight.* edited in place"):
        bucket.full.hide()
    assert module.up.weight is bucket.sharded[0]


def test_views_survive_freeing_and_come_back() -> None:
    modules = [build(Block), build(Block)]
    made = [bucket_of(module, place) for module, place in zip(modules, places(2, 1), strict=True)]
    bucket, shards = made[0], [b.shard for b in made]
    ledger = account(bucket)
    fill_full(bucket, shards)
    bucket.full.show()
    view = modules[0].up.weight
    full_bytes = 4 * bucket.layout.numel
    assert ledger.device_bytes == bucket.shard.nbytes + full_bytes
    bucket.full.free()
    bucket.full.free()
    assert ledger.device_bytes == bucket.shard.nbytes
    assert view.untyped_storage().nbytes() == 0
    fill_full(bucket, shards)
    assert torch.equal(view, build(Block).up.weight)
    assert ledger.device_peak_bytes == bucket.shard.nbytes + full_bytes


def test_on_one_rank_the_shard_is_the_bucket() -> None:
    module = build(Block)
    bucket = bucket_of(module, Place())
    ledger = account(bucket)
    bucket.full.allocate()
    bucket.full.show()
    assert ledger.device_peak_bytes == bucket.shard.nbytes
    assert module.up.weight.data_ptr() == bucket.shard.data_ptr()
    bucket.full.free()
    bucket.full.hide()
    assert torch.equal(module.up.weight.to_local(), build(Block).up.weight.flatten())


def test_a_replaced_parameter_is_refused() -> None:
    module = build(Block)
    bucket = bucket_of(module, Place())
    account(bucket)
    fill_full(bucket, [bucket.shard])
    module.up.weight = nn.Parameter(torch.zeros(29, 17))
    with pytest.raises(RuntimeError, match=r"up.weight is no longer the one fully_shard made.*param.copy_"):
        bucket.full.show()


def test_gathered_parameters_follow_requires_grad() -> None:
    module = build(Block)
    bucket = bucket_of(module, Place())
    account(bucket)
    fill_full(bucket, [bucket.shard])
    bucket.sharded[0].requires_grad_(False)
    bucket.full.show()
    assert [p.requires_grad for p in module.parameters()] == [False, True, True, True]
    assert not bucket.is_frozen
    for parameter in bucket.sharded:
        parameter.requires_grad_(False)
    assert bucket.is_frozen


def test_a_move_and_a_cast_keep_parameters_but_a_cached_bucket_refuses_a_cast() -> None:
    module = build(Block)
    bucket = bucket_of(module, Place(2, 1))
    account(bucket)
    parameter, before = bucket.sharded[0], bucket.version
    bucket.stored.convert(lambda tensor: tensor.clone())
    assert bucket.sharded[0] is parameter
    assert bucket.version != before
    assert parameter.to_local().untyped_storage().data_ptr() == bucket.shard.untyped_storage().data_ptr()  # type: ignore[attr-defined]
    before = bucket.version
    bucket.stored.convert(lambda tensor: tensor)
    assert bucket.version == before
    bucket.stored.convert(lambda tensor: tensor.half())
    assert bucket.sharded[0] is parameter
    assert parameter.dtype is torch.float16
    assert bucket.version != before
    bucket.node_shard.stay_on_device()
    with pytest.raises(ValueError, match=r"from torch.float16 to torch.float32 after the first forward"):
        bucket.stored.convert(lambda tensor: tensor.float())


def test_meta_parameters_become_real_ones() -> None:
    with torch.device("meta"):
        module = Block()
    bucket = bucket_of(module, Place(2, 1))
    parameter = bucket.sharded[0]
    assert parameter.is_meta
    bucket.stored.convert(lambda tensor: torch.empty_like(tensor, device="cpu"))
    assert module.up.weight is bucket.sharded[0] is parameter
    assert parameter.device.type == "cpu"
    assert parameter.to_local().device.type == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_slab", [False, True])
def test_a_frozen_shard_lives_in_its_node_shard_until_it_trains(in_slab: bool) -> None:
    module = build(Block).requires_grad_(False)
    bucket = bucket_of(module, Place(2, 1, node_rank=1))
    ledger = account(bucket)
    bucket.node_shard.stay_on_device()
    if in_slab:
        bucket.node_shard.stay_in_slab(torch.zeros(bucket.node_shard.nbytes, dtype=torch.uint8))
    bucket.own_part(bucket.node_shard.buffer()).copy_(bucket.shard)
    want, parameter, version = bucket.shard.clone(), bucket.sharded[0], bucket.version
    rest_bytes = 0 if in_slab else bucket.node_shard.nbytes
    bucket.stored.drop()
    bucket.stored.drop()
    assert bucket.stored.is_dropped
    assert ledger.device_bytes == rest_bytes
    assert bucket.version == version
    assert torch.equal(bucket.shard, want)
    assert bucket.shard.untyped_storage().data_ptr() == bucket.node_shard.buffer().untyped_storage().data_ptr()
    assert bucket.sharded[0] is parameter
    with torch.no_grad():
        parameter.add_(1)
    assert bucket.version != version
    bucket.stored.restore()
    assert ledger.device_bytes == rest_bytes + bucket.shard.nbytes
    assert torch.equal(parameter.to_local(), want[: parameter.to_local().numel()] + 1)  # type: ignore[attr-defined]
    assert bucket.shard.untyped_storage().data_ptr() != bucket.node_shard.buffer().untyped_storage().data_ptr()


def test_a_shard_is_not_dropped_into_a_node_shard_of_another_dtype() -> None:
    bucket = bucket_of(build(Block).requires_grad_(False), Place(2, 1), compute_dtype=torch.bfloat16)
    account(bucket)
    bucket.node_shard.stay_on_device()
    bucket.stored.drop()
    assert not bucket.stored.is_dropped


def test_a_ledger_keeps_the_peak_until_it_is_reset() -> None:
    ledger = Ledger()
    ledger.hold(10)
    ledger.hold(30)
    ledger.hold(-25)
    assert (ledger.device_bytes, ledger.device_peak_bytes) == (15, 40)
    ledger.reset_peak()
    assert ledger.device_peak_bytes == 15
