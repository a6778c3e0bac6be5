"""Messages whose lengths vary, from each rank to all: only its sender knows how long one is.

[Note: Lengths that vary]
A receiver must know beforehand how many bytes come. The length of a coded message is known when coding ends, and to its
sender alone. To agree on it would take a trip. But a message is about as long as the last one of its sender, whose
length all ranks have read. So each rank sends as many bytes as the last message had, and 1 / 32 more. The first bytes
of a message are its length. If a message is longer than the bytes that are sent, the others follow in a second
transfer. All ranks begin that alike, as all have read all lengths. Of a first message no rank knows the length, so only
its head is in the first transfer.

An accelerator puts the length into a message without the host, in a buffer that would hold the new values themselves.
The host reads lengths when messages have arrived, and may do so while the device computes: [Note: Lengths come with
messages] in shard/gather.py. All lengths of a step could be agreed on before its first message. Then the host would
wait once; but the first message would leave when all are coded, and all would be held in memory until they leave.

Ranks must know the same lengths. An exception on one rank may end this between two messages. Then all begin anew, by
`forget`, before the next one: the caller agrees on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from laconic.codec.lossless import UnreadMessage
from laconic.codec.sums import Hold
from laconic.comm.collectives import NOTHING, Pending
from laconic.comm.traffic import Purpose
from laconic.layout.packing import round_up

_HEAD_BYTES = 16
"""A message begins with its length, int64, and eight bytes that fill up: what follows is aligned."""
_MARGIN = 32
_ALIGNMENT = 16


class VaryingWay(Protocol):
    """The ranks that send to each other, as a `Communicator` has them."""

    rank: int
    size: int
    has_peers: bool

    def all_gather(
        self, whole: Tensor, piece: Tensor, purpose: Purpose, /, *, numels: Sequence[int] | None = None
    ) -> Pending:
        """See `Communicator.all_gather`."""


class VaryingMessages:
    """Messages from each rank to all: [Note: Lengths that vary]."""

    def __init__(self, way: VaryingWay, hold: Hold, purpose: Purpose) -> None:
        """Send along `way`. `hold` counts the memory that messages take."""
        self._way, self._hold, self._purpose = way, hold, purpose
        self._sent: Tensor | None = None
        self._arriving: Tensor | None = None
        self._assumed: int | None = None
        """In a rehearsal the length of all messages."""
        self._pending = NOTHING
        self.forget()

    def forget(self) -> None:
        """Forget the lengths of messages. All ranks do, before one of them sends the next."""
        self._expected = [_HEAD_BYTES] * self._way.size

    def start(self, make: Callable[[], UnreadMessage], *, typical_bytes: int) -> None:
        """Begin to send the message that `make` returns to all. It may change afterwards.

        In a rehearsal nobody can read its length, and `typical_bytes` stands for it.
        """
        self._free()  # an exception may have cut the last crossing short
        body, length = make()
        self._assumed = None if self._way.has_peers else _HEAD_BYTES + typical_bytes
        end, expected = _HEAD_BYTES + len(body), self._expected
        sent = body.new_zeros(max(end, expected[self._way.rank]))
        sent[:_HEAD_BYTES].view(torch.int64)[:1] = length + _HEAD_BYTES
        sent[_HEAD_BYTES:end] = body
        self._sent, self._arriving = sent, body.new_empty(sum(expected))
        self._hold(self._nbytes)
        first = sent[: expected[self._way.rank]]
        self._pending = self._way.all_gather(self._arriving, first, self._purpose, numels=expected)

    def finish(self, read: Callable[[int, Tensor], None]) -> None:
        """Wait, and `read` the message of each other rank, (n,), uint8. The host reads lengths from the device.

        Raises:
            RuntimeError: a length is none.
        """
        assert self._sent is not None
        assert self._arriving is not None
        self._pending.wait()
        parts: Sequence[Tensor] = self._arriving.split(self._expected)
        lengths = self._lengths(parts)
        if min(lengths) < _HEAD_BYTES or lengths[self._way.rank] > len(self._sent):
            raise RuntimeError(
                f"messages say that they are {lengths} bytes long, of which the first {_HEAD_BYTES} say so: they were "
                "damaged, or ranks do not run the same program"
            )
        rest = max(length - expected for length, expected in zip(lengths, self._expected, strict=True))
        if rest > 0:
            parts = self._with_rest(parts, self._sent, round_up(rest, _ALIGNMENT))
        self._expected = [round_up(length + length // _MARGIN, _ALIGNMENT) for length in lengths]
        self._free()
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            if rank != self._way.rank:
                read(rank, part[_HEAD_BYTES:length])

    def _lengths(self, parts: Sequence[Tensor]) -> list[int]:
        lengths: list[int] = torch.stack([part[:_HEAD_BYTES] for part in parts]).view(torch.int64)[:, 0].tolist()
        return lengths if self._assumed is None else [self._assumed] * len(parts)

    def _with_rest(self, parts: Sequence[Tensor], sent: Tensor, rest: int) -> list[Tensor]:
        """The messages of all ranks, with `rest` bytes more of each."""
        begin = self._expected[self._way.rank]
        piece = sent.new_zeros(rest)
        more = sent[begin : begin + rest]
        piece[: len(more)] = more
        arriving = piece.new_empty(rest * self._way.size)
        self._way.all_gather(arriving, piece, self._purpose).wait()
        return [torch.cat(both) for both in zip(parts, arriving.split(rest), strict=True)]

    @property
    def _nbytes(self) -> int:
        return sum(each.nbytes for each in (self._sent, self._arriving) if each is not None)

    def _free(self) -> None:
        self._hold(-self._nbytes)
        self._sent = self._arriving = None
        self._pending = NOTHING
