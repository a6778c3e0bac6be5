"""A bucket's shards in few bits: where the codes of each tensor lie in a message between two ranks.

[Note: Payloads]
No block of a codec has values of two tensors. So tensors are coded on their own, or together with the tensors before
them if those end on a block's border, as they mostly do. Long runs are coded in pieces that fit into a processor's
cache. Vectors (norms, biases) are few and matter much, so they travel as they are, between the codes of matrices. So a
bucket is one message, and its layout does not depend on the wire. Between nodes the shards of a node shard cross, and
between islands the parts of one shard. They hold different tensors, so their payloads differ by some bytes. All are as
long as the longest, since collectives want equal sizes. Every rank works out all of it from the layout: a message has
no header.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from laconic.codec import CODECS, Codec
from laconic.codec.blocked import SIZE as ROTATED
from laconic.codec.sums import Payload, Piece
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import round_up

HOST_PIECE_NUMEL, DEVICE_PIECE_NUMEL = 1 << 18, 1 << 22
"""The values that are coded at once: 1 MiB of fp32 on a CPU, whose caches they should fit, and 16 MiB elsewhere."""
_PART_ALIGNMENT = 128
"""The elements of a codec's block. A part of a shard has whole blocks, but for the last part."""


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
    return [Part(shard, 0, layout.shard_numel) for shard in peers]


def parts_of_islands(layout: BucketLayout, shard: int, num_islands: int) -> list[Part]:
    """Return the parts that cross between islands, in the order of islands: one shard, cut."""
    size = round_up(-(-layout.shard_numel // num_islands), _PART_ALIGNMENT)
    begins = [min(island * size, layout.shard_numel) for island in range(num_islands + 1)]
    return [Part(shard, begin, end) for begin, end in itertools.pairwise(begins)]


def payload_of(
    layout: BucketLayout,
    parts: Sequence[Part],
    codec: Codec,
    *,
    plain: torch.dtype,
    device_type: str,
    rotates: bool = False,
) -> Payload:
    """Return the payload of parts of a bucket that cross on this rank's way: [Note: Payloads].

    Args:
        layout: the bucket's layout.
        parts: one part for each rank of the way, in their order.
        codec: the codec of matrices.
        plain: the dtype in which vectors travel.
        device_type: the type of the device that codes.
        rotates: rotate matrices in runs of 32 first.
    """
    exact = CODECS["bf16" if plain is torch.bfloat16 else "fp32"]
    piece_numel = HOST_PIECE_NUMEL if device_type == "cpu" else DEVICE_PIECE_NUMEL

    def pieces_of(part: Part) -> Iterator[Piece]:
        begin_byte = 0
        for first, last, is_exact in _runs_of(layout, part, {True: exact.block, False: codec.block}):
            chosen, is_rotated = (exact, False) if is_exact else (codec, rotates)
            for begin in range(first, last, piece_numel):
                end = min(begin + piece_numel, last)
                coded_numel = round_up(end - begin, ROTATED) if is_rotated else end - begin
                end_byte = begin_byte + chosen.payload_bytes(coded_numel)
                codes = slice(begin_byte, end_byte)
                yield Piece(slice(begin, end), codes, chosen, coded_numel, is_rotated, is_exact)
                begin_byte = end_byte

    return Payload([list(pieces_of(part)) for part in parts], [part.numel for part in parts])


def _runs_of(layout: BucketLayout, part: Part, blocks: Mapping[bool, int]) -> list[tuple[int, int, bool]]:
    """The runs (begin, end, is_exact) of a part's values that are coded together, in order: [Note: Payloads].

    `blocks` has the blocks of the codecs of runs that are exact, and of those that are not.
    """
    runs: list[tuple[int, int, bool]] = []
    for index, slot in enumerate(layout.slots):
        extent, offset = layout.extent(index, part.shard), layout.offset_in_shard(index, part.shard)
        if extent is None:
            continue
        begin = first = max(offset, part.begin) - part.begin
        end = min(offset + extent.numel, part.end) - part.begin
        if begin >= end:
            continue
        is_exact = len(slot.shape) < 2
        if runs and runs[-1][1:] == (first, is_exact) and (first - runs[-1][0]) % blocks[is_exact] == 0:
            begin, _, _ = runs.pop()
        runs.append((begin, end, is_exact))
    return runs
