"""Blocks of the global tensor, against the reference's blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codec import tiles
from laconic.codec.dynamic_map import dynamic_map, quantize
from laconic.codec.tiles import Tiling
from tests.reference import adamw8bit as reference


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    tile=st.sampled_from([None, 1, 2, 4]),
    flat=st.integers(1, 9),
    panel=st.sampled_from([1, 8, 64, 2**18]),
)
def test_blocks_are_those_of_the_reference(shape: tuple[int, ...], tile: int | None, flat: int, panel: int) -> None:
    """Panels of every size give the same scales and the same codes, and cover each element once."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5
    code = dynamic_map(torch.device("cpu"), signed=True)
    grid = Tiling(tile=tile, flat=flat).grid(shape)
    scales = torch.zeros(grid.scales_shape)
    codes = torch.zeros(shape, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_PANEL_NUMEL", panel)
        matrix, scale_matrix = grid.matrix(values.view(-1)), grid.matrix_of_scales(scales.view(-1))
        for piece in grid.panels(scale_matrix):
            coded, scale_matrix[piece.scales] = quantize(piece.read(matrix).clone(), code, step=3)
            piece.write(grid.matrix(codes.view(-1)), coded)
    expected_scales, expected_codes = [], torch.zeros(shape, dtype=torch.uint8)
    for block in reference.blocks(shape, tile, flat):
        view = (-1, shape[-1]) if len(block) == 2 else (-1,)
        expected_codes.view(view)[block], scale = reference.encode(
            values.view(view)[block], True, step=3, width=grid.width
        )
        expected_scales.append(scale)
    assert torch.equal(scales.view(-1), torch.stack(expected_scales))
    assert torch.equal(codes, expected_codes)


def test_temporaries_are_bounded() -> None:
    """A wide matrix is cut into panels side by side, too."""
    grid = Tiling().grid((64, 100_000))
    scales = torch.zeros(grid.scales_shape)
    panels = list(grid.panels(scales))
    largest = max(piece.shape[0] * piece.shape[1] * piece.shape[2] * piece.shape[3] for piece in panels)
    assert largest <= tiles._PANEL_NUMEL
    assert sum(piece.shape[0] * piece.shape[2] for piece in panels) == scales.numel()


@pytest.mark.parametrize("wrong", [{"tile": 0}, {"flat": 0}])
def test_blocks_without_elements_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Tiling(**wrong)
