from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.layout import packing
from laconic.layout.bucket import BucketLayout, row_block
from laconic.plan.shapes import KNOWN
from tests.reference import planner as reference

TENSOR = st.tuples(st.integers(0, 24), st.integers(1, 9))
"""(numel, block); the last block may be partial, the tensor empty."""


def plan(tensors: list[tuple[int, int]], num_shards: int, itemsize: int = 16) -> BucketLayout:
    """Plan flat tensors; with 16-byte elements the alignment is one element."""
    names = [f"t{i}" for i in range(len(tensors))]
    shapes = [(numel,) for numel, _ in tensors]
    return packing.plan_bucket(names, shapes, [block for _, block in tensors], num_shards=num_shards, itemsize=itemsize)


def assert_sound(layout: BucketLayout, itemsize: int) -> None:
    """Tensors lie in order without overlap, inside the bucket; no border cuts a block; shards start on 16 bytes."""
    pointer = 0
    for slot in layout.slots:
        assert slot.offset >= pointer
        pointer = slot.offset + slot.numel
        first = slot.offset // layout.shard_numel + 1
        for border in range(first * layout.shard_numel, pointer, layout.shard_numel):
            assert (border - slot.offset) % slot.block == 0, f"{slot} is cut at {border}"
    assert pointer <= layout.numel
    assert layout.shard_numel * itemsize % packing.SHARD_ALIGNMENT_BYTES == 0


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 12), st.integers(1, 15))
def test_earliest_is_the_first_legal_start(pointer: int, numel: int, block: int, shard_numel: int) -> None:
    expected = reference.earliest(pointer, numel, block, shard_numel)
    assert packing.earliest(pointer, numel, block, shard_numel) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(TENSOR, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 16))
def test_place_finds_a_layout_whenever_there_is_one(
    tensors: list[tuple[int, int]], num_shards: int, shard_numel: int
) -> None:
    offsets = packing.place(tensors, num_shards, shard_numel)
    assert (offsets is not None) == reference.fits(tensors, num_shards, shard_numel)


@settings(max_examples=150, deadline=None)
@given(st.lists(TENSOR, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([16, 8, 4, 2]))
def test_plan_takes_the_smallest_shard_of_a_linear_scan(
    tensors: list[tuple[int, int]], num_shards: int, itemsize: int
) -> None:
    layout = plan(tensors, num_shards, itemsize)
    assert_sound(layout, itemsize)
    assert layout.shard_numel == reference.smallest_shard(tensors, num_shards, 16 // itemsize)


def test_feasibility_is_not_monotone_in_the_shard_size() -> None:
    tensor = [(6, 2)]
    assert [packing.place(tensor, 3, size) is not None for size in (1, 2, 3, 4, 5)] == [False, True, False, True, True]
    assert plan(tensor, 3).shard_numel == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
)
def test_rows_of_matrices_stay_whole(shapes: list[tuple[int, int]], num_shards: int, itemsize: int) -> None:
    blocks = [row_block(shape) for shape in shapes]
    names = [str(i) for i in range(len(shapes))]
    layout = packing.plan_bucket(names, shapes, blocks, num_shards=num_shards, itemsize=itemsize)
    assert_sound(layout, itemsize)
    assert [slot.name for slot in layout.slots] == names
    assert layout.padding == layout.numel - sum(math.prod(shape) for shape in shapes)


def test_one_tensor_smaller_than_the_number_of_ranks() -> None:
    layout = plan([(3, 1)], 8, itemsize=4)
    assert (layout.shard_numel, layout.numel, layout.padding) == (4, 32, 29)
    assert [layout.extent(0, shard) is None for shard in range(8)] == [False] + [True] * 7


def test_a_bucket_of_empty_tensors_still_has_shards() -> None:
    layout = plan([(0, 1), (0, 1)], 4, itemsize=4)
    assert layout.shard_numel == 4
    assert all(layout.extent(index, shard) is None for index in (0, 1) for shard in range(4))


def test_a_block_as_large_as_the_tensor_keeps_it_on_one_rank() -> None:
    layout = plan([(12, 12), (20, 20), (7, 7)], 4)
    holders = [[shard for shard in range(4) if layout.extent(index, shard)] for index in range(3)]
    assert [len(shards) for shards in holders] == [1, 1, 1]
    assert layout.shard_numel == 20


def test_a_block_of_no_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="weight: a block needs at least one element, got 0"):
        packing.plan_bucket(["weight"], [(4,)], [0], num_shards=2, itemsize=4)


LLAMA_70B, GPT_OSS_120B, DEEPSEEK_V3 = (list(layer.shapes) for (layer,) in KNOWN.values())


@pytest.mark.parametrize(
    ("shapes", "num_shards", "padding_percent"),
    [
        (LLAMA_70B, 64, 0.37),
        (LLAMA_70B, 100, 0.53),
        (LLAMA_70B, 256, 1.22),
        (LLAMA_70B, 1024, 2.94),
        (GPT_OSS_120B, 64, 0.01),
        (GPT_OSS_120B, 384, 0.09),
        (GPT_OSS_120B, 1024, 5.74),
        (DEEPSEEK_V3, 128, 0.02),
        (DEEPSEEK_V3, 512, 0.16),
        (DEEPSEEK_V3, 1024, 1.04),
    ],
    ids=lambda value: value if isinstance(value, (int, float)) else f"{len(value)}-tensors",
)
def test_padding_of_whole_layers_with_rows_as_blocks(
    shapes: list[tuple[int, ...]], num_shards: int, padding_percent: float
) -> None:
    """The paddings published for one bucket per layer. They align shards to 64 elements; bytes reach 16: `abs`."""
    names = [str(i) for i in range(len(shapes))]
    layout = packing.plan_bucket(
        names, shapes, [row_block(shape) for shape in shapes], num_shards=num_shards, itemsize=1
    )
    assert_sound(layout, 1)
    total = sum(math.prod(shape) for shape in shapes)
    assert 100 * layout.padding / total == pytest.approx(padding_percent, abs=0.006)


def test_layers_of_one_shape_share_a_plan() -> None:
    packing.pack.cache_clear()
    for layer in range(3):
        packing.plan_bucket([f"{layer}.w"], [(37, 11)], [11], num_shards=5, itemsize=4)
    assert packing.pack.cache_info().misses == 1
