"""The promises of every codec. A codec in `CODECS` or `WEIGHT_CODECS` is tested by being there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codec import CODECS, WEIGHT_CODECS, Codec, Int8, codec_named
from laconic.codec.blocked import NF4

SIZES = [0, 1, 2, 63, 64, 65, 127, 256, 4099]

BYTES = {
    "fp32": lambda n: 4 * n,
    "bf16": lambda n: 2 * n,
    "int8": lambda n: n + 2 * math.ceil(n / 256),
    "fp4": lambda n: math.ceil(n / 2) + 2 * math.ceil(n / 64),
    "fp4-e2m1": lambda n: math.ceil(n / 2) + 2 * math.ceil(n / 64),
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
    assert (decoded - x).norm() <= codec.max_relative_error * x.norm()
    assert torch.equal(codec.decode(codec.encode(x), numel), decoded), "encoding has no state"


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.floats(min_value=-(2.0**30), max_value=2.0**30, width=32), min_size=1, max_size=600),
    exponent=st.integers(-20, 20),
)
def test_the_error_is_bounded(name: str, data: list[float], exponent: int) -> None:
    codec = ALL[name]
    x = torch.tensor(data, dtype=torch.float32).ldexp(torch.tensor(exponent))
    x[x.abs() < 2.0**-60] = 0
    error = (codec.decode(codec.encode(x), x.numel()).double() - x.double()).norm()
    assert error <= codec.max_relative_error * x.double().norm() * (1 + 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zero_and_blocks_are_independent(name: str) -> None:
    codec = ALL[name]
    assert torch.equal(codec.decode(codec.encode(torch.zeros(300)), 300), torch.zeros(300))
    x = torch.randn(600, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[:256] *= 1e6
    assert torch.equal(codec.decode(codec.encode(x), 600)[256:], codec.decode(codec.encode(loud), 600)[256:])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    x = torch.ones(70)
    x[69] = bad
    with pytest.raises(
        ValueError,
        match=rf"{ALL[name].name} cannot encode NaN or infinity: training has diverged.*inner. learning rate",
    ):
        ALL[name].encode(x)


def test_wrong_shapes_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'fp5' is not known; use one of fp32, bf16, int8, fp4"):
        codec_named("fp5")
    assert codec_named(CODECS["fp4"]) is CODECS["fp4"]
    with pytest.raises(ValueError, match=r"flat fp32 tensors, got shape \(2, 2\)"):
        CODECS["fp4"].encode(torch.ones(2, 2))
    with pytest.raises(ValueError, match="4 values in fp32 take 16 bytes"):
        CODECS["fp32"].decode(torch.zeros(15, dtype=torch.uint8), 4)


def test_decoded_values_computed_by_hand() -> None:
    x = torch.tensor([1.0, -0.5, 0.26, 0.1, 0.0, -1 / 64, 0.005, 0.74])
    assert CODECS["fp4"].decode(CODECS["fp4"].encode(x), 8).tolist() == [1, -0.5, 0.25, 0.125, 0, -1 / 64, 0, 0.5]
    y = torch.tensor([6.0, -4.0, 2.9, 1.6, 0.6, -0.2])
    decoded = CODECS["fp4-e2m1"].decode(CODECS["fp4-e2m1"].encode(y), 6)
    torch.testing.assert_close(decoded, torch.tensor([6.0, -4.0, 3.0, 1.5, 0.5, 0.0]))
    z = torch.tensor([127.0, -64.4, 0.6])
    assert CODECS["int8"].decode(CODECS["int8"].encode(z), 3).tolist() == [127, -64, 1]
    spike = torch.full((256,), 1e-3)
    spike[7] = 1.0
    clipped = Int8().decode(Int8().encode(spike), 256)
    assert clipped[7] < 0.4, "clipped at six times the root mean square"
    assert Int8(clip=math.inf).decode(Int8(clip=math.inf).encode(spike), 256)[7] == 1


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
    assert int8.decode(int8.encode(loud), 64)[0] == pytest.approx(1000.0), "a weight is never clipped"
