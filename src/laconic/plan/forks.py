"""Work on all processors of this machine, in forks of this process: they have its model and its trace already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_work: Callable[[int], Any] | None = None
"""Does the item of a number. Workers have it from the fork, since neither function nor items need be picklable."""


def map_forked(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yield `function` of each item, in order, as `map` does, from as many processes as there are processors.

    What `function` changes stays in its process; what it returns and raises is pickled. RuntimeError if one of the
    processes is killed. This process alone works where a fork could hang or fail: beside other threads, or where torch
    sees an accelerator, whose autograd has threads.
    """
    workers = min(len(items), len(os.sched_getaffinity(0))) if _may_fork() else 1
    if workers < 2:
        yield from map(function, items)
        return
    global _work

    def _work(number: int) -> _Result:
        return function(items[number])

    try:
        # A fork collects no garbage of this process: its destructors count on threads that the fork lacks, and crash.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=gc.freeze) as pool:
            yield from pool.map(_call, range(len(items)))
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} processes that worked for this one was killed, perhaps because this machine has too "
            "little memory for all; `taskset -c 0` in front of the command lets one process do all the work"
        ) from error
    finally:
        _work = None


def _may_fork() -> bool:
    can_fork = "fork" in multiprocessing.get_all_start_methods() and hasattr(os, "sched_getaffinity")
    is_alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    return can_fork and is_alone and torch.accelerator.device_count() == 0


def _call(number: int) -> Any:
    assert _work is not None
    return _work(number)
