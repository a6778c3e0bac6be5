"""A transfer along one level: bound once, with its ranks, bytes and name, and made as often as it is wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from laconic.comm.journal import Label, Ticket, journal_of
from laconic.comm.traffic import Level, LevelBytes, Traffic
from laconic.comm.watch import waiting_for

Tensors = Sequence[Tensor] | Tensor
"""Tensors by rank: those of a sequence, or rows."""


class Pending(waiting_for):
    """A transfer under way."""

    __slots__ = ("_works",)

    def __init__(
        self,
        works: Sequence[Any],
        traffic: Traffic,
        level: Level,
        ticket: Ticket | None = None,
    ) -> None:
        """Take what `wait` waits for, None for what is there; the time is counted in `traffic` for `level`."""
        self._works = works
        self.transfer, self.ticket, self.seconds, self.key = ticket or "control", ticket, traffic.waits, level

    def wait(self) -> None:
        """Block this thread until the data may be used. With NCCL, call this on the stream that began the transfer."""
        if not self._works:  # a stream orders it, and nothing blocks
            return
        with self:
            for work in self._works:
                if work is not None:
                    work.wait()


NOTHING = Pending((), Traffic(), "local")
"""No transfer is under way, or it is one on a level of one rank."""


class Move:
    """One transfer of this rank along a level, bound: `start` makes it, as often as it is wanted.

    Steps make the same transfers again and again. What does not change between them is found once: the ranks, the
    bytes, the name. The tensors come with each start.
    """

    __slots__ = (
        "_begin", "_counted", "_has_begun", "_is_stream_ordered", "_journal", "_label", "_sends", "_traffic", "level",
    )  # fmt: skip

    def __init__(
        self,
        begin: Callable[..., Any],
        traffic: Traffic,
        level: Level,
        group: dist.ProcessGroup | None,
        label: Label,
        counted: tuple[LevelBytes, ...],
        *,
        sends: bool = False,
        is_stream_ordered: bool = False,
    ) -> None:
        """Bind a transfer between the ranks of a group; None stands for this rank alone, which waits for nobody.

        Args:
            begin: begins it, with the arguments of `start`, and returns the backend's work, a list of works, or None.
            traffic: counts bytes, and the time of waiting.
            level: the level on which time is counted.
            group: see above.
            label: its name in the journal.
            counted: the bytes of each start.
            sends: it is made of sends and receives, and `begin` takes the ticket first.
            is_stream_ordered: a stream orders what follows, and waiting never blocks.
        """
        self._begin, self._traffic, self.level, self._label, self._counted = begin, traffic, level, label, counted
        self._journal = None if group is None else journal_of(group)
        self._sends, self._is_stream_ordered, self._has_begun = sends, is_stream_ordered, False

    def start(self, *tensors: Any) -> Pending:
        """Count the transfer, note it in the journal, and begin it."""
        traffic = self._traffic
        if self._has_begun and Traffic.observer is None:  # again and again, so only its times are counted
            traffic.begun[self._counted] += 1
        else:
            self._has_begun = True
            for level, purpose, sent_bytes, received_bytes in self._counted:
                traffic.count(level, purpose, sent_bytes=sent_bytes, received_bytes=received_bytes)
        if self._journal is None:
            self._begin(*tensors)
            return NOTHING
        ticket = Ticket(self._journal, self._label)
        work = self._begin(ticket, *tensors) if self._sends else self._begin(*tensors)
        if not self._is_stream_ordered:
            return Pending(work if type(work) is list else (work,), traffic, self.level, ticket)
        if work is not None:
            work.wait()  # without a block: the stream waits
        return Pending((), traffic, self.level, ticket)


class SumTransfer(ABC):
    """A sum over ranks that has begun, of which this rank gets its part."""

    nbytes: int
    """The bytes that it takes besides its input."""

    @abstractmethod
    def sent(self) -> Tensors:
        """The parts of the input as they are sent: part r is what this rank sends to rank r."""

    @abstractmethod
    def received(self) -> Tensors | None:
        """Wait, and return what each rank has sent, in rank order; None if the backend has added it up already."""

    @abstractmethod
    def finish(self) -> Tensor:
        """Wait, and return this rank's part of the sum, (C,)."""


class SumWay(ABC):
    """A way to sum tensors over the ranks of a level."""

    @abstractmethod
    def start_reduce_scatter(self, whole: Tensor, *, numels: Sequence[int] | None = None) -> SumTransfer:
        """Begin to sum `whole` over the ranks; this rank will get its own part, of `numels[rank]` elements."""

    @abstractmethod
    def sum_in_place(self, whole: Tensor) -> Iterator[None]:
        """Sum `whole` in place, so that all ranks get it alike. Yields while the sum is under way."""

    def forget(self) -> None:  # noqa: B027  most ways lose nothing
        """Drop what a codec has lost so far."""
