"""The dynamic map against searching one number at a time, and blocks of the global tensor against the reference's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codec import tiles
from laconic.codec.tiles import Tiling
from laconic.optim.dynamic_map import dequantize, dynamic_map, map_values, quantize
from tests.reference import adamw8bit as reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed: bool) -> None:
    """The map of bitsandbytes' create_dynamic_map: its size, its extremes, and all numbers by another construction."""
    values = torch.tensor(map_values(signed=signed))
    assert len(values) == 256
    assert values.diff().gt(0).all()
    assert (values.min(), values.max(), 0.0 in values) == (pytest.approx(-0.99296875) if signed else 0, 1, True)
    assert values[values > 0].min() == pytest.approx(5.5e-7 if signed else 3.25e-7)
    torch.testing.assert_close(values, reference.dynamic_map(signed), rtol=1e-7, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_goes_to_the_references_code_beside_it(signed: bool) -> None:
    """Numbers of the map and those beside them, values of all sizes, and both ends of runs that share upper 16 bits."""
    code = dynamic_map(CPU, signed=signed)
    near = torch.cat([code.values.abs(), torch.tensor([1e-45, 1e-38, 0.0])])
    near = torch.cat([near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0)).abs()])
    upper = torch.arange(0, code.HIGHEST, 1 + signed, dtype=torch.int32) << 16
    at_lowest = (code.LOWEST << 16) + torch.arange(0, 2**16, 2**8, dtype=torch.int32)
    runs = torch.cat([upper, upper | 0xFFFF, at_lowest]).view(torch.float32)
    sizes = torch.cat([near, 10 ** (-8 * torch.rand(2**12, generator=torch.Generator().manual_seed(0))), runs])
    values = (torch.cat([sizes, -sizes]) if signed else sizes).clamp(float(code.values.min()), 1)
    codes = code.encode(values, torch.arange(len(values), dtype=torch.int32))
    with_one = torch.cat([values, torch.ones(1)])  # so that the reference's scale is 1
    assert torch.equal(codes, reference.encode(with_one, signed, step=0, width=len(with_one))[0][:-1])
    below = torch.bucketize(values, code.values[1:]).clamp(max=254).int()
    assert ((codes == below) | (codes == below + 1)).all()
    assert signed or ((codes == 0) == (values == 0)).all()
    own = code.encode(code.values, torch.zeros((), dtype=torch.int32))
    assert torch.equal(own, torch.arange(256, dtype=torch.uint8)), "numbers of the map keep their code"
    bits = values.view(torch.int32)
    place = ((bits >> 16) & 0x7FFF).clamp(code.LOWEST, code.HIGHEST) - code.LOWEST
    place += (bits < 0) * (code.HIGHEST - code.LOWEST + 1) if signed else 0
    by_kernel = code.near[place].int()
    by_kernel += (code.values[by_kernel + 1] < values) & (by_kernel < 254)
    assert torch.equal(by_kernel, below), "the kernel's table, too"


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_keeps_means_so_that_small_moments_decay(signed: bool) -> None:
    """[Note: Dithered rounding]: moments decay by the right factor, though a step is smaller than the map's gaps."""
    code = dynamic_map(CPU, signed=signed)
    values = 0.02 + 1e-3 * torch.rand(1, 64, 1, 64, generator=torch.Generator().manual_seed(0))
    values[0, 0] = 1.0  # the scale
    start = values[0, 1:].mean()
    for step in range(50):
        values[0, 1:] *= 0.99
        values = dequantize(*quantize(values, code, step=step), code)
    assert values[0, 1:].mean() == pytest.approx(float(start) * 0.99**50, rel=0.01)
    bad = torch.tensor([0.5, float("nan"), float("inf"), 1.0]).view(1, 1, 1, 4)
    assert not dequantize(*quantize(bad, code, step=1), code).isfinite().any(), "as AdamW's moments would"


@settings(max_examples=20)
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


def test_blocks_without_elements_are_refused() -> None:
    for wrong in ({"tile": 0}, {"flat": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            Tiling(**wrong)
