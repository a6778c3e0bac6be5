"""Codecs that keep few bits per value and one bf16 scale per block of values: int8 and fp4."""

import math
from abc import abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from laconic.codec.base import Codec

E3M0 = (0.0, *(2.0**-k for k in range(6, -1, -1)))
"""The magnitudes of a 4-bit number with three exponent bits and no mantissa: seven powers of two."""
E2M1 = tuple(value / 6 for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The magnitudes of a 4-bit number with two exponent bits and one mantissa bit, divided by the largest."""
_MAX_CODE = 127
_SCALE_ROUNDING = 1 + 2**-7  # the largest factor by which `_round_up_to_bf16` enlarges a scale


class _BlockCodec(Codec):
    """Codes with one bf16 scale per block. The payload holds all codes, then all scales."""

    block: int

    def payload_bytes(self, numel: int) -> int:
        """See `Codec.payload_bytes`: the codes, and two bytes per block."""
        return self._code_bytes(numel) + 2 * self._num_blocks(numel)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    @abstractmethod
    def _code_bytes(self, numel: int) -> int:
        """The bytes of the codes of `numel` values."""

    @abstractmethod
    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Shapes: blocks (b, block), the last filled up with zeros -> codes (bytes,), uint8, and scales (b,), bf16."""

    @abstractmethod
    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Shapes: the codes of whole blocks (bytes,), uint8, and scales (b, 1), fp32 -> (b, block), fp32."""

    def _encode(self, values: Tensor) -> Tensor:
        numel = values.numel()
        padded = _filled_up(values, self._num_blocks(numel) * self.block)
        codes, scales = self._quantize(padded.view(-1, self.block), numel)
        return torch.cat([codes[: self._code_bytes(numel)], scales.view(torch.uint8)])

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        size = self._code_bytes(numel)
        codes = _filled_up(payload[:size], self._code_bytes(self._num_blocks(numel) * self.block))
        scales = payload[size:].clone().view(torch.bfloat16).to(torch.float32).unsqueeze(1)
        return self._dequantize(codes, scales).view(-1)[:numel]


class Int8(_BlockCodec):
    """255 even steps per block, from minus to plus its largest magnitude, or `clip` times its root mean square if less.

    The clip protects the resolution: without it, one large value would make the steps of its whole block large.
    Source: INTELLECT-1 (arXiv 2412.01152), which clips a whole tensor in this way.
    """

    name = "int8"

    def __init__(self, block: int = 256, clip: float = 6.0) -> None:
        self.block, self.clip = block, clip

    @property
    def max_relative_error(self) -> float:
        """The error of a block that is one spike. Blocks without spikes have 2.4 %."""
        lost = max(0.0, 1 - self.clip / math.sqrt(self.block))
        rounding = min(self.clip, math.sqrt(self.block)) * _SCALE_ROUNDING / (2 * _MAX_CODE)
        return math.hypot(lost, rounding)

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        sizes = blocks.new_full((len(blocks), 1), self.block)
        sizes[-1] = numel - (len(blocks) - 1) * self.block
        largest = blocks.abs().amax(1, keepdim=True)
        # Divide before squaring: a square may exceed the range of fp32. The clamp avoids 0 / 0.
        root = largest * (blocks / largest.clamp(min=1e-38)).square().sum(1, keepdim=True).div(sizes).sqrt()
        scales = _round_up_to_bf16(torch.minimum(largest, self.clip * root).squeeze(1))
        steps = scales.to(torch.float32).unsqueeze(1) / _MAX_CODE
        codes = torch.where(steps > 0, blocks / steps, 0.0).round_().clamp_(-_MAX_CODE, _MAX_CODE).to(torch.int8)
        return codes.view(-1).view(torch.uint8), scales

    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(torch.int8).to(torch.float32).view(-1, self.block) * (scales / _MAX_CODE)


class Fp4(_BlockCodec):
    """Round to a sign and one of eight magnitudes, scaled to the largest value of each block; two codes make a byte."""

    def __init__(self, name: str, magnitudes: tuple[float, ...], block: int = 64) -> None:
        """`magnitudes` are eight numbers, ascending, from 0 to 1; `block` is even."""
        self.name, self.block = name, block
        self._magnitudes = magnitudes

    @property
    def max_relative_error(self) -> float:
        """The error of rounding between two magnitudes, and of values that round to zero."""
        between = max((b - a) / (b + a) for a, b in zip(self._magnitudes[1:], self._magnitudes[2:], strict=False))
        flushed = self._magnitudes[1] / 2 * _SCALE_ROUNDING
        return math.hypot(between, flushed * math.sqrt(self.block - 1))

    def _code_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        _, borders = _tables(self._magnitudes, blocks.device)
        scales = _round_up_to_bf16(blocks.abs().amax(1))
        wide = scales.to(torch.float32).unsqueeze(1)
        magnitude = torch.bucketize(torch.where(wide > 0, blocks.abs() / wide, 0.0), borders).to(torch.uint8)
        codes = (magnitude | ((blocks < 0).to(torch.uint8) << 3)).view(-1, 2)
        return codes[:, 0] | (codes[:, 1] << 4), scales

    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        table, _ = _tables(self._magnitudes, codes.device)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=1)
        return table[nibbles.view(-1).to(torch.int64)].view(-1, self.block) * scales


def _filled_up(values: Tensor, numel: int) -> Tensor:
    """A copy of `values` with zeros behind it, `numel` elements in all."""
    padded = values.new_zeros(numel)
    padded[: values.numel()] = values
    return padded


def _round_up_to_bf16(scales: Tensor) -> Tensor:
    """The scales (b,) as bf16, rounded up so that no value exceeds its scale. Zero stays zero."""
    rounded = scales.to(torch.bfloat16)
    too_small = rounded.to(torch.float32) < scales
    larger = (rounded.view(torch.int16) + 1).view(torch.bfloat16)  # the next bf16 number, if `rounded` is positive
    return torch.where(too_small, larger, rounded)


@lru_cache
def _tables(magnitudes: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sixteen values by code, and the seven borders between the magnitudes."""
    positive = torch.tensor(magnitudes, device=device)
    return torch.cat([positive, -positive]), (positive[1:] + positive[:-1]) / 2
