"""Sums over ranks whose terms cross in a coding: in one trip to the rank that sums, or in two, there and back.

[Note: The two trips of an all-reduce]
A vector is cut into as many parts as there are ranks. Every rank sends part r, encoded, to rank r. Rank r decodes the
parts of all ranks and sums them, in the order of ranks. It encodes the sum and sends it to all. Where only the owner
needs the sum, the first trip is enough. Encoded values are never summed. A rank sends and receives 2 (R - 1) / R of the
encoded vector.

If the coding loses something, terms are summed in fp32, and every rank, the owner too, uses the decoded sum, so all
ranks have the same bits. The owner's own term crosses nothing and stays exact. (Islands decode it like the others, so
that all terms have lost alike: islands/all_reduce.py.) If it loses nothing, a rank that sums has the very terms of the
others, and adds them in their dtype, as `ReduceScatter.finish` does on a CPU: so both have the same bits. Of a sum over
islands, which all ranks get, that holds for two islands; a ring adds in another order for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from laconic.codec.messages import KnownLengths, ToldLengths, UnderWay
from laconic.comm.moves import SumTransfer, SumWay, Tensors

Hold = Callable[[int], None]
"""Counts bytes of memory that are taken; a negative number when they are freed."""


class CodedSum(SumWay):
    """Sums whose terms cross in a coding, in one trip or in two: [Note: The two trips of an all-reduce].

    Source: in few bits, qgZ of ZeRO++ and its second hop (arXiv 2306.10209).
    """

    def __init__(
        self,
        there: KnownLengths | ToldLengths,
        hold: Hold,
        *,
        back: KnownLengths | ToldLengths | None = None,
        feedback: bool = False,
    ) -> None:
        """Sum over the ranks that send each other messages.

        Args:
            there: the messages of the first trip.
            hold: counts the memory of what `feedback` keeps, and of two trips.
            back: those of the second trip: the same parts, maybe in another coding. Default: as `there`.
            feedback: add to each term what the coding has lost of the earlier ones.
        """
        self._there, self._back, self._hold, self._feedback = there, back or there, hold, feedback
        self._lost: dict[int, Tensor] = {}
        """With feedback: what the coding has lost of the part for each rank, (n,), fp32."""

    def start_reduce_scatter(self, whole: Tensor, *, numels: Sequence[int] | None = None) -> CodedTransfer:
        """See `Communicator.start_reduce_scatter`. Parts are those of the coding, if it says what they are.

        Raises: ValueError if the coding checks values, and one is NaN or infinite.
        """
        way, numels = self._there.way, self._there.coding.numels or numels
        parts = whole.tensor_split(way.size) if numels is None else whole.split(list(numels))
        if self._feedback and not self._lost:
            self._begin_feedback(parts)
        return CodedTransfer(self._there.start_exchange(parts, self._lost), parts, way.rank)

    def sum_in_place(self, whole: Tensor) -> Iterator[None]:
        """Sum `whole`, all parts in order, in place, so that all ranks get it alike. Yields during each of two trips.

        `whole` must not change until the end. Elements that only fill it up keep what they have.
        """
        there = self.start_reduce_scatter(whole)
        self._hold(there.nbytes)
        yield
        total, parts = there.finish(), there.parts
        self._hold(-there.nbytes)
        del there
        back = self._back.start_gather(total)
        self._hold(back.nbytes)
        yield
        if not back.coding.loses:
            parts[self._back.way.rank].copy_(total)
        back.finish(parts)
        self._hold(-back.nbytes)

    def forget(self) -> None:
        """See `SumWay.forget`."""
        for lost in self._lost.values():
            self._hold(-lost.nbytes)
        self._lost.clear()

    def _begin_feedback(self, parts: Sequence[Tensor]) -> None:
        for index, part in enumerate(parts):
            if index != self._there.way.rank:
                lost = self._lost[index] = torch.zeros_like(part, dtype=torch.float32)
                self._hold(lost.nbytes)


class CodedTransfer(SumTransfer):
    """A sum of `CodedSum` on its first trip."""

    def __init__(self, under_way: UnderWay, parts: Sequence[Tensor], rank: int) -> None:
        self.under_way, self.parts, self._rank, self.nbytes = under_way, parts, rank, under_way.nbytes

    def sent(self) -> Tensors:
        """See `SumTransfer.sent`: the messages, or the parts themselves if receivers decode these."""
        return self.under_way.sent if self.under_way.coding.loses else self.parts

    def received(self) -> Sequence[Tensor]:
        """See `SumTransfer.received`. If the coding loses something, this rank's own has no meaning."""
        coding, messages = self.under_way.coding, self.under_way.arrive()
        return list(messages if coding.loses else coding.terms(self._rank, messages, self.parts[self._rank]))

    def finish(self) -> Tensor:
        """See `SumTransfer.finish`: the sum has the dtype of the input."""
        return self.under_way.coding.sum(self._rank, self.under_way.arrive(), self.parts[self._rank])
