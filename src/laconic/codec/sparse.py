"""A codec that keeps the largest values alone, in two bits each."""

import torch
from torch import Tensor

from laconic.codec.base import Codec

CHUNK = 4096
"""The values among which the largest are found: their places take twelve bits."""
_SCALE_BYTES = 4


class TopK(Codec):
    """The `keep` largest of each 4,096 values: for each its place, its sign, and one of two magnitudes.

    The magnitudes of a chunk are the means of the kept values below and above their mean. All other values become zero,
    so it wants feedback of the error. With 64 of 4,096 it takes 0.227 bits a value. Source: SparseLoCo (arXiv
    2508.15706), which keeps as many, in chunks as large, and two bits of each.
    """

    is_sparse = True

    def __init__(self, keep: int = 64) -> None:
        """`keep` is a multiple of 4, at most 4,096."""
        self.name, self.keep, self.block = f"top{keep}", keep, CHUNK

    @property
    def max_relative_error(self) -> float:
        """The bound for values of one size, of which nearly all are left out. Magnitudes are rounded to bf16."""
        return 1 + 2**-8

    def payload_bytes(self, numel: int) -> int:
        """See `Codec.payload_bytes`: twelve bits and two bits for each kept value, and two bf16 magnitudes."""
        return -(-numel // CHUNK) * (self.keep * 14 // 8 + _SCALE_BYTES)

    def _encode(self, values: Tensor) -> Tensor:
        chunks = torch.nn.functional.pad(values, (0, -values.numel() % CHUNK)).view(-1, CHUNK)
        places = chunks.abs().topk(self.keep, dim=1).indices.sort(1).values
        kept = chunks.gather(1, places)
        sizes = kept.abs()
        is_large = sizes > sizes.mean(1, keepdim=True)
        magnitudes = torch.stack([_mean_where(~is_large, sizes), _mean_where(is_large, sizes)], dim=1)
        codes = is_large.to(torch.uint8) | ((kept < 0).to(torch.uint8) << 1)
        parts = _pack_places(places), _pack_pairs(codes), magnitudes.to(torch.bfloat16).view(torch.uint8)
        return torch.cat(parts, dim=1).view(-1)

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        rows = payload.view(-(-numel // CHUNK), -1)
        packed_places, packed_codes, magnitudes = rows.split([self.keep * 12 // 8, self.keep // 4, _SCALE_BYTES], dim=1)
        shifts = torch.arange(0, 8, 2, device=payload.device, dtype=torch.uint8)
        codes = ((packed_codes.unsqueeze(2) >> shifts) & 3).flatten(1)
        sizes = magnitudes.contiguous().view(torch.bfloat16).to(torch.float32).gather(1, (codes & 1).to(torch.int64))
        chunks = torch.zeros(len(rows), CHUNK, device=payload.device)
        chunks.scatter_(1, _unpack_places(packed_places), torch.where(codes > 1, -sizes, sizes))
        return chunks.view(-1)[:numel]


def _mean_where(mask: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the sizes (c, k) that the mask selects, (c,); zero where it selects none."""
    return (sizes * mask).sum(1) / mask.sum(1).clamp(min=1)


def _pack_places(places: Tensor) -> Tensor:
    """Two places of twelve bits in three bytes: (c, k), int64 -> (c, 1.5 k), uint8."""
    first, second = places.view(len(places), -1, 2).unbind(2)
    parts = first & 255, (first >> 8) | ((second & 15) << 4), second >> 4
    return torch.stack(parts, dim=2).flatten(1).to(torch.uint8)


def _unpack_places(packed: Tensor) -> Tensor:
    """The inverse of `_pack_places`: (c, 1.5 k), uint8 -> (c, k), int64."""
    low, middle, high = packed.reshape(len(packed), -1, 3).to(torch.int64).unbind(2)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=2).flatten(1)


def _pack_pairs(codes: Tensor) -> Tensor:
    """Four codes of two bits in a byte: (c, k), uint8 -> (c, k / 4), uint8."""
    first, second, third, fourth = codes.view(len(codes), -1, 4).unbind(2)
    return first | (second << 2) | (third << 4) | (fourth << 6)
