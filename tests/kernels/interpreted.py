"""Run every kernel in triton's interpreter beside its twin: `TRITON_INTERPRET=1 python -m tests.kernels.interpreted`.

It prints a JSON object of what differs, by kernel. The interpreter cuts fp32 off where it makes bf16 and devices round,
so parameters in bf16 are not compared here, only their moments; tests with a GPU compare both.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from laconic.codec import CODECS, WEIGHT_CODECS, blocked_triton
from laconic.codec.blocked import BlockCodec
from laconic.optim.adamw8bit import AdamW8bit

_NUMELS = (1, 63, 128, 1000, 5001)
_SCALES = (1.0, 1e-37, 1e30)
_SHAPES = ((70, 96), (64, 64), (5000,), (129, 33), (3, 50, 64))


def _coded(codec: BlockCodec, numel: int, scale: float) -> list[str]:
    """The kernels of a codec whose results are not those of its chain."""
    values, base = torch.randn(numel) * scale, torch.randn(numel) * scale
    values[numel // 4 : numel // 2] = 0
    found = []
    for less in (None, base):
        codes, steps = codec.quantize(values if less is None else values - less)
        own_codes = torch.full((codec.code_bytes(numel),), 77, dtype=torch.uint8)
        own_steps = torch.full((2 * codec.num_blocks(numel),), 77, dtype=torch.uint8)
        blocked_triton.encode(codec, values, less, own_codes, own_steps)
        if not (torch.equal(own_codes, codes) and torch.equal(own_steps.view(torch.bfloat16), steps)):
            found.append("encode" if less is None else "difference")
    decoded = codec.dequantize(codes, steps, numel)
    for adds, expected in ((False, decoded), (True, base + decoded)):
        out = base.clone()
        blocked_triton.decode(codec, codes, steps.view(torch.uint8), out, adds=adds)
        if not torch.equal(out, expected):
            found.append("sum" if adds else "decode")
    return found


def _bad_blocks(codec: BlockCodec) -> list[str]:
    """Blocks with NaN or infinity decode to NaN, and others stay as they are."""
    values = torch.randn(3 * codec.block)
    values[5], values[2 * codec.block] = torch.nan, -torch.inf
    codes, steps = torch.empty(codec.code_bytes(len(values)), dtype=torch.uint8), torch.empty(6, dtype=torch.uint8)
    blocked_triton.encode(codec, values, None, codes, steps)
    out = torch.empty_like(values)
    blocked_triton.decode(codec, codes, steps, out)
    is_nan = out.isnan().view(3, -1)
    return [] if is_nan[0].all() and is_nan[2].all() and not is_nan[1].any() else ["NaN and infinity"]


def _stepped(dtype: torch.dtype, *, by_kernel: bool) -> list[Tensor]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]
    optimizer = AdamW8bit(parameters, lr=1e-2)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape) * 10 ** torch.randn(parameter.shape)).to(dtype)
        if step == 1:
            parameters[1].grad = None  # its number of steps then differs, and so its launch
        with mock.patch.object(Tensor, "is_cuda", by_kernel):
            optimizer.step()
    moments = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return moments if dtype is torch.bfloat16 else [*(each.detach() for each in parameters), *moments]


if __name__ == "__main__":
    torch.manual_seed(0)
    differences: dict[str, Any] = {}
    for name, codec in {**CODECS, **{f"{name} of weights": each for name, each in WEIGHT_CODECS.items()}}.items():
        if isinstance(codec, BlockCodec):
            wrong = [(n, s, each) for n in _NUMELS for s in _SCALES for each in _coded(codec, n, s)]
            if wrong := [*wrong, *_bad_blocks(codec)]:
                differences[name] = wrong
    for dtype in (torch.float32, torch.bfloat16):
        pairs = zip(_stepped(dtype, by_kernel=False), _stepped(dtype, by_kernel=True), strict=True)
        if wrong := [index for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]:
            differences[f"AdamW8bit, {dtype}"] = wrong
    print(json.dumps(differences))
