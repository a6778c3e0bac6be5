"""Codecs that keep few bits per value and one bf16 scale per block of values: int8, fp4 and nf4."""

import itertools
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
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NormalFloat4, ascending: quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314)."""
_MAX_CODE = 127
_SCALE_ROUNDING = 1 + 2**-7  # the largest factor by which `_round_up_to_bf16` enlarges a scale


class BlockCodec(Codec):
    """Codes with one bf16 scale per block. The payload holds all codes, then all scales."""

    block: int
    """The number of values that share a scale."""

    def payload_bytes(self, numel: int) -> int:
        """See `Codec.payload_bytes`: the codes, and two bytes per block."""
        return self.code_bytes(numel) + 2 * self.num_blocks(numel)

    def num_blocks(self, numel: int) -> int:
        """The number of blocks, and so of scales, of `numel` values."""
        return -(-numel // self.block)

    @abstractmethod
    def code_bytes(self, numel: int) -> int:
        """The bytes of the codes of `numel` values."""

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encode values (numel,), fp32, finite. Returns codes (code_bytes(numel),), uint8, and scales (b,), bf16."""
        numel = values.numel()
        codes, scales = self._quantize(
            _filled_up(values, self.num_blocks(numel) * self.block).view(-1, self.block), numel
        )
        return codes[: self.code_bytes(numel)], scales

    def dequantize(self, codes: Tensor, scales: Tensor, numel: int) -> Tensor:
        """Decode what `quantize` returned for `numel` values: (numel,), fp32."""
        codes = _filled_up(codes, self.code_bytes(self.num_blocks(numel) * self.block))
        return self._dequantize(codes, scales.to(torch.float32).unsqueeze(1)).view(-1)[:numel]

    @abstractmethod
    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Shapes: blocks (b, block), the last filled up with zeros -> codes (bytes,), uint8, and scales (b,), bf16."""

    @abstractmethod
    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Shapes: the codes of whole blocks (bytes,), uint8, and scales (b, 1), fp32 -> (b, block), fp32."""

    def _encode(self, values: Tensor) -> Tensor:
        codes, scales = self.quantize(values)
        return torch.cat([codes, scales.view(torch.uint8)])

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        size = self.code_bytes(numel)
        return self.dequantize(payload[:size], payload[size:].clone().view(torch.bfloat16), numel)


class Int8(BlockCodec):
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

    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: one byte per value."""
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


class Fp4(BlockCodec):
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

    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: half a byte per value."""
        return -(-numel // 2)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        _, borders = _tables(self._magnitudes, blocks.device)
        scales = _round_up_to_bf16(blocks.abs().amax(1))
        wide = scales.to(torch.float32).unsqueeze(1)
        magnitude = torch.bucketize(torch.where(wide > 0, blocks.abs() / wide, 0.0), borders).to(torch.uint8)
        return _in_pairs(magnitude | ((blocks < 0).to(torch.uint8) << 3)), scales

    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        pairs, _ = _tables(self._magnitudes, codes.device)
        return pairs.index_select(0, codes.to(torch.int32)).view(-1, self.block) * scales


class Nf4(BlockCodec):
    """Round to the nearest of sixteen quantiles, scaled to the largest value of each block; two codes make a byte.

    Source: NormalFloat4 of QLoRA (arXiv 2305.14314). The paper quantises its fp32 scales once more; ours are bf16.
    """

    name = "nf4"

    def __init__(self, block: int = 64) -> None:
        """`block` is even."""
        self.block = block

    @property
    def max_relative_error(self) -> float:
        """The error of rounding between two values of one sign, and of values that round to zero."""
        pairs = [(a, b) for a, b in itertools.pairwise(NF4) if a * b > 0]
        between = max(abs(b - a) / abs(b + a) for a, b in pairs) * _SCALE_ROUNDING
        flushed = -NF4[6] / 2 * _SCALE_ROUNDING
        return math.hypot(between, flushed * math.sqrt(self.block - 1), _SCALE_ROUNDING - 1)

    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: half a byte per value."""
        return -(-numel // 2)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        _, borders = _nf4_tables(blocks.device)
        scales = _round_up_to_bf16(blocks.abs().amax(1))
        wide = scales.to(torch.float32).unsqueeze(1)
        return _in_pairs(torch.bucketize(torch.where(wide > 0, blocks / wide, 0.0), borders).to(torch.uint8)), scales

    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        tables = _nf4_tables.__wrapped__ if torch.compiler.is_compiling() else _nf4_tables  # no cache in a graph
        pairs, _ = tables(codes.device)
        return pairs.index_select(0, codes.to(torch.int32)).view(-1, self.block) * scales


def _in_pairs(codes: Tensor) -> Tensor:
    """Put two codes of four bits in a byte, the first one in the lower bits: any even shape -> (numel / 2,)."""
    codes = codes.view(-1, 2)
    return codes[:, 0] | (codes[:, 1] << 4)


def _pairs_by_byte(values: Tensor) -> Tensor:
    """The two values of each byte, (256, 2), from the sixteen values by code."""
    byte = torch.arange(256, device=values.device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


def _filled_up(values: Tensor, numel: int) -> Tensor:
    """`values` with zeros behind it, `numel` elements in all; `values` itself if there are so many."""
    if values.numel() == numel:
        return values
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
    """The two values of each byte, (256, 2), and the seven borders between the magnitudes."""
    positive = torch.tensor(magnitudes, device=device)
    return _pairs_by_byte(torch.cat([positive, -positive])), (positive[1:] + positive[:-1]) / 2


@lru_cache
def _nf4_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of each byte, (256, 2), and the fifteen borders between the values."""
    values = torch.tensor(NF4, device=device)
    return _pairs_by_byte(values), (values[1:] + values[:-1]) / 2
