"""Sums over ranks whose terms cross without loss in fewer bits: [Note: Lossless gradients] in lossless_gradients.py.

A rank that sums has the very terms of the others. It adds them in the order of ranks, in the dtype of the terms, as
`ReduceScatter.finish` does on a CPU: so both have the same bits. Of a sum over islands, which all ranks get, that holds
for two islands; a ring adds in another order for each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laconic.codec.lossless_gradients import TYPICAL_BITS, decode, encode
from laconic.codec.sums import Hold, finished
from laconic.codec.varying import ExpectedLengths, PartsUnderWay, VaryingMessages, VaryingParts
from laconic.comm.collectives import Communicator
from laconic.comm.moves import SumTransfer, SumWay


class LosslessSum(SumWay):
    """Sums whose terms cross without loss, in one trip or in two: [Note: The two trips of an all-reduce]."""

    def __init__(self, way: Communicator, hold: Hold) -> None:
        """Sum over the ranks of `way`. `hold` counts the memory of two trips."""
        self._way, self._hold = way, hold
        self._there, self._expected = VaryingParts(way), ExpectedLengths(way.size)

    def start_reduce_scatter(self, whole: Tensor, *, numels: Sequence[int] | None = None) -> LosslessTransfer:
        """See `Communicator.start_reduce_scatter`. `whole` is of bf16, float16 or fp32."""
        rank, size = self._way.rank, self._way.size
        parts = whole.view(size, -1).unbind() if numels is None else whole.split(list(numels))
        messages = {peer: encode(part) for peer, part in enumerate(parts) if peer != rank}
        under_way = self._there.start(messages, [len(part) for part in parts], typical_bits=TYPICAL_BITS[whole.dtype])
        return LosslessTransfer(parts, rank, under_way)

    def sum_in_place(self, whole: Tensor) -> Iterator[None]:
        """Sum `whole`, (n,), in place, so that all ranks get it alike. Yields during each of two trips.

        `whole` must not change until the end.
        """
        parts = whole.tensor_split(self._way.size)
        numels = [len(part) for part in parts]
        total = yield from finished(self.start_reduce_scatter(whole, numels=numels), self._hold)
        typical_bytes = round(len(total) * TYPICAL_BITS[total.dtype] / 8)
        back = VaryingMessages(self._way, self._hold, "gradients", expected=self._expected)  # others may be under way
        back.start(lambda: encode(total), typical_bytes=typical_bytes)
        yield
        parts[self._way.rank].copy_(total)
        back.finish(lambda peer, message: decode(message, parts[peer]))


class LosslessTransfer(SumTransfer):
    """A sum of `LosslessSum` on its first trip."""

    def __init__(self, parts: Sequence[Tensor], rank: int, under_way: PartsUnderWay) -> None:
        self._parts, self._rank, self._under_way, self.nbytes = parts, rank, under_way, under_way.nbytes
        self._arrived: dict[int, Tensor] | None = None

    def sent(self) -> Sequence[Tensor]:
        """See `SumTransfer.sent`."""
        return self._parts

    def received(self) -> Sequence[Tensor]:
        """See `SumTransfer.received`."""
        return [self._term(peer) for peer in range(len(self._parts))]

    def finish(self) -> Tensor:
        """Wait, and return this rank's part of the sum, (C,): see `ReduceScatter.finish`."""
        total = self._term(0).clone() if self._rank == 0 else self._term(0)
        for peer in range(1, len(self._parts)):
            total.add_(self._term(peer))
        return total

    def _term(self, peer: int) -> Tensor:
        own = self._parts[self._rank]
        if peer == self._rank:
            return own
        if self._arrived is None:
            self._arrived = self._under_way.finish()
        term = torch.empty_like(own)
        decode(self._arrived[peer], term)
        return term
