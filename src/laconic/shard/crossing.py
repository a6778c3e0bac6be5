"""The ways in which a bucket's shards cross between nodes and islands: exactly, or in few bits.

The weights of a bucket take one `WeightCrossing`: the exact one here, or one of those in difference.py, which need the
receivers' copies. Gradients are summed across the nodes, and over the islands if these are replicas: by the
communicator itself or, in few bits, by the sums of codec/sums.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from laconic.codec import CODECS, Codec
from laconic.codec.sums import CodedAllReduce, CodedSum, Messages, Payload
from laconic.comm.collectives import Communicator, Pending
from laconic.shard.bucket import Bucket
from laconic.shard.payload import Part, parts_of_islands, payload_of, shards_of_nodes


class WeightCrossing(Protocol):
    """The gather of a bucket's shards across the nodes."""

    def prepare(self) -> bool:
        """Decide how the weights of the bucket's present version cross. Returns whether the old node shard is needed.

        Collective over the cluster, in some implementations.
        """

    def start(self, node_shard: Tensor) -> None:
        """Begin the gather. With True from `prepare`, `node_shard`, (N * C,), has the old node shard."""

    def finish(self, node_shard: Tensor) -> None:
        """Finish the gather: `node_shard` has the shards of all nodes."""

    def forget(self) -> None:
        """Let the weights cross exactly next time."""


class ExactWeights:
    """Shards cross as they are."""

    def __init__(self, bucket: Bucket, node: Communicator) -> None:
        self._bucket, self._node = bucket, node
        self._pending: Pending | None = None

    def prepare(self) -> bool:
        """See `WeightCrossing.prepare`."""
        return False

    def start(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.start`."""
        own = self._bucket.own_part(node_shard)
        if own.data_ptr() != self._bucket.shard.data_ptr():
            self._bucket.form.write(own)
        self._pending = self._node.all_gather(node_shard, own)

    def finish(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.finish`."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None

    def forget(self) -> None:
        """See `WeightCrossing.forget`."""


class CodedValues:
    """Shards cross in few bits, and every node, the owner's too, uses the decoded values (qwZ of ZeRO++)."""

    def __init__(self, bucket: Bucket, node: Communicator) -> None:
        self._bucket, self._messages = bucket, weight_messages(bucket, node)

    def prepare(self) -> bool:
        """See `WeightCrossing.prepare`."""
        return False

    def start(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.start`."""
        shard = self._bucket.shard
        device = node_shard.device
        self._messages.start(lambda piece: shard[piece.values].to(device, torch.float32), device)

    def finish(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.finish`. Parts that are only padding keep what they have."""
        for part, values, _ in self._messages.finish(node_shard):
            part.copy_(values)

    def forget(self) -> None:
        """See `WeightCrossing.forget`."""


def weight_messages(bucket: Bucket, node: Communicator) -> Messages:
    """The messages of weights that cross between nodes in few bits: [Note: Payloads] in shard/payload.py."""
    codec = bucket.wire.weight_codec
    assert codec is not None
    payload = _payload(bucket, shards_of_nodes(bucket.layout, bucket.peers), codec, plain=bucket.compute_dtype)
    return Messages(node, payload, bucket.ledger.hold)


class Transfer(Protocol):
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


def sum_across_nodes(bucket: Bucket, node: Communicator) -> CodedSum:
    """The sum of a node shard's gradients across the nodes, in few bits. A rank's own term stays exact."""
    return _coded_sum(bucket, node, shards_of_nodes(bucket.layout, bucket.peers))


def sum_over_islands(bucket: Bucket, island: Communicator) -> CodedAllReduce:
    """The sum of a shard's gradients over the islands, in two trips of few bits.

    The second trip has eight bits (bf16 if gradients cross in bf16). That of qgZ has four; a sum that all ranks use is
    worth more.
    """
    own = bucket.peers[bucket.cluster.node_rank]
    parts = parts_of_islands(bucket.layout, own, bucket.cluster.num_islands)
    codec = CODECS["bf16" if bucket.wire.gradients == "bf16" else "int8"]
    terms, back = _coded_sum(bucket, island, parts), _payload(bucket, parts, codec, plain=bucket.reduce_dtype)
    return CodedAllReduce(terms, island, back, bucket.ledger.hold, "gradients")


def _coded_sum(bucket: Bucket, way: Communicator, parts: Sequence[Part]) -> CodedSum:
    codec, wire = bucket.wire.gradient_codec, bucket.wire
    assert codec is not None
    payload = _payload(bucket, parts, codec, plain=bucket.reduce_dtype, rotates=wire.rotates_gradients)
    return CodedSum(way, payload, bucket.ledger.hold, keeps_own=True, feedback=wire.feedback)


def _payload(
    bucket: Bucket, parts: Sequence[Part], codec: Codec, *, plain: torch.dtype, rotates: bool = False
) -> Payload:
    kind = bucket.cluster.device_type
    return payload_of(bucket.layout, parts, codec, plain=plain, device_type=kind, rotates=rotates)
