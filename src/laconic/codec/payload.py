"""The messages of tensors that cross in few bits: which values each has, in which codec, at which bytes.

[Note: Payloads]
No block of a codec has values of two tensors. So tensors are coded on their own, or together with the tensors before
them if those end on a block's border, as they mostly do. Long runs are coded in pieces that fit into a processor's
cache. Vectors (norms, biases) are few and matter much, so they travel as they are, between the codes of matrices. So a
bucket is one message, and its layout does not depend on the wire. Between nodes the shards of a node shard cross, and
between islands the parts of one shard. They hold different tensors, so their payloads differ by some bytes. All are as
long as the longest, since collectives want equal sizes. Every rank works out all of it from the layout: a message has
no header.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codec import CODECS, Codec
from laconic.codec.coding import PartCoding
from laconic.codec.rotation import rotated_numel
from laconic.comm.moves import Tensors
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import round_up

HOST_PIECE_NUMEL, DEVICE_PIECE_NUMEL = 1 << 18, 1 << 24
"""The values that are coded at once: 1 MiB of fp32 on a CPU, whose caches they should fit, and 64 MiB elsewhere, where
a launch takes the host as long as it takes the device to code a sixteenth of that."""
_BYTE_ALIGNMENT = 16
"""Every piece begins at a multiple of so many bytes of its message, and messages have a multiple of them: devices then
read and write several values at once, and NCCL takes its fast path."""
_PART_ALIGNMENT = 128
"""The elements of a codec's block. A part of a shard has whole blocks, but for the last part."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a part's values that is coded at once, and its codes in the message."""

    values: slice
    codes: slice
    codec: Codec
    is_rotated: bool = False
    is_exact: bool = False
    """True for vectors, whose values travel as they are."""


class FewBits(PartCoding):
    """The coding of a vector's parts, one for each rank, in a codec. All messages are as long as the longest."""

    loses = True
    numels: Sequence[int]
    """The elements of each part."""

    def __init__(self, pieces: Sequence[Sequence[Piece]], numels: Sequence[int], *, check: bool = False) -> None:
        """Take the pieces and the number of elements of each part. With `check`, refuse NaN and infinity."""
        self._pieces: Mapping[int, Sequence[Piece]] = dict(enumerate(pieces))
        self._check = check
        self.numels = list(numels)
        self.nbytes = round_up(max((part[-1].codes.stop for part in pieces if part), default=0), _BYTE_ALIGNMENT)
        """The bytes of the message for one part."""

    @classmethod
    def of_rows(cls, codec: Codec, num_rows: int, numel: int) -> FewBits:
        """The coding of parts of `numel` values, each of which is coded at once. It refuses NaN and infinity."""
        piece = Piece(slice(0, numel), slice(0, codec.payload_bytes(numel)), codec)
        return cls([[piece]] * num_rows, [numel] * num_rows, check=True)

    def encode(
        self, index: int, part: Tensor, message: Tensor, *, base: Tensor | None = None, lost: Tensor | None = None
    ) -> None:
        """Write the codes of part `index`, (n,), of any floating dtype, into `message`, (nbytes,), uint8.

        `part` may be on another device. With `base`, (n,), differences to it are coded, except for pieces that are
        exact, whose values are. `lost`, (n,), fp32, is what the codec has lost of such parts before: it is added first,
        and has what is lost now afterwards.
        """
        if lost is not None:
            part = lost.add_(part)
        for piece in self._pieces[index]:
            given, codes = part[piece.values].to(message.device, non_blocking=True), message[piece.codes]
            less = None if base is None or piece.is_exact else base[piece.values]
            piece.codec.encode_into(codes, given, less, check=self._check, rotates=piece.is_rotated)
            if lost is not None:
                rest = given.sub_(piece.codec.decode(codes, len(given), rotates=piece.is_rotated))
                rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # a step that is skipped loses nothing

    def decode(self, index: int, message: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the pieces of a part and their values, (n,), fp32, that `encode` has written."""
        for piece in self._pieces[index]:
            numel = piece.values.stop - piece.values.start
            yield piece, piece.codec.decode(message[piece.codes], numel, rotates=piece.is_rotated)

    def decode_into(self, index: int, message: Tensor, part: Tensor, *, adds: bool = False) -> None:
        """See `PartCoding.decode_into`. `part` has any floating dtype. What no piece has, such as padding, stays.

        Values that are exact are written all the same.
        """
        for piece in self._pieces[index]:
            own, is_sum = part[piece.values], adds and not piece.is_exact
            piece.codec.decode_into(own, message[piece.codes], adds=is_sum, rotates=piece.is_rotated)

    def sum(
        self, index: int, messages: Tensors, own: Tensor, *, is_own_coded: bool = False,
        weights: Sequence[float] | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PartCoding.sum`. Terms are added in fp32. With `is_own_coded` this rank's comes as a message, too.

        `weights` has one factor for each rank's term. Default: 1 for all.
        """
        total = torch.zeros_like(own, dtype=torch.float32)
        for rank in self.places(len(messages)):
            weight = 1.0 if weights is None else weights[rank]
            if rank == index and not is_own_coded:
                total.add_(own, alpha=weight)
                continue
            for piece, values in self.decode(index, messages[rank]):
                total[piece.values].add_(values, alpha=weight)
        return total.to(own.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """The elements [begin, end) of a shard."""

    shard: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.begin


def shards_of_nodes(layout: BucketLayout, peers: Sequence[int]) -> list[Part]:
    """Return the parts that cross between nodes, in the order of nodes: the whole shards of a rank's node shard."""
    return [Part(shard, 0, layout.size(shard)) for shard in peers]


def parts_of_islands(layout: BucketLayout, shard: int, num_islands: int) -> list[Part]:
    """Return the parts that cross between islands, in the order of islands: one shard, cut."""
    numel = layout.size(shard)
    size = round_up(-(-numel // num_islands), _PART_ALIGNMENT)
    begins = [min(island * size, numel) for island in range(num_islands + 1)]
    return [Part(shard, begin, end) for begin, end in itertools.pairwise(begins)]


def few_bits_of(
    layout: BucketLayout,
    parts: Sequence[Part],
    codec: Codec,
    *,
    plain: torch.dtype,
    device_type: str,
    rotates: bool = False,
) -> FewBits:
    """Return the coding of parts of a bucket that cross on this rank's way: [Note: Payloads].

    Args:
        layout: the bucket's layout.
        parts: one part for each rank of the way, in their order.
        codec: the codec of matrices.
        plain: the dtype in which vectors travel.
        device_type: the type of the device that codes.
        rotates: rotate matrices in runs of 32 first.
    """
    pieces = [
        pieces_of(_runs_of(layout, part), codec, plain=plain, device_type=device_type, rotates=rotates)
        for part in parts
    ]
    return FewBits(pieces, [part.numel for part in parts])


Run = tuple[int, int, bool]
"""The values [begin, end) of a part that lie in one tensor, and whether they travel as they are."""


def pieces_of(
    runs: Iterable[Run], codec: Codec, *, plain: torch.dtype, device_type: str, rotates: bool = False
) -> list[Piece]:
    """Return the pieces of the runs of one part, in their order. See `few_bits_of` for the arguments."""
    exact = CODECS["bf16" if plain is torch.bfloat16 else "fp32"]
    piece_numel = HOST_PIECE_NUMEL if device_type == "cpu" else DEVICE_PIECE_NUMEL
    pieces: list[Piece] = []
    begin_byte = 0
    for first, last, is_exact in _coded_together(runs, {True: exact.block, False: codec.block}):
        chosen, is_rotated = (exact, False) if is_exact else (codec, rotates)
        for begin in range(first, last, piece_numel):
            end = min(begin + piece_numel, last)
            coded_numel = rotated_numel(end - begin) if is_rotated else end - begin
            end_byte = begin_byte + chosen.payload_bytes(coded_numel)
            codes = slice(begin_byte, end_byte)
            pieces.append(Piece(slice(begin, end), codes, chosen, is_rotated, is_exact))
            begin_byte = round_up(end_byte, _BYTE_ALIGNMENT)
    return pieces


def _runs_of(layout: BucketLayout, part: Part) -> Iterator[Run]:
    """The runs of a part of a bucket, in their order."""
    for index, slot in enumerate(layout.slots):
        extent, offset = layout.extent(index, part.shard), layout.offset_in_shard(index, part.shard)
        if extent is None:
            continue
        begin = max(offset, part.begin) - part.begin
        end = min(offset + extent.numel, part.end) - part.begin
        if begin < end:
            yield begin, end, len(slot.shape) < 2


def _coded_together(runs: Iterable[Run], blocks: Mapping[bool, int]) -> list[Run]:
    """The runs that are coded together: [Note: Payloads]. `blocks` has the codecs' blocks, by `is_exact`."""
    found: list[Run] = []
    for first, end, is_exact in runs:
        begin = first
        if found and found[-1][1:] == (first, is_exact) and (first - found[-1][0]) % blocks[is_exact] == 0:
            begin, _, _ = found.pop()
        found.append((begin, end, is_exact))
    return found
