"""The places of tensors in a bucket, and layouts that follow from a parameter's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.layout.bucket import BucketLayout, Extent, RunsLayout, boxes, derived, row_block
from laconic.layout.packing import plan_bucket

SHAPE = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def plan(shapes: list[tuple[int, ...]], num_shards: int, itemsize: int = 4) -> BucketLayout:
    names = [str(i) for i in range(len(shapes))]
    blocks = [row_block(shape) for shape in shapes]
    return plan_bucket(names, shapes, blocks, num_shards=num_shards, itemsize=itemsize)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5), st.integers(1, 7))
def test_extents_partition_every_tensor_and_lie_where_the_bucket_has_it(
    shapes: list[tuple[int, ...]], num_shards: int
) -> None:
    """Writing tensors into a bucket and cutting it into shards is the same as writing extents into shards."""
    layout = plan(shapes, num_shards)
    bucket, shards = torch.zeros(layout.numel), torch.zeros(num_shards, layout.shard_numel)
    for index, slot in enumerate(layout.slots):
        value = 1 + torch.arange(slot.numel, dtype=torch.float32) + 1000 * index
        bucket[slot.offset : slot.offset + slot.numel] = value
        extents = [layout.extent(index, shard) for shard in range(num_shards)]
        covered = [i for extent in extents if extent for i in range(extent.start, extent.stop)]
        assert covered == list(range(slot.numel))
        for shard, extent in enumerate(extents):
            if extent is not None:
                begin = layout.offset_in_shard(index, shard)
                shards[shard, begin : begin + extent.numel] = value[extent.start : extent.stop]
                assert extent.numel > 0
                assert extent.start % slot.block == 0
                assert extent.stop % slot.block == 0 or extent.stop == slot.numel
    assert torch.equal(bucket, shards.flatten())
    assert layout.padding == layout.numel - sum(slot.numel for slot in layout.slots)


@pytest.mark.parametrize(
    ("shape", "block"), [((), 1), ((7,), 1), ((7, 3), 3), ((2, 7, 5), 5), ((7, 0), 1), ((0, 3), 3), ((0,), 1)]
)
def test_a_row_is_the_innermost_run(shape: tuple[int, ...], block: int) -> None:
    assert row_block(shape) == block


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPE)
def test_a_few_boxes_cover_an_extent_exactly_and_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    flat = torch.arange(numel).view(shape)
    parts = boxes(shape, Extent(start, stop))
    covered = []
    for offsets, sizes in parts:
        assert len(offsets) == len(sizes) == len(shape)
        window = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        covered += flat[window].flatten().tolist()
        assert flat[window].shape == sizes
    assert covered == list(range(start, stop))
    assert len(parts) <= max(1, 2 * (len(shape) - 1) + 1)


# -- tensors that have no place in a bucket ----------------------------------------------------------------------------


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
    layout = derived(base, 1, shape=(count, items), elements=elements, items=items)
    assert layout.num_shards == num_shards
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
        assert bool(expected) == (shard in layout.holders(0))


@pytest.mark.parametrize(
    ("shape", "block", "elements", "remedy"),
    [((12, 5), 5, 20, r"rows\(4\)"), ((60,), 1, 20, r"elements\(20\)"), ((12, 5), 5, 12, r"elements\(12\)")],
)
def test_a_cut_inside_a_block_is_refused(shape: tuple[int, ...], block: int, elements: int, remedy: str) -> None:
    base = plan_bucket(["weight"], [shape], [block], num_shards=5, itemsize=16)
    with pytest.raises(
        ValueError, match=rf"weight of shape .* blocks? of {elements} elements .*granularity=laconic\.{remedy}"
    ):
        derived(base, 0, shape=(60 // elements,), elements=elements, items=1)


def test_runs_lie_where_they_are_said_to_and_a_tensor_may_be_whole_in_one_shard() -> None:
    layout = RunsLayout.of("selected", (7,), [Extent(0, 3), Extent(3, 3), None, Extent(3, 7)])
    assert [(slot.name, slot.shape, slot.offset, slot.block) for slot in layout.slots] == [("selected", (7,), 0, 1)]
    assert [layout.extent(0, shard) for shard in range(4)] == [Extent(0, 3), None, None, Extent(3, 7)]
    assert list(layout.holders(0)) == [0, 3]
    whole = BucketLayout.whole_in(1, name="w", shape=(2, 3), num_shards=3)
    assert [whole.extent(0, shard) for shard in range(3)] == [None, Extent(0, 6), None]
