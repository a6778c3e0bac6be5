"""Messages between ranks whose lengths are known beforehand, or told by the messages themselves.

Each has one message for all others, in a gather, or one for each other one, in an exchange: [Note: Codings and
messages] in coding.py.

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
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from laconic.codec.coding import PartCoding
from laconic.codec.lossless import Ulps
from laconic.codec.lossless_gradients import Exponents
from laconic.codec.payload import FewBits
from laconic.comm.collectives import Communicator
from laconic.comm.moves import NOTHING, Pending, Tensors
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
_NOTHING_LOST: Mapping[int, Tensor] = MappingProxyType({})


class Way(Protocol):
    """The ranks that send to each other, as a `Communicator` has them."""

    rank: int
    size: int

    def start_all_to_all(self, landings: Tensor, messages: Tensor, /) -> Pending:
        """See `Communicator.start_all_to_all`."""

    def all_gather(self, whole: Tensor, piece: Tensor, purpose: Purpose, /) -> Pending:
        """See `Communicator.all_gather`."""


class UnderWay:
    """Messages that have begun to cross."""

    def __init__(
        self,
        pending: Pending,
        coding: PartCoding,
        rank: int,
        landing: Tensor,
        *,
        sent: Tensor,
        nbytes: int,
        read: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """Take what comes to this rank, `landing`: a row for each rank, or what `read` makes messages of in the end."""
        self.pending, self.coding, self._rank, self.landing = pending, coding, rank, landing
        self._read = read
        self.sent = sent
        """The bytes that leave this rank. The backend may still read them."""
        self.nbytes = nbytes
        """The bytes that it takes."""
        self._messages: Tensors | None = None

    def arrive(self) -> Tensors:
        """Wait, and return the message of each rank, (n,), uint8. Of an exchange, this rank's own has no meaning.

        If messages tell their lengths, the host reads these from the device.

        Raises:
            RuntimeError: a length is none.
        """
        if self._messages is None:
            self.pending.wait()
            self.pending = NOTHING
            self._messages = self.landing if self._read is None else self._read()
            self._read = None
        return self._messages

    def finish(self, parts: Tensors, *, adds: bool = False) -> None:
        """Wait for a gather, and write what came into the part of each rank, (n,); see `PartCoding.decode_into`.

        If the coding loses something, that has this rank's own part, too: [Note: Only decoded values count] in base.py.
        """
        messages, coding = self.arrive(), self.coding
        for index in coding.places(len(messages)):
            if index != self._rank or coding.loses:
                coding.decode_into(index, messages[index], parts[index], adds=adds)


class KnownLengths:
    """Messages as long as their coding says, all alike."""

    tells_lengths: ClassVar[bool] = False
    """True if the host must wait for messages to know how long they are."""

    def __init__(self, way: Way, coding: FewBits, device: torch.device, purpose: Purpose = "weights") -> None:
        """Send along `way` what is coded on `device`."""
        self.way, self.coding, self._device, self._purpose = way, coding, device, purpose

    def others_bytes(self, numel: int) -> int:
        """The bytes that a gather brings from the other ranks, which have `numel` values."""
        return (self.way.size - 1) * self.coding.nbytes

    def forget(self) -> None:
        """See `ToldLengths.forget`: here nothing hangs on earlier messages."""

    def start_gather(self, part: Tensor, *, base: Tensor | None = None) -> UnderWay:
        """Begin to send this rank's part, (n,), to all; with `base`, (n,), its difference to that."""
        way = self.way
        rows = torch.empty(way.size, self.coding.nbytes, dtype=torch.uint8, device=self._device)
        own = rows[way.rank]
        self.coding.encode(way.rank, part, own, base=base)
        pending = way.all_gather(rows.view(-1), own, self._purpose)
        return UnderWay(pending, self.coding, way.rank, rows, sent=rows, nbytes=rows.nbytes)

    def start_exchange(
        self, parts: Tensors, lost: Mapping[int, Tensor] = _NOTHING_LOST, *, codes_own: bool = False
    ) -> UnderWay:
        """Begin to send part r, (n,), to rank r, for each other rank; with `codes_own` this rank's own is coded, too.

        `lost` has what the coding has lost of earlier parts by their ranks: see `FewBits.encode`.

        Raises: ValueError if the coding checks values, and one is NaN or infinite.
        """
        way, coding = self.way, self.coding
        rows = torch.empty(way.size, coding.nbytes, dtype=torch.uint8, device=self._device)
        for index in coding.places(way.size):
            if index != way.rank or codes_own:
                coding.encode(index, parts[index], rows[index], lost=lost.get(index))
        landing = torch.empty_like(rows)
        pending = way.start_all_to_all(landing, rows)
        return UnderWay(pending, coding, way.rank, landing, sent=rows, nbytes=2 * rows.nbytes)


