"""The dynamic 8-bit map of AdamW8bit's states: 256 numbers, and rounding to one of them.

[Note: Dithered rounding]
A moment decays by a few per cent a step, and neighbouring small numbers of the map differ by up to some ten per cent.
If values were rounded to the nearest number, small moments would never decay, and second moments that stay too large
slow training down. So a value between two numbers of the map goes up or down at random, with the probabilities that
keep its mean. The random number is a hash of the value's bits, its place in the block, and the step. It is therefore
the same on any number of ranks.
"""

from functools import cache

import torch
from torch import Tensor

DITHER_FACTORS = (-2048144789, -1028477387)
"""The multipliers of the hash, two int32. The hash multiplies by the first, combines the product with itself shifted by
15 bits, and multiplies by the second, modulo 2^32. This is the last part of MurmurHash3."""
DITHER_BITS = 12
"""The upper bits of the hash that make the random number. They are few enough that the border between two numbers of
the map stays below the upper one in fp32."""

_DITHER_STRIDE = 0x85EBCA6B  # the hash adds it once per step
_NUM_CODES = 256
_NUM_DECADES = 7


class DynamicMap:
    """256 numbers of magnitude up to 1 that lie close together near 0: the dynamic tree map of 8-bit optimizers.

    The map has seven decades from 1e-7 to 1. Decade k has 2^k numbers of each sign (2^(k + 1) in the unsigned map): the
    midpoints of as many equal parts of the decade. The map also has 0 and 1. The unsigned map is for second moments,
    whose root is a denominator: in it only 0 rounds to 0, and values between 0 and the first number round up.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861. The rounding is our own:
    [Note: Dithered rounding]. Reference: tests/reference/adamw8bit.py, bit-equal.
    """

    LOWEST, HIGHEST = 0x3400, 0x3F80
    """The upper 16 bits of 2^-23, below which the map has no number but 0, and of 1, its largest number."""

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        self.values = torch.tensor(map_values(signed=signed), device=device)
        """The numbers, (256,), fp32, ascending."""
        self.zero = int((self.values == 0).nonzero())  # the code of 0
        self.gaps = self.values.diff()
        """The distance from each number to the next, (255,), fp32."""
        if not signed:
            self.gaps[0] = 0.0
        # A search for every value is slow. The upper 16 bits of a value (its bfloat16) leave at most two codes below
        # the value: the first one for all values with these bits, and the next one, if the value is above `_next`.
        above = self.values[1:]
        upper = torch.arange(2**16, device=device, dtype=torch.int32) << 16
        ends = upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)
        first = torch.bucketize(torch.fmin(*ends), above).clamp_(max=_NUM_CODES - 2)
        assert (torch.bucketize(torch.fmax(*ends), above).clamp_(max=_NUM_CODES - 2) - first).max() <= 1
        self._first = first.to(torch.int32)
        self._next = above[first]
        by_sign = self._first.view(2, -1)[: 2 if signed else 1, : self.HIGHEST + 1].to(torch.uint8)
        lowest = by_sign[:, : self.LOWEST + 1].amin(1, keepdim=True)  # all below the lowest share its entry
        self.near = torch.cat([lowest, by_sign[:, self.LOWEST + 1 :]], dim=1).view(-1)
        """A code not above the greatest number that is smaller than a value, and at most one code from it, by the upper
        16 bits of the value, from LOWEST to HIGHEST; then the same for negative values. Lower ones take the first."""

    @property
    def nbytes(self) -> int:
        """The bytes of the tables."""
        return sum(tensor.nbytes for tensor in (self.values, self.gaps, self._first, self._next, self.near))

    def encode(self, values: Tensor, salt: Tensor) -> Tensor:
        """Round each value to one of the two numbers beside it; a number of the map keeps its own code.

        Shapes: `values`, any, fp32, contiguous, in [-1, 1] -> codes, uint8, of the same shape. `salt`, int32,
        broadcasts to that shape; it enters the hash of [Note: Dithered rounding].
        """
        flat = values.view(-1)
        bits = flat.view(torch.int32)
        upper = bits.bitwise_right_shift(16).bitwise_and_(0xFFFF)
        below = self._first.index_select(0, upper)
        below += flat > self._next.index_select(0, upper)
        dice = (values.view(torch.int32) + salt).view(-1).mul_(DITHER_FACTORS[0])
        dice = dice.bitwise_xor_(dice.bitwise_right_shift(15)).mul_(DITHER_FACTORS[1])
        dice.bitwise_right_shift_(32 - DITHER_BITS).bitwise_and_(2**DITHER_BITS - 1)
        borders = self.gaps.index_select(0, below).mul_(dice).mul_(2.0**-DITHER_BITS)
        borders += self.values.index_select(0, below)
        below += flat > borders
        return below.to(torch.uint8).view(values.shape)


@cache
def dynamic_map(device: torch.device, *, signed: bool) -> DynamicMap:
    """The map with its tables on a device; made once."""
    return DynamicMap(signed=signed, device=device)


def map_values(*, signed: bool) -> list[float]:
    """The 256 numbers of a `DynamicMap`, ascending, each representable in fp32."""
    numbers = [0.0, 1.0]
    for decade in range(_NUM_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade + 1 - _NUM_DECADES) for part in range(parts)]
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32).tolist()


def quantize(values: Tensor, codebook: DynamicMap, *, step: int) -> tuple[Tensor, Tensor]:
    """Divide each block by its largest magnitude, its scale, and encode the quotients. `values` is overwritten.

    `step` is the optimizer's step, for [Note: Dithered rounding].
    Shapes: values (a, height, b, width), fp32 -> codes, uint8, of the same shape, and scales (a, b), fp32.
    """
    scales = values.abs().amax((1, 3))
    divisors = torch.where(scales == 0, 1.0, scales)
    _, height, _, width = values.shape
    place = torch.arange(height * width, device=values.device, dtype=torch.int32).view(1, height, 1, width)
    return codebook.encode(values.div_(divisors[:, None, :, None]), place + dither_offset(step)), scales


def dequantize(codes: Tensor, scales: Tensor, codebook: DynamicMap) -> Tensor:
    """Decode what `quantize` returned: codes (a, height, b, width) and scales (a, b) -> values like codes, fp32."""
    index = codes.reshape(-1).to(torch.int32)
    return codebook.values.index_select(0, index).view(codes.shape).mul_(scales[:, None, :, None])


def dither_offset(step: int) -> int:
    """The int32 that the hash adds for an optimizer step."""
    return (step * _DITHER_STRIDE + 2**31) % 2**32 - 2**31
