"""Sums over ranks whose terms cross in few bits: in one trip to the rank that sums, or in two, there and back.

[Note: The two trips of an all-reduce]
A vector is cut into as many parts as there are ranks. Every rank sends part r, encoded, to rank r. Rank r decodes the
parts of all ranks and sums them in fp32, in the order of ranks. It encodes the sum and sends it to all. Every rank, the
owner too, uses the decoded sum, so all ranks have the same bits. Encoded values are never summed. A rank sends and
receives 2 (R - 1) / R of the encoded vector. Where only the owner needs the sum, the first trip is enough.

The owner's own term crosses nothing. It stays exact, or is decoded like the others, so that all ranks' terms have lost
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic.codec.payload import Payload, Piece
from laconic.comm.moves import NOTHING, Pending, SumTransfer, SumWay
from laconic.comm.traffic import Purpose


class Way(Protocol):
    """The ranks that send to each other, as a `Communicator` has them."""

    rank: int
    size: int

    def start_all_to_all(self, landings: Tensor, messages: Tensor, /) -> Pending:
        """See `Communicator.start_all_to_all`."""

    def all_gather(self, whole: Tensor, piece: Tensor, purpose: Purpose, /) -> Pending:
        """See `Communicator.all_gather`."""


Hold = Callable[[int], None]
"""Counts bytes of memory that are taken; a negative number when they are freed."""


def finished(trip: SumTransfer, hold: Hold) -> Generator[None, None, Tensor]:
    """Yield while a sum is on its first trip, whose memory counts so long. Returns this rank's part of it, (n,)."""
    nbytes = trip.nbytes
    hold(nbytes)
    yield
    total = trip.finish()
    hold(-nbytes)
    return total


class Messages:
    """The parts of a vector, each as one message from its rank to all."""

    def __init__(self, way: Way, payload: Payload, hold: Hold, purpose: Purpose = "weights") -> None:
        self._way, self._payload, self._hold, self._purpose = way, payload, hold, purpose
        self._all: Tensor | None = None
        self._pending = NOTHING

    @property
    def others_bytes(self) -> int:
        """The bytes that come from the other ranks."""
        return (self._way.size - 1) * self._payload.nbytes

    def start(self, part: Tensor, device: torch.device, *, base: Tensor | None = None) -> None:
        """Begin to send this rank's part, (n,), coded on `device`; with `base`, (n,), its difference to that.

        Of pieces that are exact, the values themselves are sent.
        """
        self._free()  # an exception may have cut the last crossing short
        self._all = torch.empty(self._way.size, self._payload.nbytes, dtype=torch.uint8, device=device)
        self._hold(self._all.nbytes)
        own = self._all[self._way.rank]

        def values(piece: Piece) -> Tensor:
            return part[piece.values].to(device, non_blocking=True)

        subtracted = None if base is None else lambda piece: base[piece.values]
        self._payload.encode(self._way.rank, values, own, base=subtracted)
        self._pending = self._way.all_gather(self._all.view(-1), own, self._purpose)

    def arrived(self) -> Iterator[tuple[int, Piece, Tensor]]:
        """Wait. Yield each rank, in order, with the pieces of its part and the values that came for them, (n,), fp32.

        That ends the crossing.
        """
        assert self._all is not None
        self._pending.wait()
        for index in self._payload.places():
            for piece, values in self._payload.decode(index, self._all[index]):
                yield index, piece, values
        self._free()

    def finish(self, whole: Tensor, *, adds: bool = False) -> None:
        """Wait, and write what came into `whole`, all parts in order; with `adds`, add the differences to it.

        Elements that only fill up the vector keep what they have.
        """
        assert self._all is not None
        self._pending.wait()
        for index in self._payload.places():
            self._payload.decode_into(index, self._all[index], self._payload.part_of(whole, index), adds=adds)
        self._free()

    def _free(self) -> None:
        if self._all is not None:
            self._hold(-self._all.nbytes)
        self._all, self._pending = None, NOTHING