class ToldLengths:
    """Messages that tell how long they are: [Note: Lengths that vary]. Several may be under way at the same time."""

    tells_lengths: ClassVar[bool] = True
    """See `KnownLengths.tells_lengths`."""

    def __init__(self, way: Communicator, coding: Ulps | Exponents, purpose: Purpose) -> None:
        """Send along `way`. In a rehearsal, where nobody can read lengths, all messages have the typical one."""
        self.way, self.coding, self._purpose = way, coding, purpose
        self.rate: int | None = None
        """The _RATE_UNITS of bytes that are sent for a value in an exchange. None: nothing is known yet."""
        self.forget()

    def others_bytes(self, numel: int) -> int:
        """See `KnownLengths.others_bytes`: about as many, as nobody knows beforehand."""
        return int(numel * self.coding.typical_bits(torch.bfloat16) / 8)

    def forget(self) -> None:
        """Forget the lengths of gathers. All ranks do, before one of them sends the next."""
        self._expected = [_HEAD_BYTES] * self.way.size
        """The bytes of each rank's next message that are sent at once."""

    def start_gather(self, part: Tensor, *, base: Tensor | None = None) -> UnderWay:
        """See `KnownLengths.start_gather`. `part` may change afterwards."""
        way, expected = self.way, self._expected
        body, length = self.coding.encode(part, base)
        end, own_bytes = _HEAD_BYTES + len(body), expected[way.rank]
        sent = body.new_zeros(max(end, own_bytes))
        sent[:_HEAD_BYTES] = _heads(length.to(torch.int64) + _HEAD_BYTES)[0]
        sent[_HEAD_BYTES:end] = body
        arriving = body.new_empty(sum(expected))
        typical = None if way.has_peers else int(len(part) * self.coding.typical_bits(part.dtype) / 8)
        pending = way.all_gather(arriving, sent[:own_bytes], self._purpose, numels=expected)
        read = partial(self._read_gathered, expected, sent, arriving, typical)
        nbytes = sent.nbytes + arriving.nbytes
        return UnderWay(pending, self.coding, way.rank, arriving, sent=sent, nbytes=nbytes, read=read)

    def _read_gathered(
        self, first: Sequence[int], sent: Tensor, arriving: Tensor, typical: int | None
    ) -> Sequence[Tensor]:
        """The messages of all ranks, of which the `first` bytes have come. In a rehearsal they are `typical`."""
        rank, parts = self.way.rank, list(arriving.split(list(first)))
        lengths = _numbers(torch.stack([part[:_HEAD_BYTES] for part in parts]))
        if typical is not None:
            lengths = [_HEAD_BYTES + typical] * len(parts)
        _check_lengths(lengths, max(lengths) if lengths[rank] <= len(sent) else 0)
        rest = max(length - bytes_sent for length, bytes_sent in zip(lengths, first, strict=True))
        if rest > 0:
            parts = self._with_rest(parts, sent[first[rank] :], round_up(rest, _ALIGNMENT))
        self._expected = [round_up(length + length // _MARGIN, _ALIGNMENT) for length in lengths]
        return [part[_HEAD_BYTES:length] for part, length in zip(parts, lengths, strict=True)]

    def _with_rest(self, parts: Sequence[Tensor], sent: Tensor, rest: int) -> list[Tensor]:
        """The messages of all ranks, with `rest` bytes more of each; this rank's come from `sent`."""
        piece, size = sent.new_zeros(rest), self.way.size
        more = sent[:rest]
        piece[: len(more)] = more
        arriving = piece.new_empty(rest * size)
        self.way.all_gather(arriving, piece, self._purpose, numels=[rest] * size).wait()
        return [torch.cat(both) for both in zip(parts, arriving.split(rest), strict=True)]

    def start_exchange(self, parts: Tensors, lost: Mapping[int, Tensor] = _NOTHING_LOST) -> UnderWay:
        """See `KnownLengths.start_exchange`. These codings lose nothing, so `lost` is empty."""
        way, coding, numels = self.way, self.coding, [len(part) for part in parts]
        messages = {peer: coding.encode(part) for peer, part in enumerate(parts) if peer != way.rank}
        typical = round(coding.typical_bits(parts[0].dtype) * _RATE_UNITS / 8)
        rate = self.rate = typical if self.rate is None else self.rate
        lengths = torch.cat([message.length for message in messages.values()]).to(torch.int64) + _HEAD_BYTES
        beyond = ((lengths - (_HEAD_BYTES + _FREE_BYTES)).clamp_(min=0) * _RATE_UNITS).split(1)
        rates = torch.cat([-(-each // max(1, numels[peer])) for each, peer in zip(beyond, messages, strict=True)])
        heads = _heads(lengths | (rates.amax() << _LENGTH_BITS))
        buffers = {peer: message.buffer for peer, message in messages.items()}
        send = partial(self._send_parts, dict(zip(messages, heads, strict=True)), buffers)
        sent, arriving, pending = send([0] * len(numels), _ends(numels, rate))
        assumed = None if way.has_peers else typical
        read = partial(self._read_exchanged, send, numels, rate, heads[:1], arriving, assumed)
        nbytes = sent.nbytes + arriving.nbytes + sum(buffer.nbytes for buffer in buffers.values())
        return UnderWay(pending, coding, way.rank, arriving, sent=sent, nbytes=nbytes, read=read)

    def _send_parts(
        self, heads: Mapping[int, Tensor], buffers: Mapping[int, Tensor], begins: Sequence[int], ends: Sequence[int]
    ) -> tuple[Tensor, Tensor, Pending]:
        """Begin to send a part of each message, a head and the first bytes of a buffer, filled up with zeros."""
        way, sizes = self.way, [end - begin for begin, end in zip(begins, ends, strict=True)]
        own_bytes, sizes[way.rank] = sizes[way.rank], 0
        sent = next(iter(heads.values())).new_zeros(sum(sizes))
        places = sent.split(sizes)
        for peer, buffer in buffers.items():
            begin, place = begins[peer], places[peer]
            if begin == 0:
                place[:_HEAD_BYTES] = heads[peer]
                begin, place = _HEAD_BYTES, place[_HEAD_BYTES:]
            part = buffer[begin - _HEAD_BYTES : ends[peer] - _HEAD_BYTES]
            place[: len(part)] = part
        arriving = sent.new_empty(way.size - 1, own_bytes)
        return sent, arriving, way.start_all_to_all(arriving, sent, numels=sizes)

    def _read_exchanged(
        self,
        send: Callable[[Sequence[int], Sequence[int]], tuple[Tensor, Tensor, Pending]],
        numels: Sequence[int],
        rate: int,
        own_head: Tensor,
        arriving: Tensor,
        assumed: int | None,
    ) -> Sequence[Tensor]:
        """The messages of all ranks, of which the bytes of a rate have come. `assumed` is the rate in a rehearsal.

        `own_head`, (1, _HEAD_BYTES), is that of one of this rank's messages: all have its highest rate.
        """
        rank = self.way.rank
        numbers = _numbers(torch.cat([arriving[:, :_HEAD_BYTES], own_head]))
        most = max(number >> _LENGTH_BITS for number in numbers)
        lengths = [number % (1 << _LENGTH_BITS) for number in numbers[:-1]]
        if assumed is not None:
            most = assumed
            lengths = [_HEAD_BYTES + numels[rank] * most // _RATE_UNITS] * len(lengths)
        _check_lengths(lengths, _ends(numels, most)[rank])
        if most > rate:
            _, more, pending = send(_ends(numels, rate), _ends(numels, most))
            pending.wait()
            arriving = torch.cat([arriving, more], dim=1)
        self.rate = most + most // _RATE_MARGIN + 1
        messages = [row[_HEAD_BYTES:end] for row, end in zip(arriving, lengths, strict=True)]
        return [*messages[:rank], arriving.new_empty(0), *messages[rank:]]


def _ends(numels: Sequence[int], rate: int) -> list[int]:
    """The bytes of the message of so many values to each rank that are sent at a rate."""
    return [round_up(_HEAD_BYTES + _FREE_BYTES - (-numel * rate // _RATE_UNITS), _ALIGNMENT) for numel in numels]


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
