"""Messages whose lengths vary, from each rank to all, or to each other one: only its sender knows how long one is.

[Note: Lengths that vary]
A receiver must know beforehand how many bytes come. The length of a coded message is known when coding ends, and to its
sender alone. To agree on it would take a trip. But a message is about as long as the last one of its sender, whose
length all ranks have read. So each rank sends as many bytes as the last message had, and 1 / 32 more. The first bytes
of a message are its length. If a message is longer than the bytes that are sent, the others follow in a second
transfer. All ranks begin that alike, as all have read all lengths. Of a first message no rank knows the length, so only
its head is in the first transfer.

An accelerator puts the length into a message without the host, in a buffer that would hold the new values themselves.
The host reads lengths when messages have arrived, and may do so while the device computes: [Note: Lengths come with
messages] in shard/gather.py. Where gradients are summed, it reads those of the unit before, after it has issued the
backward of a unit. All lengths of a step could be agreed on before its first message. Then the host would
wait once; but the first message would leave when all are coded, and all would be held in memory until they leave.

Where each rank has another message for each other one, a rank reads the lengths of those that came to it, and of no
others. So the head of a message has the most bytes that its sender takes for a value, too. All ranks thus know the most
of all, which say how many bytes of each message are sent.

Ranks must know the same lengths. An exception on one rank may end this between two messages. Then all begin anew, by
`forget`, before the next one: the caller agrees on that. Ranks that sum gradients do not, as they could not go on after
such an exception without lengths either: a rank would wait for a term that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laconic.codec.lossless import UnreadMessage
from laconic.codec.sums import Hold
from laconic.comm.collectives import Communicator
from laconic.comm.moves import NOTHING, Pending
from laconic.comm.traffic import Purpose
from laconic.layout.packing import round_up

_HEAD_BYTES = 16
"""A message begins with a number, int64, which says its length, and with the same bits turned over. So a damaged head
does not make a rank begin a transfer that others do not begin. What follows is aligned."""
_LENGTH_BITS = 40
"""Of the number in a head. The bits above are a rate, if there is one."""
_MARGIN = 32
_RATE_MARGIN = 128
"""Of the highest rate of many messages, which varies less than the length of one."""
_FREE_BYTES = 256
"""Of a message, beside which bytes for a value are counted, so that a short message does not make all others longer."""
_RATE_UNITS = 256
"""Of a byte for a value."""
_ALIGNMENT = 16


class ExpectedLengths:
    """The bytes of the next message of each rank that are sent at once."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.forget()

    def forget(self) -> None:
        """See `VaryingMessages.forget`."""
        self.nbytes = [_HEAD_BYTES] * self._num_ranks


