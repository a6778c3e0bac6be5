"""Codes of few bits, side by side in bytes, and taken apart again."""

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.fused import kept


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Put codes of 1, 2, 3, 4 or 8 bits side by side, the first in the lowest bits.

    Shapes: codes (n,), uint8, with n * bits a multiple of 8, and of 24 for three bits -> (n * bits / 8,), uint8.
    """
    if bits == 8:
        return codes
    if bits == 4:  # a pair of codes is a number of 16 bits
        pairs = codes.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    if bits == 3:
        a, b, c, d, e, f, g, h = codes.view(-1, 8).unbind(1)
        low = a | (b << 3) | (c << 6)
        middle = (c >> 2) | (d << 1) | (e << 4) | (f << 7)
        high = (f >> 1) | (g << 2) | (h << 5)
        return torch.stack([low, middle, high], dim=1).view(-1)
    parts = codes.view(-1, 8 // bits).unbind(1)
    packed = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (bits * place))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Take apart what `pack_bits` has put together: (n * bits / 8,), uint8 -> (n,), uint8."""
    if bits == 8:
        return packed
    if bits == 3:
        low, middle, high = packed.view(-1, 3).unbind(1)
        parts: tuple[Tensor, ...] = (
            low, low >> 3, (low >> 6) | (middle << 2), middle >> 1, middle >> 4, (middle >> 7) | (high << 1), high >> 2,
            high >> 5,
        )  # fmt: skip
    else:
        parts = tuple(packed >> shift for shift in range(0, 8, bits))
    return (torch.stack(parts, dim=1) & (2**bits - 1)).view(-1)


def pack_fives(counts: Tensor) -> Tensor:
    """Put five numbers of -1, 0 and 1 into a byte: plus one they are digits of base three, the first the lowest.

    Zeros fill up the last byte. Shapes: counts (n,), fp32 -> (n / 5 rounded up,), uint8.
    """
    first, second, third, fourth, fifth = functional.pad(counts, (0, -len(counts) % 5)).view(-1, 5).unbind(1)
    sums = first.add(second, alpha=3).add_(third, alpha=9).add_(fourth, alpha=27).add_(fifth, alpha=81)
    return sums.add_(121).to(torch.uint8)


def unpack_fives(codes: Tensor) -> Tensor:
    """Take apart what `pack_fives` has put together: (n,), uint8 -> (5 n,), fp32. Any byte has five numbers."""
    if torch.compiler.is_compiling():  # compiled arithmetic needs no table
        return _fives_of(codes).view(-1)
    return _fives_by_byte(codes.device).index_select(0, codes.to(torch.int32)).view(-1)


def _fives_of(codes: Tensor) -> Tensor:
    """The five numbers of each byte, by division: (n,), uint8 -> (n, 5), fp32."""
    return torch.stack([codes // 3**place % 3 for place in range(5)], dim=1).to(torch.float32) - 1


@kept
def _fives_by_byte(device: torch.device) -> Tensor:
    """The five numbers of each byte, (256, 5), fp32. A CPU copies rows several times as fast as it divides."""
    return _fives_of(torch.arange(256, dtype=torch.uint8, device=device))
