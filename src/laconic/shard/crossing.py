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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from laconic.codec import CODECS
from laconic.codec.payload import Part, Payload, parts_of_islands, payload_of, shards_of_nodes
from laconic.codec.sums import CodedSum, Messages
from laconic.comm.collectives import NOTHING, Communicator
from laconic.comm.traffic import Level
from laconic.shard.bucket import Bucket

LEVELS: tuple[Level, ...] = ("island", "node", "local")


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
        codec, kind = bucket.wire.weight_codec, bucket.cluster.device_type
        assert codec is not None
        parts = shards_of_nodes(bucket.layout, bucket.peers)
        payload = payload_of(bucket.layout, parts, codec, plain=bucket.compute_dtype, device_type=kind)
        self._messages = Messages(node, payload, bucket.ledger.hold)

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
            kind = bucket.cluster.device_type
            back = payload_of(bucket.layout, parts, codec, plain=bucket.reduce_dtype, device_type=kind)
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
    payload = payload_of(
        bucket.layout, parts, codec,
        plain=bucket.reduce_dtype, device_type=bucket.cluster.device_type, rotates=wire.rotates_gradients,
    )  # fmt: skip
    return CodedSum(way, payload, bucket.ledger.hold, keeps_own=True, feedback=wire.feedback, back=back)
