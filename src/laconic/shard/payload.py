"""A bucket's shards in few bits: where the codes of each tensor lie in a message between two nodes.

[Note: Payloads]
No block of a codec has values of two tensors. So tensors are coded on their own, or together with the tensors before
them if those end on a block's border, as they mostly do. Long runs are coded in pieces that fit into a processor's
cache. Vectors (norms, biases) are few and matter much, so they travel as they are, between the codes of matrices. So a
bucket is one message, and its layout does not depend on the wire. The shards that cross on one way, those of a node
shard, hold different tensors, so their payloads differ by some bytes. All are as long as the longest, since collectives
want equal sizes. Every rank works out all of it from the layout: a message has no header.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from laconic.codec import CODECS, Codec
from laconic.codec.rotation import SIZE as ROTATED
from laconic.codec.rotation import rotate
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import round_up
from laconic.shard.bucket import Bucket

HOST_PIECE_NUMEL, DEVICE_PIECE_NUMEL = 1 << 18, 1 << 22
"""The values that are coded at once: 1 MiB of fp32 on a CPU, whose caches they should fit, and 16 MiB elsewhere."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a shard's values, all of matrices or all of vectors, and their codes in the payload."""

    values: slice
    codes: slice
    codec: Codec
    coded_numel: int
    """The values, with the zeros that fill up the last rotation."""
    is_rotated: bool
    is_exact: bool
    """True for vectors, whose values travel as they are."""

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.values.stop - self.values.start


class Payload:
    """Encodes and decodes the shards of one bucket: [Note: Payloads]."""

    def __init__(self, bucket: Bucket, codec: Codec, *, plain: torch.dtype, rotates: bool = False) -> None:
        """Code the shards of a bucket that cross on this rank's way.

        Args:
            bucket: the bucket.
            codec: the codec of matrices.
            plain: the dtype in which vectors travel.
            rotates: rotate matrices in runs of 32 first.
        """
        self._codec, self._plain = codec, CODECS["bf16" if plain is torch.bfloat16 else "fp32"]
        self._rotates = rotates
        self._piece_numel = HOST_PIECE_NUMEL if bucket.cluster.device_type == "cpu" else DEVICE_PIECE_NUMEL
        self._pieces = [list(self._pieces_of(bucket.layout, shard)) for shard in bucket.peers]
        self.nbytes = max((pieces[-1].codes.stop for pieces in self._pieces if pieces), default=0)
        """The bytes of the message for one shard."""

    def encode(self, index: int, values: Callable[[Piece], Tensor], payload: Tensor) -> None:
        """Write the codes of a shard, the `index`-th of those that travel together, into `payload`, (nbytes,), uint8.

        `values` returns the values of a piece, (n,), fp32.
        """
        for piece in self._pieces[index]:
            given = values(piece)
            if piece.is_rotated:
                filling = piece.coded_numel - piece.numel
                given = rotate(F.pad(given, (0, filling)) if filling else given)
            payload[piece.codes] = piece.codec.encode(given, check=False)

    def decode(self, index: int, payload: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the pieces of a shard and their values, (n,), fp32, that `encode` has written."""
        for piece in self._pieces[index]:
            values = piece.codec.decode(payload[piece.codes], piece.coded_numel)
            yield piece, (rotate(values)[: piece.numel] if piece.is_rotated else values)

    def _pieces_of(self, layout: BucketLayout, shard: int) -> Iterator[Piece]:
        """The pieces of one shard, in order."""
        begin_byte = 0
        for first, last, is_exact in self._runs_of(layout, shard):
            codec, is_rotated = (self._plain, False) if is_exact else (self._codec, self._rotates)
            for begin in range(first, last, self._piece_numel):
                end = min(begin + self._piece_numel, last)
                coded_numel = round_up(end - begin, ROTATED) if is_rotated else end - begin
                end_byte = begin_byte + codec.payload_bytes(coded_numel)
                codes = slice(begin_byte, end_byte)
                yield Piece(slice(begin, end), codes, codec, coded_numel, is_rotated, is_exact)
                begin_byte = end_byte

    def _runs_of(self, layout: BucketLayout, shard: int) -> list[tuple[int, int, bool]]:
        """The runs (begin, end, is_exact) of a shard's values that are coded together, in order: [Note: Payloads]."""
        runs: list[tuple[int, int, bool]] = []
        for index, slot in enumerate(layout.slots):
            extent = layout.extent(index, shard)
            if extent is None:
                continue
            is_exact = len(slot.shape) < 2
            begin = first = layout.offset_in_shard(index, shard)
            if runs and runs[-1][1:] == (first, is_exact) and (first - runs[-1][0]) % self._block(is_exact) == 0:
                begin, _, _ = runs.pop()
            runs.append((begin, first + extent.numel, is_exact))
        return runs

    def _block(self, is_exact: bool) -> int:
        return (self._plain if is_exact else self._codec).block
