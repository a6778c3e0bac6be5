"""A tensor with entries per block lies where the blocks lie, and is a RaggedTensor like any other."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laconic
from laconic.layout.bucket import DerivedLayout, Extent
from laconic.layout.packing import plan_bucket
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import run_ranks


@settings(max_examples=100, deadline=None)
@given(
    runs=st.integers(1, 12),
    rest=st.integers(0, 5),
    elements=st.integers(1, 6),
    items=st.integers(1, 4),
    before=st.integers(0, 30),
    num_shards=st.integers(1, 7),
)
def test_entries_follow_their_elements(
    runs: int, rest: int, elements: int, items: int, before: int, num_shards: int
) -> None:
    """The rank that holds a run of elements holds the entries of the run; the last run may be shorter."""
    numel = max(1, (runs - 1) * elements + 1 + rest % elements)
    base = plan_bucket(["a", "t"], [(before,), (numel,)], [1, elements], num_shards=num_shards, itemsize=16)
    count = -(-numel // elements)
    layout = DerivedLayout(base=base, index=1, shape=(count, items), elements=elements, items=items)
    owner = {}
    for shard in range(num_shards):
        extent = base.extent(1, shard) or Extent(0, 0)
        owner |= dict.fromkeys(range(extent.start, extent.stop), shard)
    for shard in range(num_shards):
        expected = [
            run * items + item for run in range(count) if owner[run * elements] == shard for item in range(items)
        ]
        extent = layout.extent(0, shard) or Extent(0, 0)
        assert list(range(extent.start, extent.stop)) == expected
        assert not expected or shard in layout.holders(0)


@pytest.mark.parametrize(
    ("shape", "block", "elements", "remedy"),
    [((12, 5), 5, 20, r"rows\(4\)"), ((60,), 1, 20, r"elements\(20\)"), ((12, 5), 5, 12, r"elements\(12\)")],
)
def test_a_cut_inside_a_block_is_refused(shape: tuple[int, ...], block: int, elements: int, remedy: str) -> None:
    base = plan_bucket(["weight"], [shape], [block], num_shards=5, itemsize=16)
    with pytest.raises(
        ValueError, match=rf"weight of shape .* blocks? of {elements} elements .*granularity=laconic\.{remedy}"
    ):
        DerivedLayout(base=base, index=0, shape=(60 // elements,), elements=elements, items=1)


def _scales(runs: int, items: int) -> tuple[RaggedTensor, Tensor]:
    """The (runs, items) entries of a (7 runs, 3) tensor, cut over the mesh, and the same entries as a plain tensor."""
    from laconic.comm.cluster import Cluster

    cluster = Cluster.of(laconic.init_mesh("cpu"))
    base = plan_bucket(["a", "w"], [(5,), (7 * runs, 3)], [1, 21], num_shards=cluster.size, itemsize=4)
    layout = DerivedLayout(base=base, index=1, shape=(runs, items), elements=21, items=items)
    spec = RaggedSpec(cluster=cluster, layout=layout, index=0)
    whole = torch.arange(runs * items, dtype=torch.float32).view(runs, items) + 1
    return RaggedTensor(spec.part_of(whole).clone(), spec), whole


def _use(folder: str) -> tuple[bool, ...]:
    scales, whole = _scales(5, 2)
    doubled = torch.zeros_like(scales).copy_(scales).mul_(2)
    twin = copy.deepcopy(scales)
    twin.zero_()
    dcp.save({"scales": scales}, checkpoint_id=folder)
    dcp.load({"scales": twin}, checkpoint_id=folder)
    return (
        torch.equal(scales.full_tensor(), whole),
        torch.equal(doubled.full_tensor(), 2 * whole),
        torch.equal(twin.full_tensor(), whole),
        bool(torch.linalg.vector_norm(scales) == torch.linalg.vector_norm(whole)),
    )


def _load(folder: str) -> bool:
    scales, whole = _scales(5, 2)
    scales.zero_()
    dcp.load({"scales": scales}, checkpoint_id=folder)
    return torch.equal(scales.full_tensor(), whole)


def test_entries_are_gathered_copied_and_saved_like_any_tensor(tmp_path: Path) -> None:
    """Through torch's checkpoints to another number of ranks, some of which hold nothing."""
    assert run_ranks(_use, 3, str(tmp_path), local=1) == [(True, True, True, True)] * 3
    assert run_ranks(_load, 6, str(tmp_path), local=3) == [True] * 6
