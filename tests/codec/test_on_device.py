"""Which way a device codes: in kernels, by compiled code, or as a CPU does. A stand-in is the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import laconic.codec
from laconic.codec import CODECS
from laconic.codec.fused import Fused, fused, kernels_for


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
