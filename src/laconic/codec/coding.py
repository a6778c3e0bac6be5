"""Codings: how the part of a vector that one rank sends becomes bytes, and values again.

[Note: Codings and messages]
What crosses between ranks is a coding times a kind of messages. A coding knows bytes and values, and nothing of who
sends. Messages know ranks and lengths, and nothing of values. So sums, gathers and the exchanges of islands are written
once, for all codings. The ring of the cyclic schedule sends messages of its own, from one device to the next, which
hold `FewBits`: cyclic/coding.py.

| coding | its bytes | what it loses |
|---|---|---|
| none: `Communicator` | the values as they are | nothing |
| `FewBits`, payload.py | known beforehand | much: the sender uses what receivers decode, or keeps what is lost |
| `Ulps`, lossless.py | vary, hang on what receivers hold | nothing |
| `Exponents`, lossless_gradients.py | vary | nothing |

| messages, in messages.py | each to all: a gather | one from each to each other: an exchange |
|---|---|---|
| `KnownLengths` | weights, the second trip of a sum | the first trip of a sum |
| `ToldLengths` | the same | the same |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from laconic.comm.moves import Tensors


class PartCoding(ABC):
    """The way from values to bytes and back: [Note: Codings and messages]."""

    loses: ClassVar[bool] = False
    """True if other values come out than went in."""
    numels: Sequence[int] | None = None
    """The elements of the part of each rank, if the coding hangs on them."""

    @abstractmethod
    def decode_into(self, index: int, message: Tensor, part: Tensor, *, adds: bool = False) -> None:
        """Write the values of a message into part `index`, (n,); with `adds`, it is the difference to what is there."""

    def places(self, num_ranks: int) -> Iterator[int]:
        """Yield the places of the parts, in order. What is coded until the next one belongs to the one yielded."""
        return iter(range(num_ranks))

    def terms(self, index: int, messages: Tensors, own: Tensor) -> Iterator[Tensor]:
        """Yield the terms of part `index` of a sum, (n,), in the order of ranks; that of rank `index` is `own`."""
        for rank, message in enumerate(messages):
            if rank == index:
                yield own
            else:
                term = torch.empty_like(own)
                self.decode_into(index, message, term)
                yield term

    def sum(self, index: int, messages: Tensors, own: Tensor) -> Tensor:
        """The sum of the terms of part `index`, (n,), in the dtype of the terms, as `ReduceScatter.finish` adds them.

        So it has the bits of an exact sum. It shares no memory with `own`.
        """
        terms = self.terms(index, messages, own)
        total = next(terms)
        if total is own:
            total = own.clone()
        for term in terms:
            total.add_(term)
        return total

    def check(self) -> None:  # noqa: B027  most codings find nothing
        """Look at what a device has found in the messages so far.

        Raises:
            ValueError: a message did not fit.
        """

    def forget(self) -> None:  # noqa: B027  likewise
        """Forget what a device has found."""
