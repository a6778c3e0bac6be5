"""A bucket cut by shares: every element is in one shard, no block is cut, and shards are as large as shares say."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.layout.bucket import BucketLayout, row_block
from laconic.layout.shares import cut_by_shares, fullness, plan_by_shares, warn_if_uneven
from tests.reference import shares as reference
from tests.support.layers import LLAMA_3_70B

TENSORS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4).map(tuple)
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


def plan_flat(tensors: tuple[tuple[int, int], ...], shares: tuple[float, ...], itemsize: int = 16) -> BucketLayout:
    names = [f"t{index}" for index in range(len(tensors))]
    shapes, blocks = [(numel,) for numel, _ in tensors], [block for _, block in tensors]
    (layout,) = plan_by_shares(names, shapes, blocks, shares=shares, itemsize=itemsize).buckets
    return layout


@settings(max_examples=80, deadline=None)
@given(TENSORS, SHARES, st.sampled_from([1, 2, 4, 8]))
def test_a_cut_is_that_of_the_oracle(
    tensors: tuple[tuple[int, int], ...], shares: tuple[int, ...], quantum: int
) -> None:
    offsets, stops = cut_by_shares(tensors, shares, quantum)
    assert list(offsets) == reference.offsets_of(tensors, quantum)[:-1]
    assert list(stops) == reference.stops_of(tensors, shares, quantum)
    assert cut_by_shares(tensors, tuple(share / 2 for share in shares), quantum)[1] == stops, "only their ratio counts"


@settings(max_examples=80, deadline=None)
@given(TENSORS, SHARES, st.sampled_from([2, 4, 16]))
def test_every_element_is_in_one_shard_and_no_block_is_cut(
    tensors: tuple[tuple[int, int], ...], shares: tuple[int, ...], itemsize: int
) -> None:
    layout = plan_flat(tensors, shares, itemsize)
    assert layout.num_shards == len(shares)
    assert sum(map(layout.size, range(layout.num_shards))) == layout.numel
    assert layout.shard_numel == max(map(layout.size, range(layout.num_shards)))
    for shard in range(layout.num_shards):
        assert layout.size(shard) * itemsize >= 16
        assert layout.start(shard) * itemsize % 16 == 0
    for index, slot in enumerate(layout.slots):
        extents = [layout.extent(index, shard) for shard in range(layout.num_shards)]
        assert [i for each in extents if each for i in range(each.start, each.stop)] == list(range(slot.numel))
        assert all(each.stop % slot.block == 0 or each.stop == slot.numel for each in extents if each)
        holders = [shard for shard, each in enumerate(extents) if each]
        assert slot.numel == 0 or list(layout.holders(index)) == holders
        for shard in holders:
            extent, begin = extents[shard], layout.offset_in_shard(index, shard)
            assert extent is not None
            assert layout.start(shard) + begin == slot.offset + extent.start
            assert begin + extent.numel <= layout.size(shard)
    numels = [sum(own) for own in layout.numels_by_shard()]
    assert layout.padding == layout.numel - sum(numels)


def test_a_layer_of_llama_pads_nothing_and_is_cut_as_asked() -> None:
    """Rows of 8,192 and of 28,672 elements on eight unequal ranks. Equal shards are multiples of both."""
    shares = (80, 80, 40, 40, 24, 24, 24, 24)
    names, shapes = LLAMA_3_70B.names, LLAMA_3_70B.shapes
    blocks = [32 * row_block(shape) for shape in shapes]
    (layout,) = plan_by_shares(names, shapes, blocks, shares=shares, itemsize=2).buckets
    assert layout.padding == 0
    ideal = [layout.numel * share / sum(shares) for share in shares]
    for shard, wanted in enumerate(ideal):
        assert layout.size(shard) == pytest.approx(wanted, rel=0.03)


def test_rows_shrink_where_they_would_keep_ranks_from_their_shares() -> None:
    """Two rows of 1,000 on shares 1 : 3: whole rows give the first rank half of them."""
    arguments = (["t"], [(2, 1000)], [1000])
    (kept,) = plan_by_shares(*arguments, shares=(1, 3), itemsize=4).buckets
    assert (kept.stops, kept.slots[0].block) == ((1000, 2000), 1000)
    (shrunk,) = plan_by_shares(*arguments, shares=(1, 3), itemsize=4, may_shrink=True).buckets
    assert (shrunk.stops, shrunk.slots[0].block) == ((500, 2000), 1)
    (rows,) = plan_by_shares(["t"], [(4000, 10)], [10], shares=(1, 3), itemsize=4, may_shrink=True).buckets
    assert (rows.stops, rows.slots[0].block) == ((10_000, 40_000), 10)


def test_a_rank_that_holds_twice_its_share_is_said() -> None:
    plan = plan_by_shares(["t"], [(2, 1000)], [2000], shares=(1, 3), itemsize=4)
    assert fullness(plan.buckets[0].stops, (1, 3)) > 4
    with pytest.warns(UserWarning, match=r"hold 4\.0x its share of the unit of t"):
        warn_if_uneven(plan, (1, 3), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_uneven(plan_by_shares(["t"], [(2, 1000)], [1], shares=(1, 3), itemsize=4), (1, 3), 4)
        warn_if_uneven(plan_by_shares(["t"], [(3,)], [1], shares=(1, 9), itemsize=4), (1, 9), 4)
