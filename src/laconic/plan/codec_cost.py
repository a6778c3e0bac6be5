"""The bytes of memory that coding and decoding read and write, counted while the codec codes some zeros.

On an accelerator a codec is one or two kernels, which read and write each value and each code once: [Note: Fused
coding] in codec/blocked.py. On a CPU it is a chain of operations over a piece that lies in the processor's caches. Each
operation still takes about as long as its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.codec import CODECS, Codec
from laconic.codec.blocked import rotate
from laconic.plan.op_cost import bytes_of

_SAMPLE = 1 << 14
"""Values: whole blocks of every codec."""


def encode_bytes(name: str, numel: int, *, rotates: bool, device_type: str) -> float:
    """The bytes that coding `numel` fp32 values by the codec `name` reads and writes."""
    return numel * _per_value(name, rotates, device_type)[0]


def decode_bytes(name: str, numel: int, *, rotates: bool, device_type: str) -> float:
    """The bytes that decoding `numel` values, and adding them to others, reads and writes."""
    return numel * _per_value(name, rotates, device_type)[1]


@cache
def _per_value(name: str, rotates: bool, device_type: str) -> tuple[float, float]:
    codec: Codec = CODECS[name]
    code_bytes = codec.payload_bytes(_SAMPLE) / _SAMPLE
    if device_type != "cpu":
        return 4.0 + code_bytes, 8.0 + code_bytes
    values, total = torch.zeros(_SAMPLE), torch.zeros(_SAMPLE)

    def encode() -> torch.Tensor:
        return codec.encode(rotate(values) if rotates else values, check=False)

    code = encode()

    def decode() -> None:
        decoded = codec.decode(code, _SAMPLE)
        total.add_(rotate(decoded) if rotates else decoded)

    return _counted(encode) / _SAMPLE, _counted(decode) / _SAMPLE


class _Counter(TorchDispatchMode):
    nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nbytes += bytes_of(func, args, kwargs or {}, out)
        return out


def _counted(function: Callable[[], Any]) -> float:
    with _Counter() as counter:
        function()
    return counter.nbytes
