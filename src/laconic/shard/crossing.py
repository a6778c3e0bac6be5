"""The ways in which a bucket's shards cross between nodes: exactly, or in few bits.

The weights of a bucket take one `WeightCrossing`: the exact one here, or one of those in difference.py, which need the
receivers' copies. Gradients are summed across the nodes by the communicator itself, or by `CodedSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from laconic.comm.collectives import Communicator, Pending
from laconic.shard.bucket import Bucket
from laconic.shard.payload import Payload, Piece


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
            self._bucket.write_shard(own)
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
        self._messages = Messages(bucket, node, Payload(bucket, codec, plain=bucket.compute_dtype))

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


class Messages:
    """The shards of one way between nodes, each as one message to all: [Note: Payloads] in shard/payload.py."""

    def __init__(self, bucket: Bucket, node: Communicator, payload: Payload) -> None:
        self._bucket, self._node, self._payload = bucket, node, payload
        self._all: Tensor | None = None
        self._pending: Pending | None = None

    def start(self, values: Callable[[Piece], Tensor]) -> None:
        """Begin to send this rank's shard, whose pieces `values` returns, (n,), fp32."""
        self._free()  # an exception may have cut the last crossing short
        device = self._bucket.cluster.device
        self._all = torch.empty(self._node.size, self._payload.nbytes, dtype=torch.uint8, device=device)
        self._bucket.ledger.hold(self._all.nbytes)
        own = self._all[self._node.rank]
        self._payload.encode(self._node.rank, values, own)
        self._pending = self._node.all_gather(self._all.view(-1), own)

    def finish(self, node_shard: Tensor) -> Iterator[tuple[Tensor, Tensor, Piece]]:
        """Yield the pieces of `node_shard`, (N * C,), as views (n,), and the values that came for them, (n,), fp32."""
        assert self._all is not None
        if self._pending is not None:
            self._pending.wait()
        for index, (part, message) in enumerate(zip(node_shard.view(self._node.size, -1), self._all, strict=True)):
            for piece, values in self._payload.decode(index, message):
                yield part[piece.values], values, piece
        self._free()

    def _free(self) -> None:
        if self._all is not None:
            self._bucket.ledger.hold(-self._all.nbytes)
        self._all = self._pending = None


class Transfer(Protocol):
    """A sum across the nodes that is under way."""

    nbytes: int
    """The bytes that it takes besides its input."""

    def finish(self) -> Tensor:
        """Wait, and return this rank's part of the sum, (C,)."""


class CodedSum:
    """Sums of gradients across the nodes, of which each node sends the others their parts in few bits.

    A node's own part stays exact, and the parts are added in the order of nodes. Only the owner of a shard has its sum,
    so nothing else must be equal. Source: the second hop of ZeRO++'s qgZ (arXiv 2306.10209), in one trip.
    """

    def __init__(self, bucket: Bucket, node: Communicator) -> None:
        codec = bucket.wire.gradient_codec
        assert codec is not None
        self._bucket, self._node = bucket, node
        rotates = bucket.wire.rotates_gradients
        self._payload = Payload(bucket, codec, plain=bucket.reduce_dtype, rotates=rotates)
        self._lost: dict[int, Tensor] = {}
        """With feedback: what the codec has lost of the part for each node, (C,), fp32."""

    def start_reduce_scatter(self, whole: Tensor) -> Transfer:
        """Begin to sum `whole`, (N * C,), over the nodes. It must not change until the end."""
        parts = whole.view(self._node.size, -1)
        messages = torch.empty(len(parts), self._payload.nbytes, dtype=torch.uint8, device=whole.device)
        for index, part in enumerate(parts):
            if index != self._node.rank:
                self._encode(index, part, messages[index])
        landing = torch.empty_like(messages)
        pending = self._node.start_all_to_all(landing, messages)
        return _CodedTransfer(self._payload, self._node.rank, parts[self._node.rank], landing, messages, pending)

    def forget(self) -> None:
        """Drop what the codec has lost so far."""
        for lost in self._lost.values():
            self._bucket.ledger.hold(-lost.nbytes)
        self._lost.clear()

    def _encode(self, index: int, part: Tensor, message: Tensor) -> None:
        if not self._bucket.wire.feedback:
            self._payload.encode(index, lambda piece: part[piece.values].float(), message)
            return
        if index not in self._lost:
            self._lost[index] = torch.zeros_like(part, dtype=torch.float32)
            self._bucket.ledger.hold(self._lost[index].nbytes)
        lost = self._lost[index].add_(part)
        self._payload.encode(index, lambda piece: lost[piece.values], message)
        for piece, values in self._payload.decode(index, message):
            lost[piece.values].sub_(values).nan_to_num_(
                nan=0.0, posinf=0.0, neginf=0.0
            )  # a step that is skipped loses nothing


class _CodedTransfer:
    """A `Transfer` of `CodedSum`."""

    def __init__(
        self, payload: Payload, rank: int, own: Tensor, landing: Tensor, messages: Tensor, pending: Pending
    ) -> None:
        self._payload, self._rank, self._own, self._landing, self._pending = payload, rank, own, landing, pending
        self._messages = messages  # the backend may still read it
        self.nbytes = landing.nbytes + messages.nbytes

    def finish(self) -> Tensor:
        """See `Transfer.finish`. The sum is in fp32, then in the dtype of the gradients."""
        self._pending.wait()
        total = torch.zeros_like(self._own, dtype=torch.float32)
        for index, message in enumerate(self._landing):
            if index == self._rank:
                total.add_(self._own)
                continue
            for piece, values in self._payload.decode(self._rank, message):
                total[piece.values].add_(values)
        return total.to(self._own.dtype)
