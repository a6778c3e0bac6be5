"""Threads of the host: each is a timeline of its own.

[Note: Threads of the machine]
What a program submits to a thread runs at once, on the timeline of this thread. Only what orders threads counts: a job
comes after all that the thread which submits it has done, and whoever asks for its result comes after the job. So the
checker finds what both threads touch in between, and the executor may run the job as late as these orders let it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from laconic.rehearse.machine import Machine


class _Result(Future[Any]):
    """The result of a job."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine, self.end = machine, -1

    def result(self, timeout: float | None = None) -> Any:
        """Let the thread that asks wait for the job."""
        self._machine.wait(self._machine.thread, self.end, self._machine.site("result"))
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Let the thread that asks wait for the job, for the sake of its end: no memory need be ordered."""
        self._machine.wait(self._machine.thread, self.end, None)
        return super().exception(timeout)


class Thread:
    """A `futures.ThreadPoolExecutor` of one thread."""

    def __init__(self, machine: Machine, max_workers: int, thread_name_prefix: str = "") -> None:
        assert max_workers == 1
        self._machine = machine
        self._timeline = machine.new_timeline(thread_name_prefix or "thread", is_thread=True)

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a job: [Note: Threads of the machine]."""
        machine, future = self._machine, _Result(self._machine)
        machine.wait(self._timeline, machine.record(machine.thread, None), None)
        with machine.running_thread(self._timeline):
            try:
                future.set_result(job(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
        future.end = machine.record(self._timeline, None)
        return future


@contextmanager
def threads_of(machine: Machine) -> Iterator[None]:
    """Let the library make threads of the machine."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("laconic.") and vars(module).get("ThreadPoolExecutor") is futures.ThreadPoolExecutor:
                patches.enter_context(mock.patch.object(module, "ThreadPoolExecutor", partial(Thread, machine)))
        yield
