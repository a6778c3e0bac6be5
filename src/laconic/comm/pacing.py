"""Exchanges of all with all across three or more nodes, in small pieces that leave one after the other.

[Note: Rounds of pieces]
If all nodes send to all at once, several streams share each port of the switch, and none gets an equal part: some ranks
are done early, and their ports are idle while others are full. Acknowledgements, and Gloo's word that a receive is
ready, wait in the queues behind data. On four nodes at 200 Mbit/s messages of 1 to 4 MB came at 0.68 to 0.89 of the
rate in the lab, where a port queues 0.2 s, though no packet was lost. So messages travel in rounds: in round k a rank
sends to rank r + k and receives from rank r - k. And they travel in pieces, the next one when this one has come and
gone. So ranks keep step, and queues stay short. In steps of training that is faster than two pieces under way. Two
nodes have one stream each way, and send all at once, as do the ranks inside a node.

A piece takes long beside the time of Python that posts it, and is short beside what a queue holds. So it has the bytes
of `_PIECE_S` at the rate of the slowest rank. An exchange that is no longer altogether goes all at once: rounds would
cost it a latency each. The ranks measure this rate, and agree on it, before the 9th exchange of
a group, the 17th, the 33rd, and so on.

Somebody must post the next piece when one has arrived. A thread does so, one for the process. It takes exchanges in the
order in which they are issued, which is the same on all ranks. So no two ranks wait for each other, and what compute
needs first comes first.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE_S = 0.01
_LEAST_BYTES, _MOST_BYTES = 1 << 17, 1 << 23
_FIRST_AGREEMENT = 8


class _Pace:
    """The size of the pieces of one process group, which all its ranks know."""

    def __init__(self) -> None:
        self.piece_bytes = _LEAST_BYTES
        self._num_exchanges = 0
        self._bytes_per_s = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Note that an exchange sent `nbytes` in so many seconds. Some wait for late ranks, so the fastest counts."""
        self._bytes_per_s = max(self._bytes_per_s, nbytes / seconds)

    def begin(self) -> bool:
        """Begin another exchange. Returns whether the ranks shall agree on a rate before: all at the same exchange."""
        before = self._num_exchanges
        self._num_exchanges += 1
        return before >= _FIRST_AGREEMENT and before & (before - 1) == 0

    def agree(self, group: dist.ProcessGroup, tag: int) -> None:
        """Set the size of pieces by the slowest rank's rate. Collective over the group."""
        mine = torch.tensor([int(self._bytes_per_s)])
        theirs = list(mine.repeat(group.size()).split(1))
        for works in _in_rounds(group, tag, theirs, [mine] * group.size(), piece_bytes=mine.nbytes):
            _finish(works)
        rate = float(torch.stack(theirs).min())
        self.piece_bytes = int(min(max(rate * _PIECE_S, _LEAST_BYTES), _MOST_BYTES))
        self._bytes_per_s = 0.0


class PacedExchange:
    """One exchange of a rank with all others, as a `dist.Work`."""

    def __init__(
        self, group: dist.ProcessGroup, tag: int, landings: Sequence[Tensor], messages: Sequence[Tensor]
    ) -> None:
        """Receive `landings[r]` from rank r of the group and send it `messages[r]`."""
        self.group, self._tag = group, tag
        self._landings, self._messages = landings, messages
        self._has_ended = threading.Event()
        self._error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that this rank sends, or those that it receives if they are more."""
        own = self.group.rank()
        return max(
            sum(each.nbytes for rank, each in enumerate(tensors) if rank != own)
            for tensors in (self._messages, self._landings)
        )

    def wait(self) -> None:
        """Block this thread until all pieces have come and gone.

        Raises:
            RuntimeError: a connection is lost.
        """
        self._has_ended.wait()
        if self._error is not None:
            raise self._error

    def send(self, pace: _Pace) -> None:
        """Post one piece after the other, of a small exchange all together. Then let `wait` return."""
        try:
            if pace.begin():
                pace.agree(self.group, self._tag)
            start_s = time.monotonic()
            pieces = _in_rounds(self.group, self._tag, self._landings, self._messages, piece_bytes=pace.piece_bytes)
            if self.nbytes <= pace.piece_bytes:
                pieces = iter([[work for works in pieces for work in works]])
            for works in pieces:
                _finish(works)
            pace.note(self.nbytes, time.monotonic() - start_s)
        except Exception as error:  # of the backend; the thread that waits raises it
            self._error = error
        self._landings = self._messages = ()
        self._has_ended.set()


def _in_rounds(
    group: dist.ProcessGroup, tag: int, landings: Sequence[Tensor], messages: Sequence[Tensor], *, piece_bytes: int
) -> Iterator[list[dist.Work]]:
    """Post the pieces of an exchange round by round, and yield the works of each: [Note: Rounds of pieces]."""
    rank, size = group.rank(), group.size()
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        incoming, outgoing = (
            each.view(-1).view(torch.uint8).split(piece_bytes) for each in (landings[source], messages[target])
        )
        for landing, message in zip_longest(incoming, outgoing):  # what comes may be longer than what goes
            works = [] if landing is None else [dist.irecv(landing, group=group, group_src=source, tag=tag)]
            works += [] if message is None else [dist.isend(message, group=group, group_dst=target, tag=tag)]
            yield [work for work in works if work is not None]


def _finish(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


_pump: queue.SimpleQueue[PacedExchange] | None = None
"""The exchanges that the thread of [Note: Rounds of pieces] has not sent yet; None as long as there is no thread."""


def _send_all(exchanges: queue.SimpleQueue[PacedExchange]) -> None:
    paces: weakref.WeakKeyDictionary[dist.ProcessGroup, _Pace] = weakref.WeakKeyDictionary()
    while True:
        exchange = exchanges.get()
        exchange.send(paces.setdefault(exchange.group, _Pace()))
        del exchange  # while the next one is awaited, nothing keeps this one's process group


def start_paced_exchange(
    group: dist.ProcessGroup, tag: int, landings: Sequence[Tensor], messages: Sequence[Tensor]
) -> PacedExchange:
    """Begin an exchange with all other ranks of a Gloo group, on CPU tensors, after the earlier ones."""
    global _pump
    if _pump is None:
        _pump = queue.SimpleQueue()
        threading.Thread(target=_send_all, args=(_pump,), name="laconic-pacing", daemon=True).start()
    exchange = PacedExchange(group, tag, landings, messages)
    _pump.put(exchange)
    return exchange
