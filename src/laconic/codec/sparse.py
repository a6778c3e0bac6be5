"""A codec that keeps the largest values alone, in two bits each.

[Note: Places in a fixed number of bits]
The places of a chunk's kept values are sorted, so they need fewer than twelve bits each. The code of Elias and Fano
cuts the chunk into buckets of 2**l places. For each bucket it has a one for each kept place in it, and then a zero;
behind them are the lowest l bits of each place. That is 8 bits for each of 64 places. The length depends on `keep`
alone, so receivers know it beforehand. No code of a fixed length takes less than log2(C(4096, 64)) / 64 = 7.4 bits.
Such a code would save 6 % of a message, and compute with numbers of 472 bits. (For more than 1,024 places of 4,096 a
bitmap would be shorter. With so many, a codec of all values is better.)
"""

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.base import Codec
from laconic.codec.bits import pack_bits, unpack

CHUNK = 4096
"""The values among which the largest are found."""
_SCALE_BYTES = 4


class TopK(Codec):
    """The `keep` largest of each 4,096 values: for each its place, its sign, and one of two magnitudes.

    The magnitudes of a chunk are the means of the kept values below and above their mean. All other values become zero,
    so it wants feedback of the error. With 64 of 4,096 it takes 0.164 bits a value: [Note: Places in a fixed number of
    bits]. Source: SparseLoCo (arXiv 2508.15706), which keeps as many, in chunks as large, and two bits of each.
    """

    is_sparse = True

    def __init__(self, keep: int = 64) -> None:
        """`keep` is at most 4,096.

        Raises:
            ValueError: it is not, or less than 1.
        """
        if not 1 <= keep <= CHUNK:
            raise ValueError(f"TopK(keep={keep}) must keep 1 to {CHUNK} of each {CHUNK} values; 64 is usual")
        self.name, self.keep, self.block = f"top{keep}", keep, CHUNK
        self._low_bits = (CHUNK // keep).bit_length() - 1
        self._fields = (keep + (CHUNK >> self._low_bits), keep * self._low_bits, keep, keep)
        """The bits of a chunk: buckets, low bits of places, which magnitudes, and signs."""

    def payload_bytes(self, numel: int) -> int:
        """See `Codec.payload_bytes`: the bits of places, two bits for each kept value, and two bf16 magnitudes."""
        return -(-numel // CHUNK) * (-(-sum(self._fields) // 8) + _SCALE_BYTES)

    def _encode(self, values: Tensor) -> Tensor:
        chunks = functional.pad(values, (0, -values.numel() % CHUNK)).view(-1, CHUNK)
        places = chunks.abs().topk(self.keep, dim=1).indices.sort(1).values
        kept = chunks.gather(1, places)
        sizes = kept.abs()
        is_large = sizes > sizes.mean(1, keepdim=True)
        magnitudes = torch.stack([_mean_where(~is_large, sizes), _mean_where(is_large, sizes)], dim=1)
        fields = *self._fields_of(places), is_large, kept < 0
        bits = torch.cat([field.to(torch.uint8) for field in fields], dim=1)
        packed = pack_bits(functional.pad(bits, (0, -bits.shape[1] % 8)).view(-1), 1).view(len(chunks), -1)
        return torch.cat([packed, magnitudes.to(torch.bfloat16).view(torch.uint8)], dim=1).view(-1)

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        rows = payload.view(-(-numel // CHUNK), -1)
        packed, magnitudes = rows.split([rows.shape[1] - _SCALE_BYTES, _SCALE_BYTES], dim=1)
        bits = unpack(packed.reshape(-1), 1).view(len(rows), -1)[:, : sum(self._fields)]
        buckets, low, is_large, is_negative = bits.split(self._fields, dim=1)
        aligned = magnitudes.clone(memory_format=torch.contiguous_format)  # a row may have an odd address
        sizes = aligned.view(torch.bfloat16).to(torch.float32).gather(1, is_large.to(torch.int64))
        chunks = torch.zeros(len(rows), CHUNK, device=payload.device)
        chunks.scatter_(1, self._places_of(buckets, low), torch.where(is_negative > 0, -sizes, sizes))
        return chunks.view(-1)[:numel]

    def _fields_of(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The buckets and the low bits of places (c, keep), int64, ascending: [Note: Places in a fixed number of bits].

        Before the one of a place are the ones of earlier places, and the zeros of earlier buckets.
        """
        ones = (places >> self._low_bits) + torch.arange(self.keep, device=places.device)
        buckets = torch.zeros(len(places), self._fields[0], dtype=torch.uint8, device=places.device)
        low = (places.unsqueeze(2) >> torch.arange(self._low_bits, device=places.device)) & 1
        return buckets.scatter_(1, ones, 1), low.flatten(1)

    def _places_of(self, buckets: Tensor, low: Tensor) -> Tensor:
        """The inverse of `_fields_of`. Any bits, such as those of a damaged message, give places within the chunk."""
        ranks = torch.arange(self.keep, device=low.device).repeat(len(low), 1)
        ones = torch.searchsorted(buckets.cumsum(1), ranks + 1)
        lowest = low.unflatten(1, (self.keep, self._low_bits)) << torch.arange(self._low_bits, device=low.device)
        return (((ones - ranks) << self._low_bits) + lowest.sum(2)).clamp_(max=CHUNK - 1)


def _mean_where(mask: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the sizes (c, k) that the mask selects, (c,); zero where it selects none."""
    return (sizes * mask).sum(1) / mask.sum(1).clamp(min=1)
