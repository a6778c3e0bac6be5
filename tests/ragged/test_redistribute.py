"""Redistribution between every pair of layouts: values, counted bytes, and tensors that stay in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch

import laconic
from laconic.comm.cluster import Cluster
from laconic.layout.bucket import row_block
from laconic.ragged.redistribute import Redistribution, TransferPlan, whole_on
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import on_ranks
from tests.support.owner_bytes import moved_elements, sum_over_ranks
from tests.support.sharded_net import moved, part_of, specs_of

SHAPES = [(7, 5), (11, 3), (), (2, 3, 4), (1,), (13,)]


def layouts(cluster: Cluster) -> dict[str, list[RaggedSpec]]:
    """The same tensors cut in several ways."""
    whole = [torch.Size(shape).numel() for shape in SHAPES]
    blocks = {"rows": list(map(row_block, SHAPES)), "elements": [1] * len(SHAPES), "whole": whole}
    specs = {name: specs_of(SHAPES, cluster, block) for name, block in blocks.items()}
    specs["owners"] = [whole_on(spec, (2 * i + 1) % cluster.size) for i, spec in enumerate(specs["rows"])]
    return specs


def values(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [(torch.randn(shape) * 50).to(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def started(tensors: Sequence[RaggedTensor], targets: Sequence[RaggedSpec]) -> Redistribution:
    plan = TransferPlan([tensor.spec for tensor in tensors], targets)
    return plan.start([tensor._local_tensor for tensor in tensors])


@on_ranks(6, local=3)
def test_tensors_go_from_every_cut_to_every_cut() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    specs = layouts(cluster)
    whole = values([torch.float32, torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.float32])
    for source in specs.values():
        tensors = [part_of(value, spec) for value, spec in zip(whole, source, strict=True)]
        for target in specs.values():
            with moved(cluster) as m:
                results = started(tensors, target).wait()
            for result, value, spec in zip(results, whole, target, strict=True):
                assert result.dtype == value.dtype
                assert torch.equal(result, spec.part_of(value))
            want = sum(moved_elements(s, t) * value.itemsize for s, t, value in zip(source, target, whole, strict=True))
            received, sent = (m.snapshot.total(purpose="optimizer", direction=each) for each in ("received", "sent"))
            assert sum_over_ranks(received) == sum_over_ranks(sent) == want
            if source is target:
                assert want == 0
                own = [tensor._local_tensor for tensor in tensors]
                assert all(map(operator.is_, results, own)), "a part that stays in place is the same object"


@on_ranks(3, local=1)
def test_several_redistributions_are_under_way_at_once() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    specs = layouts(cluster)
    whole = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in SHAPES]
    tensors = [part_of(value, spec) for value, spec in zip(whole, specs["rows"], strict=True)]
    rounds = [started([tensor], [spec]) for tensor, spec in zip(tensors, specs["owners"], strict=True)]
    owned = [RaggedTensor(each.wait()[0], spec) for each, spec in zip(rounds, specs["owners"], strict=True)]
    back = [started([tensor], [spec]) for tensor, spec in zip(owned, specs["elements"], strict=True)]
    for result, value, spec in zip(back, whole, specs["elements"], strict=True):
        assert torch.equal(RaggedTensor(result.wait()[0], spec).full_tensor(), value)
    with pytest.raises(ValueError, match=r"shape \(7, 5\) cannot be cut as one of shape \(11, 3\)"):
        started(tensors[:1], specs["rows"][1:2])
