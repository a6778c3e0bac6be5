"""Codes and blocks, against counting and searching one number at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codec import tiles
from laconic.codec.tiles import Tiling
from tests.reference import adamw8bit as reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed: bool) -> None:
    """bitsandbytes' create_dynamic_map: so many codes, its extremes, and one bit-equal construction."""
    values = torch.tensor(tiles.dynamic_map(signed=signed))
    assert len(values) == 256
    assert values.diff().gt(0).all()
    assert (values.min(), values.max(), 0.0 in values) == (pytest.approx(-0.99296875) if signed else 0, 1, True)
    assert values[values > 0].min() == pytest.approx(5.5e-7 if signed else 3.25e-7)
    torch.testing.assert_close(values, reference.dynamic_map(signed), rtol=1e-7, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_goes_to_a_code_beside_it(signed: bool) -> None:
    """Codes to themselves; what is beside them, at zero, and of all sizes, as the reference says; one of the two."""
    code = tiles.dynamic_code(CPU, signed=signed)
    near = torch.cat([code.values, torch.tensor([1e-45, 1e-38, 0.0])])
    near = torch.cat([near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0))])
    exponents = torch.rand(2**12, generator=torch.Generator().manual_seed(0)) * 8
    wide = torch.cat([near, 10**-exponents]).clamp(max=1)
    values = torch.cat([wide, -wide]).clamp(min=float(code.values.min())) if signed else wide.abs()
    codes = code.rounded(values, torch.arange(len(values), dtype=torch.int32))
    assert torch.equal(
        code.rounded(code.values, torch.zeros((), dtype=torch.int32)), torch.arange(256, dtype=torch.uint8)
    )
    with_one = torch.cat([values, torch.ones(1)])  # so that the reference's scale is 1
    assert torch.equal(codes, reference.encode(with_one, signed, step=0, width=len(with_one))[0][:-1])
    below = torch.bucketize(values, code.values[1:]).clamp(max=254)
    assert ((codes == below) | (codes == below + 1)).all()
    if not signed:
        assert ((codes == 0) == (values == 0)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_keeps_means_so_that_small_moments_decay(signed: bool) -> None:
    """[Note: Dithered rounding]: by less than the distance of two codes a step, and still by what they should."""
    code = tiles.dynamic_code(CPU, signed=signed)
    values = 0.02 + 1e-3 * torch.rand(1, 64, 1, 64, generator=torch.Generator().manual_seed(0))
    values[0, 0] = 1.0  # the scale
    start = values[0, 1:].mean()
    for step in range(50):
        values[0, 1:] *= 0.99
        values = tiles.dequantize(*tiles.quantize(values, code, step=step), code)
    assert values[0, 1:].mean() == pytest.approx(float(start) * 0.99**50, rel=0.01)


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_not_finite_does_no_harm(signed: bool) -> None:
    """Codes stay codes; the scale tells: the whole block is not a number afterwards, as with AdamW's moments."""
    values = torch.tensor([0.5, float("nan"), float("inf"), 1.0])
    code = tiles.dynamic_code(CPU, signed=signed)
    coded, scales = tiles.quantize(values.view(1, 1, 1, 4).clone(), code, step=1)
    assert not tiles.dequantize(coded, scales, code).isfinite().any()


def test_decoding_is_within_the_maps_resolution() -> None:
    """Of a block of normal numbers: within 3 % in norm, and exact for zeros and the largest positive number."""
    values = torch.randn(1, 32, 4, 32, generator=torch.Generator().manual_seed(0))
    values[0, 0, 0, 0], values[0, 1, 0, 0] = 9.0, 0.0
    for signed, exact in [(True, values), (False, values.square())]:
        code = tiles.dynamic_code(CPU, signed=signed)
        decoded = tiles.dequantize(*tiles.quantize(exact.clone(), code, step=1), code)
        assert (decoded - exact).norm() < 0.03 * exact.norm()
        assert decoded[0, 0, 0, 0] == exact[0, 0, 0, 0]
        assert decoded[0, 1, 0, 0] == 0


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    tile=st.sampled_from([None, 1, 2, 4]),
    flat=st.integers(1, 9),
    panel=st.sampled_from([1, 8, 64, 2**18]),
)
def test_blocks_are_those_of_the_reference(shape: tuple[int, ...], tile: int | None, flat: int, panel: int) -> None:
    """Whatever the size of the panels: same scales, same codes, each element once."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5
    code = tiles.dynamic_code(CPU, signed=True)
    grid = Tiling(tile=tile, flat=flat).grid(shape)
    scales = torch.zeros(grid.scales_shape)
    codes = torch.zeros(shape, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_PANEL_NUMEL", panel)
        matrix, scale_matrix = grid.matrix(values.view(-1)), grid.matrix_of_scales(scales.view(-1))
        for piece in grid.panels(scale_matrix):
            coded, scale_matrix[piece.scales] = tiles.quantize(piece.read(matrix).clone(), code, step=3)
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
    """Panels of a wide matrix are cut across, too."""
    grid = Tiling().grid((64, 100_000))
    scales = torch.zeros(grid.scales_shape)
    panels = list(grid.panels(scales))
    largest = max(piece.shape[0] * piece.shape[1] * piece.shape[2] * piece.shape[3] for piece in panels)
    assert largest <= tiles._PANEL_NUMEL
    assert sum(piece.shape[0] * piece.shape[2] for piece in panels) == scales.numel()


@pytest.mark.parametrize("wrong", [{"tile": 0}, {"flat": 0}])
def test_blocks_of_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Tiling(**wrong)
