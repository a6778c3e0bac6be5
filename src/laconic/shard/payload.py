"""A bucket's shards in few bits: where the codes of each tensor lie in a message between two nodes.

[Note: Payloads]
A shard is coded tensor by tensor, so that no block of a codec has values of two tensors, and in pieces that fit into a
processor's cache. The codes of the pieces follow each other. The shards that cross on one way, those of a node shard,
hold different tensors, so their payloads differ by some bytes. All are as long as the longest, since collectives want
equal sizes. Every rank works out all of it from the layout; a message holds codes and steps only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from laconic.codec import Codec
from laconic.codec.rotation import SIZE as ROTATED
from laconic.codec.rotation import rotate
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import round_up
from laconic.shard.bucket import Bucket

HOST_PIECE_NUMEL, DEVICE_PIECE_NUMEL = 1 << 17, 1 << 22
"""The values that are coded at once: 512 KiB of fp32 on a CPU, whose caches they should fit, and 16 MiB elsewhere."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a shard's values, and their codes in the payload."""

    values: slice
    codes: slice
    coded_numel: int
    """The values with the zeros that fill up the last rotation."""

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.values.stop - self.values.start


class Payload:
    """Encodes and decodes the shards of one bucket: [Note: Payloads]."""

    def __init__(self, bucket: Bucket, codec: Codec, *, rotates: bool = False) -> None:
        """Code the shards of a bucket that cross on this rank's way; with `rotates`, rotated in runs of 32."""
        self._codec, self._rotates = codec, rotates
        numel = HOST_PIECE_NUMEL if bucket.cluster.device_type == "cpu" else DEVICE_PIECE_NUMEL
        self._pieces = [list(_pieces(bucket.layout, shard, codec, numel, rotates=rotates)) for shard in bucket.peers]
        self.nbytes = max((pieces[-1].codes.stop for pieces in self._pieces if pieces), default=0)
        """The bytes of the message for one shard."""

    def encode(self, index: int, values: Callable[[slice], Tensor], payload: Tensor) -> None:
        """Write the codes of a shard, the `index`-th of those that travel together, into `payload`, (nbytes,), uint8.

        `values` returns the values of a run of the shard, (n,), fp32.
        """
        for piece in self._pieces[index]:
            given = values(piece.values)
            if self._rotates:
                given = rotate(_with_zeros(given, piece.coded_numel))
            payload[piece.codes] = self._codec.encode(given, check=False)

    def decode(self, index: int, payload: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the runs of a shard and their values, (n,), fp32, that `encode` has written."""
        for piece in self._pieces[index]:
            values = self._codec.decode(payload[piece.codes], piece.coded_numel)
            yield piece.values, (rotate(values)[: piece.numel] if self._rotates else values)


def _pieces(layout: BucketLayout, shard: int, codec: Codec, piece_numel: int, *, rotates: bool) -> Iterator[Piece]:
    """The pieces of one shard, in order."""
    begin_byte = 0
    for index in range(len(layout.slots)):
        extent = layout.extent(index, shard)
        numel = 0 if extent is None else extent.numel
        first = layout.offset_in_shard(index, shard)
        for begin in range(first, first + numel, piece_numel):
            end = min(begin + piece_numel, first + numel)
            coded_numel = round_up(end - begin, ROTATED) if rotates else end - begin
            end_byte = begin_byte + codec.payload_bytes(coded_numel)
            yield Piece(slice(begin, end), slice(begin_byte, end_byte), coded_numel)
            begin_byte = end_byte


def _with_zeros(values: Tensor, numel: int) -> Tensor:
    return F.pad(values, (0, numel - values.numel()))
