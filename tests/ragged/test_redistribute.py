"""Redistribution between every pair of layouts: values, counted bytes, and tensors that stay in place."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.comm.cluster import Cluster
from laconic.layout.packing import plan_bucket
from laconic.ragged.redistribute import whole_on
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor, redistribute
from tests.support.launch import on_ranks
from tests.support.owner_bytes import moved_elements
from tests.support.sharded_net import Place, moved

SHAPES = [(7, 5), (11, 3), (), (2, 3, 4), (1,), (13,)]


def layouts(cluster: Cluster) -> dict[str, list[RaggedSpec]]:
    """The same tensors cut in several ways."""
    blocks = {
        "rows": [max(1, shape[-1]) if len(shape) > 1 else 1 for shape in SHAPES],
        "elements": [1] * len(SHAPES),
        "whole": [max(1, torch.Size(shape).numel()) for shape in SHAPES],
    }
    specs = {}
    for name, block in blocks.items():
        names = [f"t{index}" for index in range(len(SHAPES))]
        layout = plan_bucket(names, SHAPES, block, num_shards=cluster.size, itemsize=4)
        specs[name] = [RaggedSpec(cluster=cluster, layout=layout, index=index) for index in range(len(SHAPES))]
    specs["owners"] = [whole_on(spec, (2 * i + 1) % cluster.size) for i, spec in enumerate(specs["rows"])]
    return specs


def values(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [(torch.randn(shape) * 50).to(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def cut(whole: torch.Tensor, spec: RaggedSpec) -> RaggedTensor:
    return RaggedTensor(spec.part_of(whole).clone(), spec)


@on_ranks(6, local=3)
def test_tensors_go_from_every_cut_to_every_cut() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    specs = layouts(cluster)
    whole = values([torch.float32, torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.float32])
    for source in specs.values():
        tensors = [cut(value, spec) for value, spec in zip(whole, source, strict=True)]
        for target in specs.values():
            with moved(cluster) as m:
                results = redistribute(tensors, target).wait()
            for result, value, spec in zip(results, whole, target, strict=True):
                assert isinstance(result, RaggedTensor)
                assert result.spec == spec
                assert result.dtype == value.dtype
                assert torch.equal(result.to_local(), spec.part_of(value))
            want = sum(moved_elements(s, t) * value.itemsize for s, t, value in zip(source, target, whole, strict=True))
            received = torch.tensor(m.snapshot.total(purpose="optimizer", direction="received"))
            sent = torch.tensor(m.snapshot.total(purpose="optimizer", direction="sent"))
            dist.all_reduce(received)
            dist.all_reduce(sent)
            assert int(received) == int(sent) == want
            if source is target:
                assert want == 0
                assert all(map(operator.is_, results, tensors)), "a tensor that stays in place is the same object"
        mixed = [None if index % 2 else spec for index, spec in enumerate(specs["owners"])]
        for result, value, spec in zip(redistribute(tensors, mixed).wait(), whole, mixed, strict=True):
            if spec is None:
                assert type(result) is torch.Tensor
                assert torch.equal(result, value)
            else:
                assert torch.equal(result.to_local(), spec.part_of(value))  # type: ignore[union-attr]


@on_ranks(3, local=1)
def test_several_redistributions_are_under_way_at_once() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    specs = layouts(cluster)
    whole = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in SHAPES]
    tensors = [cut(value, spec) for value, spec in zip(whole, specs["rows"], strict=True)]
    rounds = [redistribute([tensor], [spec]) for tensor, spec in zip(tensors, specs["owners"], strict=True)]
    back = [
        redistribute([r.wait()[0]], [spec])  # type: ignore[list-item]
        for r, spec in zip(rounds, specs["elements"], strict=True)
    ]
    for result, value in zip(back, whole, strict=True):
        assert torch.equal(result.wait()[0].full_tensor(), value)  # type: ignore[union-attr]
    assert torch.equal(redistribute(tensors[:1], [None]).wait()[0], whole[0])
    assert redistribute([], []).wait() == []
    with pytest.raises(ValueError, match=r"shape \(7, 5\) cannot be cut as one of shape \(11, 3\)"):
        redistribute(tensors[:1], specs["rows"][1:2])


def test_moved_elements_by_hand() -> None:
    layout = plan_bucket(["t"], [(4, 2)], [2], num_shards=4, itemsize=8)  # two elements, one row, on each
    spec = RaggedSpec(cluster=Place(1, 4), layout=layout, index=0)  # type: ignore[arg-type]
    assert [layout.extent(0, shard).numel for shard in range(4)] == [2, 2, 2, 2]  # type: ignore[union-attr]
    assert moved_elements(spec, spec) == 0
    assert moved_elements(spec, whole_on(spec, 2)) == 6
    assert moved_elements(whole_on(spec, 2), whole_on(spec, 1)) == 8
