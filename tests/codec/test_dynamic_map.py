"""The numbers of the dynamic map and rounding to them, against searching one number at a time."""

from __future__ import annotations

import pytest
import torch

from laconic.codec.dynamic_map import dequantize, dynamic_map, map_values, quantize
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
def test_every_number_goes_to_a_code_beside_it(signed: bool) -> None:
    """Numbers of the map keep their code. Values beside them, near zero and of all sizes get the reference's code."""
    code = dynamic_map(CPU, signed=signed)
    near = torch.cat([code.values, torch.tensor([1e-45, 1e-38, 0.0])])
    near = torch.cat([near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0))])
    exponents = torch.rand(2**12, generator=torch.Generator().manual_seed(0)) * 8
    wide = torch.cat([near, 10**-exponents]).clamp(max=1)
    values = torch.cat([wide, -wide]).clamp(min=float(code.values.min())) if signed else wide.abs()
    codes = code.encode(values, torch.arange(len(values), dtype=torch.int32))
    assert torch.equal(
        code.encode(code.values, torch.zeros((), dtype=torch.int32)), torch.arange(256, dtype=torch.uint8)
    )
    with_one = torch.cat([values, torch.ones(1)])  # so that the reference's scale is 1
    assert torch.equal(codes, reference.encode(with_one, signed, step=0, width=len(with_one))[0][:-1])
    below = torch.bucketize(values, code.values[1:]).clamp(max=254)
    assert ((codes == below) | (codes == below + 1)).all()
    if not signed:
        assert ((codes == 0) == (values == 0)).all()


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


@pytest.mark.parametrize("signed", [True, False])
def test_values_that_are_not_finite_give_valid_codes(signed: bool) -> None:
    """The scale is then not finite, so the whole block decodes to NaN or infinity, as AdamW's moments would."""
    values = torch.tensor([0.5, float("nan"), float("inf"), 1.0])
    code = dynamic_map(CPU, signed=signed)
    coded, scales = quantize(values.view(1, 1, 1, 4).clone(), code, step=1)
    assert not dequantize(coded, scales, code).isfinite().any()


def test_decoding_is_within_the_maps_resolution() -> None:
    """A block of normal numbers decodes within 3 % in norm; zeros and the largest positive number decode exactly."""
    values = torch.randn(1, 32, 4, 32, generator=torch.Generator().manual_seed(0))
    values[0, 0, 0, 0], values[0, 1, 0, 0] = 9.0, 0.0
    for signed, exact in [(True, values), (False, values.square())]:
        code = dynamic_map(CPU, signed=signed)
        decoded = dequantize(*quantize(exact.clone(), code, step=1), code)
        assert (decoded - exact).norm() < 0.03 * exact.norm()
        assert decoded[0, 0, 0, 0] == exact[0, 0, 0, 0]
        assert decoded[0, 1, 0, 0] == 0
