"""SIGINT and SIGTERM: all ranks finish the same step, save, and end.

[Note: A signal to one rank]
A scheduler may signal every process or only one, and signals arrive in different steps. If each rank stopped at its own
signal, the others would hang in a collective. So ranks reduce the signal that each has received in a message that
starts with every step. A rank reads the result one step later, when all others have long sent theirs: nobody waits.

torchrun passes the signals that it gets on to its ranks, and so does a terminal. A rank may therefore get one Ctrl-C
twice, and a second signal must not break off the save. torchrun kills ranks that take longer than 30 seconds. Without
torchrun a second signal ends the process at once.

[Note: Islands stop where the furthest is]
Islands meet only at syncs, which may be a hundred steps apart: too long for an agreement in their steps. So each rank
has a thread that looks in the rendezvous store for a signal. When there is one, every thread holds its rank at the end
of the present step and tells the others which step that is. All ranks then go on to the furthest of these steps, and
stop there. The threads never wait for a sync, so ranks in a sync can tell, too; and no rank begins a step while its
thread has told and does not know the result, so none gets beyond it. Islands of equal speed stop at the next step.
Slower ones have to catch up, because a checkpoint in which all islands are at one step goes on to the same bits. If
that takes them longer than torchrun waits, the run ends as by a kill.
"""

import contextlib
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from datetime import timedelta
from types import FrameType
from typing import Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist

from laconic.comm.agreement import RankGroup
from laconic.comm.entries import EntryError, decode, encode

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNAL = "signal"  # a key of the store
_LOOK_S = 0.2  # between two looks into the store
_ANSWER_S = 20.0  # for all ranks to tell their step; less than torchrun waits
_LEAVE_S = 1.0  # for the thread to end


class StopSignals(ABC):
    """Receives signals in its `with` block. The subclasses agree on the step after which all ranks stop."""

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: Any, error: object, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._end(in_order=kind is None)

    @abstractmethod
    def begin_step(self) -> None:
        """Tell the other ranks at the start of a step whether this rank has received a signal. Collective."""

    @abstractmethod
    def end_step(self, step: int) -> signal.Signals | None:
        """The signal after which all ranks stop now, at the end of `step`; None to go on. Collective."""

    @abstractmethod
    def _end(self, *, in_order: bool) -> None:
        """Release what the agreement needs. `in_order`: all ranks leave the block."""

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._received and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = self._received or number


class StopTogether(StopSignals):
    """For ranks that meet in every step: [Note: A signal to one rank]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Agree over `group`, which carries CPU tensors."""
        super().__init__()
        self._group = group
        self._agreements: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
        self._lag = 1 if dist.get_world_size(group) > 1 else 0

    def begin_step(self) -> None:
        """See `StopSignals.begin_step`."""
        number = torch.tensor([self._received])
        work = dist.all_reduce(number, dist.ReduceOp.MAX, self._group, async_op=True) if self._lag else None
        self._agreements.append((number, work))

    def end_step(self, step: int) -> signal.Signals | None:
        """See `StopSignals.end_step`."""
        if len(self._agreements) <= self._lag:
            return None
        number, work = self._agreements.popleft()
        if work is not None:
            work.wait()
        found = int(number) if self._lag else self._received
        return signal.Signals(found) if found else None

    def _end(self, *, in_order: bool) -> None:
        for _, work in self._agreements if in_order else ():
            if work is not None:
                work.wait()


class StopAtFurthest(StopSignals):
    """For islands, which meet at syncs: [Note: Islands stop where the furthest is]."""

    def __init__(self, first_step: int) -> None:
        """Agree over the store of the default process group. Collective.

        `first_step` is the first step of this rank; equal on all.
        """
        super().__init__()
        name = RankGroup().broadcast(uuid4().hex)  # several runs may share a store
        # a clone has a connection of its own, so the thread never waits behind a blocking call of the main thread
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._store = dist.PrefixStore(f"laconic/stop/{name}", store)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._step = first_step
        """The step that this rank takes."""
        self._is_held = False
        """Whether the thread has told the others this step, and does not yet know theirs."""
        self._last: tuple[int, signal.Signals] | None = None
        """The step after which all ranks stop, and the signal."""
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-stop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return super().__enter__()

    def begin_step(self) -> None:
        """See `StopSignals.begin_step`."""

    def end_step(self, step: int) -> signal.Signals | None:
        """See `StopSignals.end_step`. Waits for one trip to the store if ranks agree now."""
        with self._changed:
            while self._is_held:
                self._changed.wait()
            if self._last is not None and step >= self._last[0]:
                return self._last[1]
            self._step = step + 1
        return None

    def _end(self, *, in_order: bool) -> None:
        self._is_over.set()
        self._thread.join(None if in_order else _LEAVE_S)
        if in_order and self._last is None:  # others that agree later stop where this rank is
            with contextlib.suppress(RuntimeError):  # the store ends with the process that hosts it
                self._store.set(str(self._rank), encode(self._step))

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_LOOK_S):
                if self._received:
                    self._store.set(_SIGNAL, encode(self._received))
                if self._store.check([_SIGNAL]):
                    self._agree()
                    return
        except (RuntimeError, EntryError) as error:  # the store is lost, or what stands there is damaged
            print(
                f"rank {self._rank} cannot agree with the others to stop: {str(error).splitlines()[0]}; from now on a "
                "signal does not end this run in order",
                file=sys.stderr,
                flush=True,
            )
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def _agree(self) -> None:
        """Learn after which step all ranks stop. Meanwhile this rank begins no step."""
        with self._changed:
            self._is_held = True
            step = self._step
        self._store.set(str(self._rank), encode(step))
        steps = [decode(int, self._store.get(str(rank))) for rank in range(self._num_ranks)]
        self._last = max(steps), decode(signal.Signals, self._store.get(_SIGNAL))
