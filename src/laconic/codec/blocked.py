"""Codecs that keep few bits per value and one bf16 step per block of values.

[Note: Codes are whole multiples of a step]
A value is decoded as a small whole number times its block's step. The step has eight significant bits, so the product
is exact in fp32, with or without a fused multiply-add. So every device decodes the same bits. (A scale of max / 127,
rounded once more in the product, would not do that.) Steps are rounded to the nearest bf16 number, and are never zero
or denormal, which some devices flush to zero. A block with NaN or infinity gets a step that is NaN or infinite, and
decodes to NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from laconic.codec.base import Codec, by_size
from laconic.codec.bits import pack_bits, unpack
from laconic.codec.kernels import kept, kernels_for
from laconic.codec.rotation import rotated_numel

KERNEL_NUMEL = 2048
"""The values that a program of a kernel codes: sixteen for each thread of four warps."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""The magnitudes of a 4-bit number with two exponent bits and one mantissa bit, in steps."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NormalFloat4, ascending: quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314)."""
_TWO_BIT_STEP = 0.9957
"""The best step of four even levels for a normal distribution of variance 1 (J. Max, 1960, table II)."""


class KernelForm(NamedTuple):
    """The facts of a codec that the kernels of codec/blocked_triton.py need."""

    kind: Literal["even", "two", "float", "quantile"]
    bits: int
    largest: float
    """The steps that the largest value of a block takes; of two bits, half a step in root mean squares."""
    borders: Tensor
    """The borders between codes, fp32, where codes are looked up."""
    numbers: Tensor
    """The number of each code, in steps, fp32, where numbers are."""


class BlockCodec(Codec):
    """Codes with one bf16 step per block. The payload holds all codes, then all steps."""

    @by_size
    def payload_bytes(self, numel: int) -> int:
        """See `Codec.payload_bytes`: the codes, and two bytes per block."""
        return self.code_bytes(numel) + 2 * self.num_blocks(numel)

    @by_size
    def num_blocks(self, numel: int) -> int:
        """The number of blocks, and so of steps, of `numel` values."""
        return -(-numel // self.block)

    @abstractmethod
    def code_bytes(self, numel: int) -> int:
        """The bytes of the codes of `numel` values."""

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encode values (numel,), fp32. Returns codes (code_bytes(numel),), uint8, and steps (b,), bf16.

        Values that are not finite make their block NaN: [Note: Codes are whole multiples of a step].
        """
        numel = values.numel()
        whole = values if numel % self.block == 0 else _filled_up(values, self.num_blocks(numel) * self.block)
        codes, steps = self._quantize(whole.view(-1, self.block), numel)
        return codes if whole is values else codes[: self.code_bytes(numel)], steps

    def dequantize(self, codes: Tensor, steps: Tensor, numel: int) -> Tensor:
        """Decode what `quantize` returned for `numel` values: (numel,), fp32."""
        is_whole = numel % self.block == 0
        if not is_whole:
            codes = _filled_up(codes, self.code_bytes(self.num_blocks(numel) * self.block))
        values = self._dequantize(codes, steps.to(torch.float32).unsqueeze(1)).view(-1)
        return values if is_whole else values[:numel]

    @abstractmethod
    def form(self, device: torch.device) -> KernelForm:
        """The numbers by which the kernels of codec/blocked_triton.py know this codec."""

    @abstractmethod
    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Shapes: blocks (b, block), the last filled up with zeros -> codes (bytes,), uint8, and steps (b,), bf16."""

    @abstractmethod
    def _dequantize(self, codes: Tensor, steps: Tensor) -> Tensor:
        """Shapes: the codes of whole blocks (bytes,), uint8, and steps (b, 1), fp32 -> (b, block), fp32."""

    def dequantize_into(self, out: Tensor, codes: Tensor, steps: Tensor) -> None:
        """Decode what `quantize` returned into `out`, (numel,), of any floating dtype."""
        if (kernels := self._kernels(codes)) is not None:
            kernels.decode(self, codes, steps.view(torch.uint8), out)
        else:
            out.copy_(self.dequantize(codes, steps, out.numel()))

    def _encodes_by_kernel(self, out: Tensor, values: Tensor, base: Tensor | None, *, rotates: bool) -> bool:
        kernels = self._kernels(values)
        if kernels is not None and values.numel():
            codes, steps = self._parts(out, values.numel(), rotates=rotates)
            kernels.encode(self, values, base, codes, steps, rotates=rotates)
        return kernels is not None

    def _decodes_by_kernel(self, out: Tensor, payload: Tensor, *, adds: bool, rotates: bool) -> bool:
        kernels = self._kernels(payload)
        if kernels is not None and out.numel():
            codes, steps = self._parts(payload, out.numel(), rotates=rotates)
            kernels.decode(self, codes, steps, out, adds=adds, rotates=rotates)
        return kernels is not None

    @cached_property
    def has_kernels(self) -> bool:
        """Whether its blocks are powers of two, which hold whole rotations: triton's kernels know no others."""
        return 32 <= self.block <= KERNEL_NUMEL and self.block & (self.block - 1) == 0

    def _kernels(self, tensor: Tensor) -> ModuleType | None:
        """The module of triton's kernels, if they are for this codec and run on this tensor."""
        return kernels_for(tensor, "codec.blocked_triton") if self.has_kernels else None

    def _parts(self, payload: Tensor, numel: int, *, rotates: bool = False) -> tuple[Tensor, Tensor]:
        """The codes and the steps of a payload of `numel` values."""
        size = self.code_bytes(rotated_numel(numel) if rotates else numel)
        return payload[:size], payload[size:]

    def _encode(self, values: Tensor) -> Tensor:
        if values.is_cuda and (kernels := self._kernels(values)) is not None:
            payload = values.new_empty(self.payload_bytes(values.numel()), dtype=torch.uint8)
            kernels.encode(self, values, None, *self._parts(payload, values.numel()))
            return payload
        codes, steps = self.quantize(values)
        return torch.cat([codes, steps.view(torch.uint8)])

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        if payload.is_cuda and self._kernels(payload) is not None:
            values = torch.empty(numel, device=payload.device)
            self.decode_into(values, payload)
            return values
        size = self.code_bytes(numel)
        return self.dequantize(payload[:size], payload[size:].clone().view(torch.bfloat16), numel)

    def _decode_rotated(self, payload: Tensor, numel: int) -> Tensor:
        if not payload.is_cuda or self._kernels(payload) is None:
            return super()._decode_rotated(payload, numel)
        values = torch.empty(numel, device=payload.device)
        self.decode_into(values, payload, rotates=True)
        return values


