"""SIGINT and SIGTERM: all ranks finish the same step, save, and end.

[Note: A signal to one rank]
A scheduler may signal every process or only one, and signals arrive in different steps. If each rank stopped at its own
signal, the others would hang in a collective. So ranks reduce the signal that each has received in a message that
starts with every step. A rank reads the result one step later, when all others have long sent theirs: nobody waits.
Islands meet only at syncs, so they look at every sync alone.

torchrun passes the signals that it gets on to its ranks, and so does a terminal. A rank may therefore get one Ctrl-C
twice, and a second signal must not break off the save. torchrun kills ranks that take longer than 30 seconds. Without
torchrun a second signal ends the process at once.
"""

import os
import signal
import threading
from collections import deque
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Receives signals in its `with` block: [Note: A signal to one rank]."""

    def __init__(self, group: dist.ProcessGroup, *, interval: int = 1) -> None:
        """Agree over `group`, which carries CPU tensors, every `interval` steps."""
        self._group, self._interval = group, interval
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._agreements: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
        self._lag = 1 if dist.get_world_size(group) > 1 else 0

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: Any, error: object, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None:
            for _, work in self._agreements:
                if work is not None:
                    work.wait()

    def begin_step(self, step: int) -> None:
        """Tell the other ranks at the start of a step whether this rank has received a signal. Collective."""
        if step % self._interval == 0:
            number = torch.tensor([self._received])
            work = dist.all_reduce(number, dist.ReduceOp.MAX, self._group, async_op=True) if self._lag else None
            self._agreements.append((number, work))

    def end_step(self) -> signal.Signals | None:
        """The signal after which all ranks stop now; None to go on. Collective."""
        if len(self._agreements) <= self._lag:
            return None
        number, work = self._agreements.popleft()
        if work is not None:
            work.wait()
        found = int(number) if self._lag else self._received
        return signal.Signals(found) if found else None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._received and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = self._received or number
