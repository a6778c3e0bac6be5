"""Which way a device codes and multiplies: in kernels, by compiled code, or as a CPU does. A stand-in is the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import laconic.codec
from laconic.codec import CODECS, scaled_linear
from laconic.codec.fused import Fused, fused, kernels_for
from laconic.codec.scaled import SCALED_FORMATS
from laconic.codec.scaled_linear import convert_to_scaled_training, multiplies_codes


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors say that they are on CUDA, on a machine without Triton."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setitem(sys.modules, "laconic.codec.blocked_triton", None)
    monkeypatch.delattr(laconic.codec, "blocked_triton", raising=False)
    laconic.codec.fused._kernels.cache_clear()
    yield
    laconic.codec.fused._kernels.cache_clear()


def test_without_triton_the_chain_is_compiled_once(on_device: None) -> None:
    def twice(values: Tensor) -> Tensor:
        return 2 * values

    assert kernels_for(torch.ones(3), "codec.blocked_triton") is None
    compiled = fused(twice, torch.device("cuda"))
    assert isinstance(compiled, Fused)
    assert fused(twice, torch.device("cuda")) is compiled
    codec, values = CODECS["int8"], torch.randn(300)
    payload = torch.empty(codec.payload_bytes(300), dtype=torch.uint8)
    codec.encode_into(payload, values, check=False)
    assert (codec.decode(payload, 300) - values).abs().max() < 0.05


def test_a_device_without_memory_is_no_reason_to_compile_no_more() -> None:
    calls = []

    def full(values: Tensor) -> Tensor:
        calls.append("compiled")
        raise torch.OutOfMemoryError("full")

    function = Fused(lambda values: values, backend="eager")
    function._compiled = full
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            function(torch.ones(3))
    assert calls == ["compiled"] * 2


@pytest.mark.parametrize(("capability", "formats"), [
    ((8, 0), set()),
    ((9, 0), {"fp8_128x128", "fp8_1x128", "fp8_1x128_e8m0"}),
    ((10, 0), {"mxfp8", "nvfp4"}),
])  # fmt: skip
def test_each_device_multiplies_the_codes_that_it_knows(
    capability: tuple[int, int], formats: set[str], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def known(*shape: int, dtype: torch.dtype = torch.bfloat16, outputs: int = 256) -> set[str]:
        rows = torch.zeros(shape, dtype=dtype)
        return {name for name, each in SCALED_FORMATS.items() if multiplies_codes(each, rows, outputs)}

    assert known(32, 384) == formats
    assert known(32, 384, dtype=torch.float32) == known(32, 384, outputs=24) == set()
    assert known(24, 384) == known(32, 392) == set()


def test_a_layer_multiplies_codes_where_the_device_does(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product gets the codes of both sides, and the bias is added to it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    torch.manual_seed(0)
    layer: Any = convert_to_scaled_training(nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16)), "nvfp4")
    x, given = torch.randn(16, 64, dtype=torch.bfloat16), []

    def product(codes: Tensor, scales: Tensor, scale: Tensor | None, weight: Any, dtype: torch.dtype) -> Tensor:
        given.append((codes, scales, scale))
        decoded = weight.weight_format.of_rows.dequantize(codes, scales, scale, dtype)
        return functional.linear(decoded, weight.dequantize(dtype))

    monkeypatch.setattr(scaled_linear, "product_of_codes", product)
    by_codes = layer(x)
    monkeypatch.setattr(scaled_linear, "multiplies_codes", lambda *_: False)
    decoded = layer(x)
    ((codes, scales, scale),) = given
    assert (codes.shape, scales.shape, scale.shape) == ((16, 32), (16, 4), ())
    torch.testing.assert_close(by_codes, decoded, rtol=1e-2, atol=1e-2)
