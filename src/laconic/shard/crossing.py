"""The ways in which a bucket's shards cross between nodes and islands: exactly, or in few bits.

The weights of a bucket take one `WeightCrossing`: the exact one here, or one of those in difference.py, which need the
receivers' copies. Gradients are summed across the nodes by the communicator itself, or by `CodedSum`, and over the
islands, if these are replicas, by the communicator or by `CodedAllReduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from laconic.codec import CODECS, Codec
from laconic.comm.collectives import Communicator, Pending
from laconic.comm.traffic import Purpose
from laconic.shard.bucket import Bucket
from laconic.shard.ledger import Held, Ledger
from laconic.shard.payload import Part, Payload, Piece, parts_of_islands, shards_of_nodes


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
        codec = bucket.wire.weight_codec
        assert codec is not None
        self._bucket = bucket
        payload = payload_of(bucket, codec)
        self._messages = Messages(bucket, node, payload)

    def prepare(self) -> bool:
        """See `WeightCrossing.prepare`."""
        return False

    def start(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.start`."""
        shard = self._bucket.shard
        self._messages.start(lambda piece: shard[piece.values].to(node_shard.device, torch.float32))

    def finish(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.finish`. Parts that are only padding keep what they have."""
        for part, values, _ in self._messages.finish(node_shard):
            part.copy_(values)

    def forget(self) -> None:
        """See `WeightCrossing.forget`."""


def payload_of(bucket: Bucket, codec: Codec) -> Payload:
    """The payload of weights that cross between nodes."""
    parts, kind = shards_of_nodes(bucket.layout, bucket.peers), bucket.cluster.device_type
    return Payload(bucket.layout, parts, codec, plain=bucket.compute_dtype, device_type=kind)


class Messages:
    """The parts of one way, each as one message from its rank to all: [Note: Payloads] in shard/payload.py."""

    def __init__(self, bucket: Bucket, way: Communicator, payload: Payload, purpose: Purpose = "weights") -> None:
        self._bucket, self._way, self._payload, self._purpose = bucket, way, payload, purpose
        self._all: Held[Tensor] | None = None
        self._pending: Pending | None = None

    def start(self, values: Callable[[Piece], Tensor]) -> None:
        """Begin to send this rank's part, whose pieces `values` returns, (n,), fp32."""
        self._free()  # an exception may have cut the last crossing short
        device = self._bucket.cluster.device
        messages = torch.empty(self._way.size, self._payload.nbytes, dtype=torch.uint8, device=device)
        self._all = Held(messages, self._bucket.ledger)
        own = messages[self._way.rank]
        self._payload.encode(self._way.rank, values, own)
        self._pending = self._way.all_gather(messages.view(-1), own, self._purpose)

    def finish(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor, Piece]]:
        """Yield the pieces of `whole`, all parts in order, as views (n,), and the values that came for them, fp32."""
        assert self._all is not None
        if self._pending is not None:
            self._pending.wait()
        parts = whole.split(self._payload.numels)
        for index, (part, message) in enumerate(zip(parts, self._all.memory, strict=True)):
            for piece, values in self._payload.decode(index, message):
                yield part[piece.values], values, piece
        self._free()

    def _free(self) -> None:
        if self._all is not None:
            self._all.free()
        self._all = self._pending = None


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


class CodedSum:
    """Sums of gradients, of which each rank of a way sends the others their parts in few bits.

    A rank's own part stays exact, and the parts are added in the order of ranks. Only the owner of a part has its sum,
    so nothing else must be equal. Source: the second hop of ZeRO++'s qgZ (arXiv 2306.10209), in one trip.
    """

    def __init__(self, bucket: Bucket, way: Communicator, parts: Sequence[Part]) -> None:
        """`parts` has what each rank of the way will own the sum of, in their order."""
        codec = bucket.wire.gradient_codec
        assert codec is not None
        self._bucket, self._way = bucket, way
        rotates = bucket.wire.rotates_gradients
        kind = bucket.cluster.device_type
        self._payload = Payload(
            bucket.layout, parts, codec, plain=bucket.reduce_dtype, device_type=kind, rotates=rotates
        )
        self._lost: dict[int, Held[Tensor]] = {}
        """With feedback: what the codec has lost of the part for each rank, (n,), fp32."""

    @classmethod
    def across_nodes(cls, bucket: Bucket, node: Communicator) -> CodedSum:
        """The sums across the nodes."""
        return cls(bucket, node, shards_of_nodes(bucket.layout, bucket.peers))

    def start_reduce_scatter(self, whole: Tensor) -> Transfer:
        """Begin to sum `whole`, all parts in order, over the ranks. It must not change until the end."""
        parts = whole.split(self._payload.numels)
        messages = torch.empty(len(parts), self._payload.nbytes, dtype=torch.uint8, device=whole.device)
        for index, part in enumerate(parts):
            if index != self._way.rank:
                self._encode(index, part, messages[index])
        landing = torch.empty_like(messages)
        pending = self._way.start_all_to_all(landing, messages)
        return _CodedTransfer(self._payload, self._way.rank, parts[self._way.rank], landing, messages, pending)

    def forget(self) -> None:
        """Drop what the codec has lost so far."""
        for lost in self._lost.values():
            lost.free()
        self._lost.clear()

    def _encode(self, index: int, part: Tensor, message: Tensor) -> None:
        if not self._bucket.wire.feedback:
            self._payload.encode(index, lambda piece: part[piece.values].float(), message)
            return
        if index not in self._lost:
            self._lost[index] = Held(torch.zeros_like(part, dtype=torch.float32), self._bucket.ledger)
        lost = self._lost[index].memory.add_(part)
        self._payload.encode(index, lambda piece: lost[piece.values], message)
        for piece, values in self._payload.decode(index, message):
            rest = lost[piece.values].sub_(values)
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # a step that is skipped loses nothing


class _CodedTransfer:
    """A `Transfer` of `CodedSum`."""

    def __init__(
        self, payload: Payload, rank: int, own: Tensor, landing: Tensor, messages: Tensor, pending: Pending
    ) -> None:
        self._payload, self._rank, self._own, self._landing = payload, rank, own, landing
        self._pending: Pending | None = pending
        self.messages = messages
        """See `Transfer.messages`. The backend may still read them."""
        self.nbytes = landing.nbytes + messages.nbytes

    def received(self) -> Sequence[Tensor]:
        """See `Transfer.received`."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        return list(self._landing)

    def finish(self) -> Tensor:
        """See `Transfer.finish`. The sum is in fp32, then in the dtype of the gradients."""
        self.received()
        total = torch.zeros_like(self._own, dtype=torch.float32)
        for index, message in enumerate(self._landing):
            if index == self._rank:
                total.add_(self._own)
                continue
            for piece, values in self._payload.decode(self._rank, message):
                total[piece.values].add_(values)
        return total.to(self._own.dtype)


class CodedAllReduce:
    """Sums of a shard's gradients over the islands, in two trips of few bits.

    Every island owns one part of the shard, whose sum it makes as `CodedSum` does. Then it sends the sum, in eight bits
    (bf16 if gradients cross in bf16), to all islands. All of them, the owner too, use the decoded sum, so that their
    weights stay equal. Source: qgZ of ZeRO++ (arXiv 2306.10209), whose second trip has four bits; a sum that all ranks
    use is worth more.
    """

    def __init__(self, bucket: Bucket, island: Communicator) -> None:
        own = bucket.peers[bucket.cluster.node_rank]
        parts = parts_of_islands(bucket.layout, own, bucket.cluster.num_islands)
        codec = CODECS["bf16" if bucket.wire.gradients == "bf16" else "int8"]
        self._bucket, self._island = bucket, island
        self._sum = CodedSum(bucket, island, parts)
        kind = bucket.cluster.device_type
        self._payload = Payload(bucket.layout, parts, codec, plain=bucket.reduce_dtype, device_type=kind)

    def start_all_reduce(self, shard: Tensor) -> CodedReplicaSum:
        """Begin to sum `shard`, (C,), over the islands, in place. It must not change until the end."""
        messages = Messages(self._bucket, self._island, self._payload, "gradients")
        return CodedReplicaSum(shard, self._sum.start_reduce_scatter(shard), messages, self._bucket.ledger)

    def forget(self) -> None:
        """Drop what the codec has lost so far."""
        self._sum.forget()


class CodedReplicaSum:
    """A sum of `CodedAllReduce` on its way."""

    def __init__(self, shard: Tensor, transfer: Transfer, messages: Messages, ledger: Ledger) -> None:
        self._shard, self._messages = shard, messages
        self._transfer = Held(transfer, ledger)

    def send_back(self) -> None:
        """Finish the first trip, and begin to send this island's part of the sum to all."""
        total = self._transfer.memory.finish()
        self._transfer.free()
        self._messages.start(lambda piece: total[piece.values].float())

    def finish(self) -> None:
        """Finish the second trip. Elements that only fill up the shard keep what they have."""
        for part, values, _ in self._messages.finish(self._shard):
            part.copy_(values)