class Even(BlockCodec):
    """Round to a whole number of equal steps. The largest value of a block takes 2^(bits - 1) - 1; zero is exact."""

    def __init__(self, bits: int, block: int = 128) -> None:
        """`bits` is 4 or 8; `block` is a multiple of 8."""
        self.name, self.bits, self.block = f"int{bits}", bits, block
        self._largest = 2 ** (bits - 1) - 1

    @by_size
    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: `bits` for each value."""
        return -(-numel * self.bits // 8)

    def form(self, device: torch.device) -> KernelForm:
        """See `BlockCodec.form`."""
        nothing = torch.zeros(1, device=device)
        return KernelForm("even", self.bits, float(self._largest), nothing, nothing)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        steps, inverses = _to_steps(blocks.abs().amax(1).div_(self._largest))
        # A step is rounded by at most one part in 512, so no code exceeds the largest.
        counts = blocks * inverses
        if self.bits == 8:
            return counts.round_().to(torch.int8).view(torch.uint8).view(-1), steps
        # the conversion cuts off what is behind the point, so this rounds to the nearest
        codes = counts.add_(self._largest + 0.5).to(torch.int8)
        return pack_bits(codes.view(torch.uint8).view(-1), self.bits), steps

    def _dequantize(self, codes: Tensor, steps: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.int8).to(torch.float32).view(-1, self.block).mul_(steps)
        return _look_up_pairs(_even_pairs(self._largest, codes.device), codes).view(-1, self.block).mul_(steps)


class TwoBit(BlockCodec):
    """Round to -3, -1, 1 or 3 half steps; a step is the best one for normal values of the block's root mean square.

    Zero is not a level, and large values are clipped: meant for rotated values, or with feedback of the error.
    """

    name = "int2"

    def __init__(self, block: int = 128) -> None:
        """`block` is a multiple of 4."""
        self.block = block

    @by_size
    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: two bits for each value."""
        return -(-numel // 4)

    def form(self, device: torch.device) -> KernelForm:
        """See `BlockCodec.form`."""
        nothing = torch.zeros(1, device=device)
        return KernelForm("two", 2, _TWO_BIT_STEP / 2, nothing, nothing)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        roots, largest = _root_mean_squares(blocks, numel)
        half_steps, inverses = _to_steps(roots * (_TWO_BIT_STEP / 2))
        codes = (blocks * (inverses / 2)).add_(2).clamp_(0, 3)
        half_steps.masked_fill_(largest == 0, 0)  # no level is zero, but a block of zeros stays so
        return pack_bits(codes.to(torch.uint8).view(-1), 2), half_steps

    def _dequantize(self, codes: Tensor, steps: Tensor) -> Tensor:
        return (2 * unpack(codes, 2).to(torch.float32) - 3).view(-1, self.block) * steps


class E2m1(BlockCodec):
    """Round to a sign and one of eight magnitudes, of which the largest value of a block takes the last."""

    name = "e2m1"

    def __init__(self, block: int = 128) -> None:
        """`block` is even."""
        self.block = block

    @by_size
    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: half a byte per value."""
        return -(-numel // 2)

    def form(self, device: torch.device) -> KernelForm:
        """See `BlockCodec.form`: borders are in half steps."""
        positive = torch.tensor(E2M1, device=device, dtype=torch.float32)
        numbers = torch.cat([positive, -positive])
        return KernelForm("float", 4, float(E2M1[-1]), positive[1:] + positive[:-1], numbers)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        _, nearest = _e2m1_tables(blocks.device)
        sizes = blocks.abs()
        steps, inverses = _to_steps(sizes.amax(1).div_(E2M1[-1]))
        halves = sizes.mul_(2 * inverses).nan_to_num_(nan=0.0).clamp_(0, len(nearest) - 1).to(torch.int32)
        codes = nearest.index_select(0, halves.view(-1)) | ((blocks.view(-1) < 0).to(torch.uint8) << 3)
        return pack_bits(codes, 4), steps

    def _dequantize(self, codes: Tensor, steps: Tensor) -> Tensor:
        pairs, _ = _e2m1_tables(codes.device)
        return _look_up_pairs(pairs, codes).view(-1, self.block).mul_(steps)


class Nf4(BlockCodec):
    """Round to the nearest of sixteen quantiles, scaled to the largest value of each block; two codes make a byte.

    Its steps are scales: the largest magnitude of a block, rounded up. So a product with a quantile is rounded, and may
    differ by device in the last bit. Source: NormalFloat4 of QLoRA (arXiv 2305.14314). The paper quantises its fp32
    scales once more; ours are bf16.
    """

    name = "nf4"

    def __init__(self, block: int = 64) -> None:
        """`block` is even."""
        self.block = block

    @by_size
    def code_bytes(self, numel: int) -> int:
        """See `BlockCodec.code_bytes`: half a byte per value."""
        return -(-numel // 2)

    def form(self, device: torch.device) -> KernelForm:
        """See `BlockCodec.form`."""
        values = torch.tensor(NF4, device=device)
        return KernelForm("quantile", 4, 1.0, (values[1:] + values[:-1]) / 2, values)

    def _quantize(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        _, borders = _nf4_tables(blocks.device)
        scales = _round_up_to_bf16(blocks.abs().amax(1))
        wide = scales.to(torch.float32).unsqueeze(1)
        codes = torch.bucketize(torch.where(wide > 0, blocks / wide, 0.0), borders).to(torch.uint8)
        return pack_bits(codes.view(-1), 4), scales

    def _dequantize(self, codes: Tensor, steps: Tensor) -> Tensor:
        pairs, _ = _nf4_tables(codes.device)
        return pairs.index_select(0, codes.to(torch.int32)).view(-1, self.block) * steps


def _root_mean_squares(blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The root mean square of each block, NaN if a value is not finite, and its largest magnitude.

    Shapes: blocks (b, block), fp32, `numel` values and zeros behind them -> (b,) and (b,).
    """
    sizes = blocks.new_full((len(blocks), 1), blocks.shape[1])
    sizes[-1] = numel - (len(blocks) - 1) * blocks.shape[1]
    largest = blocks.abs().amax(1, keepdim=True)
    # Divide before squaring: a square may exceed the range of fp32. The clamp avoids 0 / 0.
    roots = largest * (blocks / largest.clamp(min=1e-38)).square().sum(1, keepdim=True).div(sizes).sqrt()
    return roots.squeeze(1), largest.squeeze(1)


def _to_steps(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Round steps (b,), fp32, to bf16, and raise those below the smallest normal number to it. Overwrites `steps`.

    Returns the steps and their inverses, (b, 1), fp32.
    """
    rounded = steps.clamp_(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    return rounded, rounded.to(torch.float32).reciprocal_().unsqueeze(1)


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


def _look_up_pairs(pairs: Tensor, codes: Tensor) -> Tensor:
    """The two values of each byte: pairs (256, 2), fp32, and codes (n,), uint8 -> (2 n,), fp32.

    A pair is looked up as one number of 64 bits, which is several times as fast on a CPU.
    """
    return pairs.view(torch.float64).view(-1).index_select(0, codes.to(torch.int32)).view(torch.float32)


@lru_cache
def _even_pairs(largest: int, device: torch.device) -> Tensor:
    """The two numbers of each byte, (256, 2), of codes that count from minus `largest`."""
    return _pairs_by_byte(torch.arange(16, device=device, dtype=torch.float32) - largest)


@kept
def _e2m1_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of each byte, (256, 2), in steps, and the nearest magnitude for 0, 1, 2, ... half steps.

    The borders between magnitudes are whole numbers of half steps.
    """
    positive = torch.tensor(E2M1, device=device, dtype=torch.float32)
    borders = positive[1:] + positive[:-1]
    halves = torch.arange(2 * E2M1[-1] + 2, device=device)
    nearest = torch.bucketize(halves.to(torch.float32), borders, right=True).to(torch.uint8)
    return _pairs_by_byte(torch.cat([positive, -positive])), nearest


@kept
def _nf4_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of each byte, (256, 2), and the fifteen borders between the values."""
    values = torch.tensor(NF4, device=device)
    return _pairs_by_byte(values), (values[1:] + values[:-1]) / 2
