"""SIGINT and SIGTERM: all ranks finish the same step, save, and end.

[Note: All stop where the furthest is]
A scheduler may signal every process or only one, and signals arrive in different steps. If each rank stopped at its own
signal, the others would hang in a collective. And islands meet only at syncs, which may be a hundred steps apart: too
long for an agreement in their steps. So each rank has a thread that looks in the rendezvous store for a signal. When
there is one, every thread holds its rank at the end of the present step and tells the others which step that is. All
ranks then go on to the furthest of these steps, and stop there. The threads never wait for a collective or a sync, so
ranks in one can tell, too; and no rank begins a step while its thread has told and does not know the result, so none
gets beyond it. Ranks that meet in every step, and islands of equal speed, stop at the next step. Slower ones have to
catch up, because a checkpoint in which all islands are at one step goes on to the same bits. If that takes them longer
than torchrun waits, the run ends as by a kill.

torchrun passes the signals that it gets on to its ranks, and so does a terminal. A rank may therefore get one Ctrl-C
twice, and a second signal must not break off the save. torchrun kills ranks that take longer than 30 seconds. Without
torchrun a second signal ends the process at once.
"""

import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta
from types import FrameType
from typing import Any, Self
from uuid import uuid4

import torch.distributed as dist

from laconic.comm.agreement import RankGroup
from laconic.comm.entries import EntryError, decode, encode

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNAL = "signal"  # a key of the store
_LOOK_S = 1.0  # between two looks into the store
_ANSWER_S = 20.0  # for all ranks to tell their step; less than torchrun waits
_LEAVE_S = 1.0  # for the thread to end


class StopSignals:
    """Receives signals in its `with` block, and agrees with other ranks: [Note: All stop where the furthest is]."""

    def __init__(self, first_step: int) -> None:
        """Agree over the store of the default process group. Collective.

        `first_step` is the first step of this rank; equal on all.
        """
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}
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
        if self._num_ranks > 1:
            name = RankGroup().broadcast(uuid4().hex)  # several runs may share a store
            # a clone has a connection of its own, so the thread never waits behind a blocking call of the main thread
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=_ANSWER_S))
            self._store = dist.PrefixStore(f"laconic/stop/{name}", store)

    def __enter__(self) -> Self:
        if self._num_ranks > 1:
            self._thread.start()
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: Any, error: object, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._num_ranks == 1:
            return
        self._is_over.set()
        self._thread.join(None if kind is None else _LEAVE_S)
        if kind is None and self._last is None:  # others that agree later stop where this rank is
            with contextlib.suppress(RuntimeError):  # the store ends with the process that hosts it
                self._store.set(str(self._rank), encode(self._step))

    def end_step(self, step: int) -> signal.Signals | None:
        """The signal after which all ranks stop now, at the end of `step`; None to go on.

        Waits for one trip to the store if ranks agree now.
        """
        if self._num_ranks == 1:
            return signal.Signals(self._received) if self._received else None
        with self._changed:
            while self._is_held:
                self._changed.wait()
            if self._last is not None and step >= self._last[0]:
                return self._last[1]
            self._step = step + 1
        return None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._received and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = self._received or number

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
