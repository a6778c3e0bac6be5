"""Codes of few bits, side by side in bytes, and taken apart again."""

import torch
from torch import Tensor


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Put codes of 1, 2, 4 or 8 bits side by side, the first in the lowest bits.

    Shapes: codes (n,), uint8, with n * bits a multiple of 8 -> (n * bits / 8,), uint8.
    """
    if bits == 8:
        return codes
    if bits == 4:  # a pair of codes is a number of 16 bits
        pairs = codes.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    parts = codes.view(-1, 8 // bits).unbind(1)
    packed = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (bits * place))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Take apart what `pack_bits` has put together: (n * bits / 8,), uint8 -> (n,), uint8."""
    if bits == 8:
        return packed
    parts = [packed >> shift for shift in range(0, 8, bits)]
    return (torch.stack(parts, dim=1) & (2**bits - 1)).view(-1)