class CodedSum(SumWay):
    """Sums whose terms cross in few bits, in one trip or in two: [Note: The two trips of an all-reduce].

    Source: qgZ of ZeRO++ and its second hop (arXiv 2306.10209).
    """

    def __init__(
        self,
        way: Way,
        payload: Payload,
        hold: Hold,
        *,
        keeps_own: bool,
        feedback: bool = False,
        back: Payload | None = None,
    ) -> None:
        """Sum the parts of `payload` over the ranks of `way`.

        Args:
            way: the ranks.
            payload: their parts, in their order.
            hold: counts the memory of what `feedback` keeps, and of two trips.
            keeps_own: this rank's own term stays exact, and is not decoded like the others.
            feedback: add to each term what the codec has lost of the earlier ones.
            back: the payload of the second trip: the same parts, maybe with another codec.
        """
        self._way, self._payload, self._hold, self._back = way, payload, hold, back
        self._keeps_own, self._feedback = keeps_own, feedback
        self._lost: dict[int, Tensor] = {}
        """With feedback: what the codec has lost of the part for each rank, (n,), fp32."""

    def start_reduce_scatter(self, whole: Tensor, *, numels: Sequence[int] | None = None) -> CodedTransfer:
        """Begin to sum `whole`, all parts in order, of which each rank gets its own. It must not change until the end.

        The payload says what the parts are, so `numels` says nothing new.

        Raises: ValueError if the payload checks values, and one is NaN or infinite.
        """
        rank, payload = self._way.rank, self._payload
        messages = torch.empty(len(payload.numels), payload.nbytes, dtype=torch.uint8, device=whole.device)
        if self._feedback and not self._lost:
            self._begin_feedback(whole)
        for index in payload.places():
            if index != rank or not self._keeps_own:
                self._encode(index, payload.part_of(whole, index), messages[index])
        landing = torch.empty_like(messages)
        pending = self._way.start_all_to_all(landing, messages)
        own = payload.part_of(whole, rank)
        return CodedTransfer(payload, rank, own, self._keeps_own, messages, landing, pending)

    def sum_in_place(self, whole: Tensor) -> Iterator[None]:
        """Sum `whole`, all parts in order, in place, so that all ranks get it alike. Yields during each of two trips.

        `whole` must not change until the end. Elements that only fill it up keep what they have.
        """
        assert self._back is not None, "this sum has no way back"
        total = yield from finished(self.start_reduce_scatter(whole), self._hold)
        back = Messages(self._way, self._back, self._hold, "gradients")
        back.start(total, total.device)
        yield
        back.finish(whole)

    def forget(self) -> None:
        """See `SumWay.forget`."""
        for lost in self._lost.values():
            self._hold(-lost.nbytes)
        self._lost.clear()

    def _begin_feedback(self, whole: Tensor) -> None:
        for index in range(len(self._payload.numels)):
            if index != self._way.rank or not self._keeps_own:
                lost = torch.zeros_like(self._payload.part_of(whole, index), dtype=torch.float32)
                self._lost[index] = lost
                self._hold(lost.nbytes)

    def _encode(self, index: int, part: Tensor, message: Tensor) -> None:
        if not self._feedback:
            self._payload.encode(index, lambda piece: part[piece.values], message)
            return
        lost = self._lost[index].add_(part)
        self._payload.encode(index, lambda piece: lost[piece.values], message)
        for piece, values in self._payload.decode(index, message):
            rest = lost[piece.values].sub_(values)
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # a step that is skipped loses nothing


@dataclass(eq=False)
class CodedTransfer(SumTransfer):
    """A sum of `CodedSum` on its first trip."""

    payload: Payload
    rank: int
    own: Tensor
    keeps_own: bool
    messages: Tensor
    """The parts, (R, n): row r is what this rank sends to rank r. The backend may still read them."""
    landing: Tensor
    pending: Pending

    def __post_init__(self) -> None:
        self.nbytes = self.messages.nbytes + self.landing.nbytes

    def sent(self) -> Tensor:
        """See `SumTransfer.sent`."""
        return self.messages

    def received(self) -> Sequence[Tensor]:
        """See `SumTransfer.received`. This rank's own has no meaning."""
        self._arrive()
        return list(self.landing)

    def _arrive(self) -> None:
        self.pending.wait()
        self.pending = NOTHING

    def finish(self, weights: Sequence[float] | None = None) -> Tensor:
        """Wait, and return this rank's part of the sum: in fp32, then in the dtype of the input.

        `weights` has one factor for each rank's term. Default: 1 for all.
        """
        self._arrive()
        total = torch.zeros_like(self.own, dtype=torch.float32)
        for index in self.payload.places():
            weight = 1.0 if weights is None else weights[index]
            if index == self.rank and self.keeps_own:
                total.add_(self.own, alpha=weight)
                continue
            sent = (self.messages if index == self.rank else self.landing)[index]
            for piece, values in self.payload.decode(self.rank, sent):
                total[piece.values].add_(values, alpha=weight)
        return total.to(self.own.dtype)
