"""Which kernels the codecs call for tensors on CUDA: `TRITON_INTERPRET=1 python -m tests.kernels.chosen`.

A stand-in says that tensors are there. It prints a JSON object of the calls that differ from the plain chain, by codec.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from laconic.codec import CODECS, WEIGHT_CODECS, blocked_triton, fused
from laconic.codec.blocked import BlockCodec

_NUMEL = 1000


def _results(codec: BlockCodec, values: Tensor, base: Tensor) -> dict[str, Tensor]:
    """The result of each call of a codec."""
    payload, less = (torch.full((codec.payload_bytes(_NUMEL),), 77, dtype=torch.uint8) for _ in range(2))
    codec.encode_into(payload, values, check=False)
    codec.encode_into(less, values, base, check=False)
    codes, steps = codec.quantize(values)
    out, total = torch.empty(_NUMEL), base.clone()
    codec.dequantize_into(out, codes, steps)
    codec.decode_into(total, less, adds=True)
    checked = torch.empty_like(payload)
    codec.encode_into(checked, values)
    nothing = torch.empty(0, dtype=torch.uint8)
    codec.encode_into(nothing, values[:0], check=False)
    codec.decode_into(total[:0], nothing)
    return {
        "encode_into": payload, "a difference": less, "checked": checked, "dequantize_into": out, "a sum": total,
        "decode": codec.decode(payload, _NUMEL),
    }  # fmt: skip


def _differing(codec: BlockCodec) -> list[str]:
    values, base = torch.randn(_NUMEL), torch.randn(_NUMEL)
    plain, calls = _results(codec, values, base), []

    def noted(name: str) -> Any:
        kernel = getattr(blocked_triton, name)

        def call(*args: Any, **options: Any) -> None:
            calls.append(name)
            kernel(*args, **options)

        return mock.patch.object(blocked_triton, name, call)

    with mock.patch.object(Tensor, "is_cuda", True), noted("encode"), noted("decode"):
        on_device = _results(codec, values, base)
    assert fused._kernels("codec.blocked_triton") is blocked_triton
    found = [name for name, result in plain.items() if not torch.equal(result, on_device[name])]
    count = 3 if codec.has_kernels else 0
    return found + [f"{calls}"] * (calls.count("encode") != count or calls.count("decode") != count)


if __name__ == "__main__":
    torch.manual_seed(0)
    codecs = {**CODECS, **{f"{name} of weights": codec for name, codec in WEIGHT_CODECS.items()}}
    found = {name: _differing(codec) for name, codec in codecs.items() if isinstance(codec, BlockCodec)}
    print(json.dumps({name: each for name, each in found.items() if each}))
