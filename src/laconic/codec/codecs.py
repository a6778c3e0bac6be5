"""What a pseudo-gradient becomes on the wire: fp32, bf16, int8 or fp4, each with its scales in the same message.

[Note: Decoded is what counts]
Islands stay equal only if all of them apply the very same numbers, so whoever encodes also uses what decoding gives
back, the sender included. A codec is therefore a pair of pure functions, and its error is measured, not assumed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor


class Codec(ABC):
    """A pair of pure functions between fp32 values and bytes. Values are encoded in blocks that know nothing of each
    other; the last one may be shorter."""

    name: str

    @property
    @abstractmethod
    def max_relative_error(self) -> float:
        """Bound of |decode(encode(x)) - x| / |x|, Euclidean norms, for any finite x that does not underflow."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Bytes that `numel` values take on the wire."""

    def encode(self, values: Tensor) -> Tensor:
        """Shapes: values (numel,), fp32, contiguous -> (payload_bytes(numel),), uint8.

        Raises:
            ValueError: a value is not finite, or `values` is not a flat fp32 tensor.
        """
        if values.ndim != 1 or values.dtype != torch.float32:
            raise ValueError(
                f"a codec takes flat fp32 tensors, got shape {tuple(values.shape)}, {values.dtype}; use "
                "x.float().view(-1)"
            )
        if not bool(torch.isfinite(values).all()):
            raise ValueError(
                "a pseudo-gradient holds NaN or infinity: an island has diverged. Lower the inner learning rate, clip "
                "gradients, or resume from an earlier checkpoint"
            )
        return self._encode(values)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Shapes: payload (payload_bytes(numel),), uint8 -> (numel,), fp32."""
        if payload.shape != (self.payload_bytes(numel),):
            raise ValueError(
                f"{numel} values in {self.name} take {self.payload_bytes(numel)} bytes, got {tuple(payload.shape)}"
            )
        return self._decode(payload, numel)

    @abstractmethod
    def _encode(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, numel: int) -> Tensor: ...


class Plain(Codec):
    """A floating-point type as it is."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype

    @property
    def max_relative_error(self) -> float:
        """Half a unit in the last place."""
        return 0.0 if self._dtype == torch.float32 else torch.finfo(self._dtype).eps / 2

    def payload_bytes(self, numel: int) -> int:
        """Two or four bytes each."""
        return numel * self._dtype.itemsize

    def _encode(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        return (
            payload.clone().view(self._dtype).to(torch.float32) if numel else payload.new_empty(0, dtype=torch.float32)
        )


class _Blocked(Codec):
    """Codes with one bf16 scale per block. Payload: all codes, then all scales."""

    block: int

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _code_bytes(self, numel: int) -> int:
        raise NotImplementedError

    def payload_bytes(self, numel: int) -> int:
        """Codes and two bytes per block."""
        return self._code_bytes(numel) + 2 * self._num_blocks(numel)

    def _blocks(self, values: Tensor) -> Tensor:
        """(blocks, block), padded with zeros."""
        padded = torch.zeros(self._num_blocks(values.numel()) * self.block)
        padded[: values.numel()] = values
        return padded.view(-1, self.block)

    def _joined(self, codes: Tensor, scales: Tensor, numel: int) -> Tensor:
        return torch.cat([codes[: self._code_bytes(numel)], scales.view(torch.uint8)]) if numel else codes[:0]

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        size = self._code_bytes(numel)
        return payload[:size], payload[size:].clone().view(torch.bfloat16).to(torch.float32).unsqueeze(1)


def _scale_up(scales: Tensor) -> Tensor:
    """(blocks,) as bf16, rounded up so that nothing exceeds its scale; zero stays zero."""
    rounded = scales.to(torch.bfloat16)
    too_small = rounded.to(torch.float32) < scales
    larger = (rounded.view(torch.int16) + 1).view(torch.bfloat16)  # the next one, for positive numbers
    return torch.where(too_small, larger, rounded)


class Int8(_Blocked):
    """255 even steps per block, between plus and minus the largest value, or `clip` times the root mean square if that
    is less: a lone spike then does not cost all others their resolution.

    Source: the clipping is Prime's (arXiv 2412.01152), there over a whole tensor.
    """

    name = "int8"

    def __init__(self, block: int = 256, clip: float = 6.0) -> None:
        self.block, self.clip = block, clip

    @property
    def max_relative_error(self) -> float:
        """Of a block that is one spike; without spikes it is 2.4 %."""
        lost = max(0.0, 1 - self.clip / math.sqrt(self.block))
        rounding = min(self.clip, math.sqrt(self.block)) * (1 + 2**-7) / 254
        return math.hypot(lost, rounding)

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _encode(self, values: Tensor) -> Tensor:
        blocks = self._blocks(values)
        sizes = torch.full((len(blocks), 1), float(self.block))
        if len(blocks):
            sizes[-1] = values.numel() - (len(blocks) - 1) * self.block
        largest = blocks.abs().amax(1, keepdim=True)
        # Scaled first: a square may be beyond fp32.
        root = largest * (blocks / largest.clamp(min=1e-38)).square().sum(1, keepdim=True).div(sizes).sqrt()
        scales = _scale_up(torch.minimum(largest, self.clip * root).squeeze(1))
        steps = scales.to(torch.float32).unsqueeze(1) / 127
        codes = torch.where(steps > 0, blocks / steps, 0.0).round_().clamp_(-127, 127).to(torch.int8)
        return self._joined(codes.view(-1).view(torch.uint8), scales, values.numel())

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        codes, scales = self._split(payload, numel)
        padded = torch.zeros(self._num_blocks(numel) * self.block)
        padded[:numel] = codes.view(torch.int8)
        return (padded.view(-1, self.block) * (scales / 127)).view(-1)[:numel]


class Fp4(_Blocked):
    """A sign and one of eight magnitudes, two codes to a byte, scaled to the largest value of each block."""

    def __init__(self, name: str, magnitudes: tuple[float, ...], block: int = 64) -> None:
        """`magnitudes`: eight, ascending, from 0 to 1."""
        self.name, self.block = name, block
        self._magnitudes = magnitudes

    @property
    def max_relative_error(self) -> float:
        """Nearest rounding between magnitudes, and what is flushed to zero."""
        between = max((b - a) / (b + a) for a, b in zip(self._magnitudes[1:], self._magnitudes[2:], strict=False))
        flushed = self._magnitudes[1] / 2 * (1 + 2**-7)
        return math.hypot(between, flushed * math.sqrt(self.block - 1))

    def _code_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def _encode(self, values: Tensor) -> Tensor:
        table, borders = _tables(self._magnitudes)
        del table
        blocks = self._blocks(values)
        scales = _scale_up(blocks.abs().amax(1))
        wide = scales.to(torch.float32).unsqueeze(1)
        magnitude = torch.bucketize(torch.where(wide > 0, blocks.abs() / wide, 0.0), borders).to(torch.uint8)
        codes = (magnitude | ((blocks < 0).to(torch.uint8) << 3)).view(-1, 2)
        return self._joined(codes[:, 0] | (codes[:, 1] << 4), scales, values.numel())

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        table, _ = _tables(self._magnitudes)
        packed, scales = self._split(payload, numel)
        codes = torch.zeros(self._num_blocks(numel) * self.block, dtype=torch.uint8).view(-1, 2)
        codes[: len(packed), 0] = packed & 15
        codes[: len(packed), 1] = packed >> 4
        return (table[codes.view(-1).to(torch.int64)].view(-1, self.block) * scales).view(-1)[:numel]


@lru_cache
def _tables(magnitudes: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The sixteen values by code, and the borders between magnitudes."""
    positive = torch.tensor(magnitudes)
    return torch.cat([positive, -positive]), (positive[1:] + positive[:-1]) / 2


E3M0 = (0.0, *(2.0**-k for k in range(6, -1, -1)))
E2M1 = tuple(value / 6 for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Plain("fp32", torch.float32),
        Plain("bf16", torch.bfloat16),
        Int8(),
        Fp4("fp4", E3M0),
        Fp4("fp4-e2m1", E2M1),
    )
}
"""By name. `fp4` is e3m0, three exponent bits: pseudo-gradients span many scales (arXiv 2501.18512)."""


def codec_named(codec: str | Codec) -> Codec:
    """Raises: ValueError if there is no codec of that name."""
    if isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise ValueError(f"codec={codec!r} is not known; use one of {', '.join(CODECS)}")
    return CODECS[codec]
