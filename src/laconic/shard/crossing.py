"""The ways in which a bucket's buffers move between ranks: exactly, or in few bits.

[Note: Moves]
Along each axis a buffer is cut (each rank has its part), whole (all have all of it) or partial (each has a term of a
sum). A move changes it along one axis:

| buffer | island | node | local | move to the next |
|---|---|---|---|---|
| shard | whole | cut | cut | gather across the nodes: `WeightCrossing` |
| node shard | whole | whole | cut | gather inside the node |
| full buffer | whole | whole | whole | |
| gradients as they come | partial | partial | partial | reduce-scatter inside the node |
| sums of a node | partial | partial | cut | reduce-scatter across the nodes: `Sums.node` |
| sums of an island | partial | cut | cut | all-reduce over the islands: `Sums.island` |
| `.grad` | whole | cut | cut | |

A cache keeps a node shard; sums of a node or an island wait for a later micro-batch. Inside a node everything is exact.
Weights that cross as differences need the receivers' copies: they are in difference.py.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic.codec import CODECS, Codec
from laconic.codec.blocked import SIZE as ROTATED
from laconic.codec.sums import CodedSum, Messages, Payload, Piece
from laconic.comm.collectives import NOTHING, Communicator
from laconic.comm.traffic import Level
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import round_up
from laconic.shard.bucket import Bucket

LEVELS: tuple[Level, ...] = ("island", "node", "local")
HOST_PIECE_NUMEL, DEVICE_PIECE_NUMEL = 1 << 18, 1 << 22
"""The values that are coded at once: 1 MiB of fp32 on a CPU, whose caches they should fit, and 16 MiB elsewhere."""
_PART_ALIGNMENT = 128
"""The elements of a codec's block. A part of a shard has whole blocks, but for the last part."""


class WeightCrossing:
    """The gather of a bucket's shards across the nodes: they cross as they are."""

    def __init__(self, bucket: Bucket, node: Communicator) -> None:
        self.bucket, self._node = bucket, node
        self._pending = NOTHING

    def prepare(self) -> bool:
        """Decide how the weights of the bucket's present version cross. Returns whether the old node shard is needed.

        Collective over the cluster, if they may cross as differences.
        """
        return False

    def start(self, node_shard: Tensor) -> None:
        """Begin the gather. With True from `prepare`, `node_shard`, (N * C,), has the old node shard."""
        own = self.bucket.own_part(node_shard)
        if own.data_ptr() != self.bucket.shard.data_ptr():
            self.bucket.form.write(own)
        self._pending = self._node.all_gather(node_shard, own)

    def finish(self, node_shard: Tensor) -> None:
        """Finish the gather: `node_shard` has the shards of all nodes."""
        pending, self._pending = self._pending, NOTHING
        pending.wait()

    def forget(self) -> None:
        """Let the weights cross exactly next time."""


class CodedValues(WeightCrossing):
    """Shards cross in few bits, and every node, the owner's too, uses the decoded values (qwZ of ZeRO++)."""

    def __init__(self, bucket: Bucket, node: Communicator) -> None:
        super().__init__(bucket, node)
        codec, parts = bucket.wire.weight_codec, shards_of_nodes(bucket.layout, bucket.peers)
        assert codec is not None
        self._messages = Messages(
            node, payload_of(bucket, parts, codec, plain=bucket.compute_dtype), bucket.ledger.hold
        )

    def start(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.start`."""
        self._messages.start(self.bucket.shard, node_shard.device)

    def finish(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.finish`. Parts that are only padding keep what they have."""
        self._messages.finish(node_shard)


class SumTransfer(Protocol):
    """A sum across nodes or islands that has begun."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes besides its input."""

    @property
    def messages(self) -> Tensor:
        """The parts, (R, n): row r is what this rank sends to rank r. Its own row has no meaning."""

    def received(self) -> Sequence[Tensor] | None:
        """Wait, and return what each rank has sent, (n,); None if only the backend has seen it."""

    def finish(self) -> Tensor:
        """Wait, and return this rank's part of the sum."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The ways of one bucket's gradients."""

    local: Communicator
    node: Communicator | CodedSum
    island: Communicator | CodedSum

    @classmethod
    def of(cls, bucket: Bucket) -> Sums:
        """The ways that the bucket's wire says.

        A rank's own term stays exact. The second trip of a sum over islands has eight bits (bf16 if gradients cross in
        bf16). That of qgZ has four; a sum that all ranks use is worth more.
        """
        island, node, local = (Communicator(bucket.cluster, level, bucket) for level in LEVELS)
        ways: dict[str, Communicator | CodedSum] = {"node": node, "island": island}
        if bucket.wire.gradients != "exact" and node.size > 1:
            ways["node"] = _coded_sum(bucket, node, shards_of_nodes(bucket.layout, bucket.peers))
        if bucket.wire.gradients != "exact" and island.size > 1:
            parts = parts_of_islands(bucket.layout, bucket.cluster.shard_index, island.size)
            codec = CODECS["bf16" if bucket.wire.gradients == "bf16" else "int8"]
            back = payload_of(bucket, parts, codec, plain=bucket.reduce_dtype)
            ways["island"] = _coded_sum(bucket, island, parts, back)
        return cls(local=local, **ways)

    def forget_lost(self) -> None:
        """Drop what a codec has lost of earlier gradients."""
        for way in (self.node, self.island):
            if isinstance(way, CodedSum):
                way.forget()


def _coded_sum(bucket: Bucket, way: Communicator, parts: Sequence[Part], back: Payload | None = None) -> CodedSum:
    codec, wire = bucket.wire.gradient_codec, bucket.wire
    assert codec is not None
    payload = payload_of(bucket, parts, codec, plain=bucket.reduce_dtype, rotates=wire.rotates_gradients)
    return CodedSum(way, payload, bucket.ledger.hold, keeps_own=True, feedback=wire.feedback, back=back)


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
    bucket: Bucket, parts: Sequence[Part], codec: Codec, *, plain: torch.dtype, rotates: bool = False
) -> Payload:
    """Return the payload of parts of a bucket that cross on this rank's way: [Note: Payloads].

    Args:
        bucket: the bucket.
        parts: one part for each rank of the way, in their order.
        codec: the codec of matrices.
        plain: the dtype in which vectors travel.
        rotates: rotate matrices in runs of 32 first.
    """
    exact = CODECS["bf16" if plain is torch.bfloat16 else "fp32"]
    piece_numel = HOST_PIECE_NUMEL if bucket.cluster.device_type == "cpu" else DEVICE_PIECE_NUMEL

    def pieces_of(part: Part) -> Iterator[Piece]:
        begin_byte = 0
        for first, last, is_exact in _runs_of(bucket.layout, part, {True: exact.block, False: codec.block}):
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