class VaryingMessages:
    """Messages from each rank to all, one at a time: [Note: Lengths that vary]."""

    def __init__(
        self, way: Communicator, hold: Hold, purpose: Purpose, *, expected: ExpectedLengths | None = None
    ) -> None:
        """Send along `way`. `hold` counts the memory that messages take.

        Others that may be under way at the same time have the same `expected`. Default: there are none.
        """
        self._way, self._hold, self._purpose = way, hold, purpose
        self._expected = expected or ExpectedLengths(way.size)
        self._first: Sequence[int] = ()
        """The bytes of each rank in the transfer that is under way."""
        self._sent: Tensor | None = None
        self._arriving: Tensor | None = None
        self._assumed: int | None = None
        """In a rehearsal the length of all messages."""
        self._pending = NOTHING

    def forget(self) -> None:
        """Forget the lengths of messages. All ranks do, before one of them sends the next."""
        self._expected.forget()

    def start(self, make: Callable[[], UnreadMessage], *, typical_bytes: int) -> None:
        """Begin to send the message that `make` returns to all. It may change afterwards.

        In a rehearsal nobody can read its length, and `typical_bytes` stands for it.
        """
        self._free()  # an exception may have cut the last crossing short
        body, length = make()
        self._assumed = None if self._way.has_peers else _HEAD_BYTES + typical_bytes
        end, expected = _HEAD_BYTES + len(body), self._expected.nbytes
        sent = body.new_zeros(max(end, expected[self._way.rank]))
        sent[:_HEAD_BYTES] = _heads(length.to(torch.int64) + _HEAD_BYTES)[0]
        sent[_HEAD_BYTES:end] = body
        self._sent, self._arriving = sent, body.new_empty(sum(expected))
        self._first = expected
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
        parts: Sequence[Tensor] = self._arriving.split(list(self._first))
        lengths = _numbers(torch.stack([part[:_HEAD_BYTES] for part in parts]))
        if self._assumed is not None:
            lengths = [self._assumed] * len(parts)
        _check_lengths(lengths, max(lengths) if lengths[self._way.rank] <= len(self._sent) else 0)
        rest = max(length - first for length, first in zip(lengths, self._first, strict=True))
        if rest > 0:
            parts = self._with_rest(parts, self._sent, round_up(rest, _ALIGNMENT))
        self._expected.nbytes = [round_up(length + length // _MARGIN, _ALIGNMENT) for length in lengths]
        self._free()
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            if rank != self._way.rank:
                read(rank, part[_HEAD_BYTES:length])

    def _with_rest(self, parts: Sequence[Tensor], sent: Tensor, rest: int) -> list[Tensor]:
        """The messages of all ranks, with `rest` bytes more of each."""
        begin = self._first[self._way.rank]
        piece = sent.new_zeros(rest)
        more = sent[begin : begin + rest]
        piece[: len(more)] = more
        arriving = piece.new_empty(rest * self._way.size)
        self._way.all_gather(arriving, piece, self._purpose, numels=[rest] * self._way.size).wait()
        return [torch.cat(both) for both in zip(parts, arriving.split(rest), strict=True)]

    @property
    def _nbytes(self) -> int:
        return sum(each.nbytes for each in (self._sent, self._arriving) if each is not None)

    def _free(self) -> None:
        self._hold(-self._nbytes)
        self._sent = self._arriving = None
        self._pending = NOTHING


class VaryingParts:
    """Messages from each rank to each other one: [Note: Lengths that vary]."""

    def __init__(self, way: Communicator) -> None:
        self.way = way
        self.rate: int | None = None
        """The _RATE_UNITS of bytes that are sent for a value. None: nothing is known yet."""

    def start(
        self, messages: Mapping[int, UnreadMessage], numels: Sequence[int], *, typical_bits: float
    ) -> PartsUnderWay:
        """Begin to send message r, which has `numels[r]` values, to rank r, for each other rank.

        `typical_bits` are those of a value about which nothing is known; in a rehearsal, where nobody can read lengths,
        of all.
        """
        typical = round(typical_bits * _RATE_UNITS / 8)
        if self.rate is None:
            self.rate = typical
        lengths = torch.cat([message.length for message in messages.values()]).to(torch.int64) + _HEAD_BYTES
        beyond = ((lengths - (_HEAD_BYTES + _FREE_BYTES)).clamp_(min=0) * _RATE_UNITS).split(1)
        rates = torch.cat([-(-each // max(1, numels[peer])) for each, peer in zip(beyond, messages, strict=True)])
        heads = _heads(lengths | (rates.amax() << _LENGTH_BITS))
        bodies = {
            peer: (head, message.buffer) for (peer, message), head in zip(messages.items(), heads, strict=True)
        }  # fmt: skip
        return PartsUnderWay(self, bodies, numels, None if self.way.has_peers else typical)


class PartsUnderWay:
    """The messages of `VaryingParts` under way."""

    def __init__(
        self,
        parts: VaryingParts,
        messages: Mapping[int, tuple[Tensor, Tensor]],
        numels: Sequence[int],
        assumed: int | None,
    ) -> None:
        """Send messages, a head and a buffer each, of which the first part has a meaning.

        `assumed` is the rate in a rehearsal.
        """
        assert parts.rate is not None
        self._parts, self._messages, self._numels, self._assumed = parts, messages, numels, assumed
        self._rate = parts.rate
        self._sent, self._arriving, self._pending = self._start([0] * len(numels), self._ends(self._rate))

    def _ends(self, rate: int) -> list[int]:
        """The bytes of the message to each rank that are sent at a rate."""
        return [
            round_up(_HEAD_BYTES + _FREE_BYTES - (-numel * rate // _RATE_UNITS), _ALIGNMENT) for numel in self._numels
        ]

    def _start(self, begins: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor, Pending]:
        """Begin to send a part of each message, filled up with zeros."""
        way, sizes = self._parts.way, [end - begin for begin, end in zip(begins, ends, strict=True)]
        own_bytes, sizes[way.rank] = sizes[way.rank], 0
        sent = self._own_head.new_zeros(sum(sizes))
        places = sent.split(sizes)
        for peer, (head, buffer) in self._messages.items():
            begin, place = begins[peer], places[peer]
            if begin == 0:
                place[:_HEAD_BYTES] = head
                begin, place = _HEAD_BYTES, place[_HEAD_BYTES:]
            part = buffer[begin - _HEAD_BYTES : ends[peer] - _HEAD_BYTES]
            place[: len(part)] = part
        arriving = sent.new_empty(way.size - 1, own_bytes)
        return sent, arriving, way.start_all_to_all(arriving, sent, numels=sizes)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self._sent.nbytes + self._arriving.nbytes + sum(buffer.nbytes for _, buffer in self._messages.values())

    @property
    def _own_head(self) -> Tensor:
        """The head of one of this rank's messages: all have its highest rate."""
        return next(iter(self._messages.values()))[0]

    def finish(self) -> dict[int, Tensor]:
        """Wait, and return the message of each other rank, (n,), uint8. The host reads lengths from the device.

        Raises:
            RuntimeError: a length is none.
        """
        self._pending.wait()
        way, arriving = self._parts.way, self._arriving
        numbers = _numbers(torch.cat([arriving[:, :_HEAD_BYTES], self._own_head.unsqueeze(0)]))
        most = max(number >> _LENGTH_BITS for number in numbers)
        lengths = [number % (1 << _LENGTH_BITS) for number in numbers[:-1]]
        if self._assumed is not None:
            most = self._assumed
            lengths = [_HEAD_BYTES + self._numels[way.rank] * most // _RATE_UNITS] * len(lengths)
        _check_lengths(lengths, self._ends(most)[way.rank])
        if most > self._rate:
            self._sent, more, pending = self._start(self._ends(self._rate), self._ends(most))
            pending.wait()
            arriving = torch.cat([arriving, more], dim=1)
        self._parts.rate = most + most // _RATE_MARGIN + 1
        self._messages, self._sent = {}, arriving.new_empty(0)
        peers = [peer for peer in range(way.size) if peer != way.rank]
        return {
            peer: row[_HEAD_BYTES:end] for peer, row, end in zip(peers, arriving, lengths, strict=True)
        }  # fmt: skip


def _heads(numbers: Tensor) -> Tensor:
    """The heads with these numbers, (n,), int64 -> (n, _HEAD_BYTES), uint8."""
    return torch.stack([numbers, ~numbers], dim=1).view(torch.uint8)


def _numbers(heads: Tensor) -> list[int]:
    """The numbers of heads, (n, _HEAD_BYTES), uint8; -1 of one that was damaged. The host waits for them."""
    found = heads.contiguous().view(torch.int64).tolist()
    return [number if number == ~turned else -1 for number, turned in found]


def _check_lengths(lengths: Sequence[int], most: int) -> None:
    if not _HEAD_BYTES <= min(lengths) <= max(lengths) <= most:
        raise RuntimeError(
            f"messages say that they are {lengths} bytes long, of which the first {_HEAD_BYTES} say so: they were "
            "damaged, or ranks do not run the same program"
        )
