"""The promises of every codec. A codec in `CODECS` or `WEIGHT_CODECS` is tested by being there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codec import CODECS, WEIGHT_CODECS, BlockCodec, Codec, codec_named
from laconic.codec.bits import pack_bits, unpack
from laconic.codec.blocked import NF4
from laconic.codec.rotation import rotate
from tests.support.codec_bounds import BOUNDS

SIZES = [0, 1, 2, 63, 64, 65, 127, 256, 4099]

BYTES = {
    "fp32": lambda n: 4 * n,
    "bf16": lambda n: 2 * n,
    "int8": lambda n: n + 2 * math.ceil(n / 128),
    "int4": lambda n: math.ceil(n / 2) + 2 * math.ceil(n / 128),
    "int2": lambda n: math.ceil(n / 4) + 2 * math.ceil(n / 128),
    "e2m1": lambda n: math.ceil(n / 2) + 2 * math.ceil(n / 128),
    "top64": lambda n: math.ceil(n / 4096) * (64 * 8 // 8 + 64 * 2 // 8 + 4),
    "weight-nf4": lambda n: math.ceil(n / 2) + 2 * math.ceil(n / 64),
    "weight-int8": lambda n: n + 2 * math.ceil(n / 64),
}
ALL: dict[str, Codec] = {**CODECS, **{f"weight-{name}": codec for name, codec in WEIGHT_CODECS.items()}}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("numel", SIZES)
def test_payloads_have_the_predicted_bytes(name: str, numel: int) -> None:
    codec = ALL[name]
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    payload = codec.encode(x)
    assert (payload.dtype, payload.shape) == (torch.uint8, (BYTES[name](numel),))
    assert codec.payload_bytes(numel) == BYTES[name](numel)
    decoded = codec.decode(payload, numel)
    assert (decoded.dtype, decoded.shape) == (torch.float32, x.shape)
    assert (decoded - x).norm() <= BOUNDS[name] * x.norm()
    assert torch.equal(codec.decode(codec.encode(x), numel), decoded), "encoding has no state"


@settings(max_examples=25)
@given(
    data=st.lists(st.floats(min_value=-(2.0**30), max_value=2.0**30, width=32), min_size=1, max_size=600),
    exponent=st.integers(-20, 20),
)
def test_the_error_is_bounded(data: list[float], exponent: int) -> None:
    x = torch.tensor(data, dtype=torch.float32).ldexp(torch.tensor(exponent))
    x[x.abs() < 2.0**-60] = 0
    for name, codec in ALL.items():
        error = (codec.decode(codec.encode(x), x.numel()).double() - x.double()).norm()
        assert error <= BOUNDS[name] * x.double().norm() * (1 + 1e-6), name


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zero_and_blocks_are_independent(name: str) -> None:
    codec = ALL[name]
    assert torch.equal(codec.decode(codec.encode(torch.zeros(300)), 300), torch.zeros(300))
    block = getattr(codec, "block", 256)
    numel = 2 * block + 88
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[:block] *= 1e6
    assert torch.equal(codec.decode(codec.encode(x), numel)[block:], codec.decode(codec.encode(loud), numel)[block:])


@pytest.mark.parametrize("name", ALL)
def test_values_that_are_not_finite_are_refused(name: str) -> None:
    message = rf"{ALL[name].name} cannot encode NaN or infinity: training has diverged.*inner. learning rate"
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(70)
        x[69] = bad
        with pytest.raises(ValueError, match=message):
            ALL[name].encode(x)


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)])
def test_codes_and_steps_of_blocks(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    codes, steps = codec.quantize(torch.randn(1280, generator=torch.Generator().manual_seed(3)) * 1e-3)
    counts = codec.dequantize(codes, steps, 1280).view(-1, codec.block).double() / steps.double().unsqueeze(1)
    assert torch.equal(counts, counts.round()), "so a fused multiply-add gives the bits of two operations"
    assert counts.abs().max() <= 127
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(384)
        x[130] = bad
        decoded = codec.dequantize(*codec.quantize(x), 384)
        assert not decoded[128:256].isfinite().any(), "a block that is not finite travels as such"
        assert torch.equal(decoded[:128], decoded[256:])
        assert decoded[:128].isfinite().all()
    tiny = torch.finfo(torch.float32).tiny
    codes, steps = codec.quantize(torch.full((256,), 2.0**-130))
    assert (steps.float() >= tiny).all(), "no step is denormal"
    decoded = codec.dequantize(codes, steps, 256)
    assert ((decoded == 0) | (decoded == tiny)).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_codes_come_back(bits: int) -> None:
    codes = torch.randint(2**bits, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack_bits(codes, bits)
    assert packed.numel() == 48 * bits // 8
    assert torch.equal(unpack(packed, bits), codes)
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    assert bytes(packed.tolist()) == number.to_bytes(len(packed), "little"), "the first code in the lowest bits"


def test_wrong_shapes_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'fp5' is not known; use one of fp32, bf16, int8, int4"):
        codec_named("fp5")
    assert codec_named(CODECS["int4"]) is CODECS["int4"]
    with pytest.raises(ValueError, match=r"flat fp32 tensors, got shape \(2, 2\)"):
        CODECS["int4"].encode(torch.ones(2, 2))
    with pytest.raises(ValueError, match="4 values in fp32 take 16 bytes"):
        CODECS["fp32"].decode(torch.zeros(15, dtype=torch.uint8), 4)


def test_decoded_values_computed_by_hand() -> None:
    table = [
        ("e2m1", [6, -4, 2.9, 1.6, 0.6, -0.2], [6, -4, 3, 1.5, 0.5, 0]),
        ("int8", [127, -64.4, 0.6], [127, -64, 1]),
        ("int4", [7, -6.4, 0.6, 0.4, -7], [7, -6, 1, 0, -7]),
        ("int2", [-2, 0, 0, 0], [-1.494140625, 0.498046875, 0.498046875, 0.498046875]),
    ]
    for name, values, decoded in table:
        codec = CODECS[name]
        assert codec.decode(codec.encode(torch.tensor(values, dtype=torch.float32)), len(values)).tolist() == decoded


def test_nf4_has_the_quantiles_of_a_normal_distribution_and_takes_the_nearest() -> None:
    """The construction of arXiv 2305.14314: 8 quantiles above zero, 7 below, zero itself, scaled to [-1, 1]."""
    ends = 0.9677083
    above = torch.special.ndtri(torch.linspace(ends, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(ends, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat([above, below, torch.zeros(1)]).sort().values / above.max()
    values = torch.tensor(NF4, dtype=torch.float64)
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)
    x = torch.randn(640, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9).view(-1, 64)
    x[:, 5] = -4.0  # the largest of its block, and a bf16 number
    nearest = values[(x.double().unsqueeze(-1) / 4 - values).abs().argmin(-1)] * 4
    codec = WEIGHT_CODECS["nf4"]
    torch.testing.assert_close(codec.decode(codec.encode(x.view(-1)), 640).view(-1, 64).double(), nearest)
    loud = torch.zeros(64)
    loud[0], loud[1] = 1000.0, 1.0
    int8 = WEIGHT_CODECS["int8"]
    assert int8.decode(int8.encode(loud), 64)[0] == pytest.approx(1000.0, rel=2**-8), "a weight is never clipped"


def test_no_nf4_value_exceeds_its_scale() -> None:
    """A scale is a bf16 number that is rounded up, so the largest value of a block is never clipped."""
    x = torch.randn(640, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 640)[:, None]
    x[:, 9] = largest = x.abs().amax(dim=1)  # the code of 1 is that of the scale itself
    codec = WEIGHT_CODECS["nf4"]
    decoded = codec.decode(codec.encode(x.view(-1)), x.numel()).view(640, 64)
    scales = decoded.amax(dim=1)
    assert ((scales >= largest) & (scales <= largest * (1 + 2**-7))).all(), "but by one bf16 number at most"
    assert (decoded.abs() <= scales[:, None]).all()


def test_the_rotation_is_hadamards_and_undoes_itself() -> None:
    """The matrix of order 32: entry (i, j) is the parity of the bits that i and j share."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
    matrix = torch.tensor(signs, dtype=torch.float64) / 32**0.5
    x = torch.randn(96, generator=torch.Generator().manual_seed(0))
    expected = (x.double().view(-1, 32) @ matrix.T).view(-1)
    torch.testing.assert_close(rotate(x).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=1e-5, atol=1e-6)
    spike = torch.zeros(32)
    spike[5] = 32.0
    assert rotate(spike).abs().unique().numel() == 1, "a single large value is spread evenly"
