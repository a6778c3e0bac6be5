"""The promise of `make test`: its tests stay in this process, and wait for nothing that is outside of it.

A test that carries no marker `machine`, `campaign` or `cuda` runs as a player of turns (laconic.rehearse.turns): its
clock is the turns' own, and threads that it starts take turns with it. In its body sockets, new processes and the
kernel's counters of the network are errors.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from laconic.rehearse.blocking import cooperating
from laconic.rehearse.in_process import ranks
from laconic.rehearse.turns import Turns
from tests.support.shared import left_as_it_was

OUTSIDE = ("machine", "campaign", "cuda")
"""The markers of tests that may leave the process."""
_EVENTS = ("socket.__new__", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
_FONTS = ("fc-list",)
"""matplotlib asks it for the fonts of a machine, when it is first imported there."""
_COUNTERS = ("/sys/class/net", "/proc/net")
_is_inside = False


class LeftProcessError(BaseException):
    """A test of `make test` has left the process; no `except Exception` hides it."""


def _refuse(deed: str) -> None:
    raise LeftProcessError(f"a test of `make test` must not do this: {deed}; mark it `machine`, or take it inside")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_inside:
        return
    if event in _EVENTS and arguments[:1] != _FONTS:
        _refuse(f"{event} {arguments}")
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(_COUNTERS):
        _refuse(f"read {arguments[0]}")


sys.addaudithook(_audit)


def _refusing(real: type) -> type:
    """A class in place of one that opens sockets in C++."""
    return type(real.__name__, (real,), {"__init__": lambda self, *arguments, **options: _refuse(real.__name__)})


_REFUSED = [
    (place, name, _refusing(getattr(place, name)))
    for place, name in ((dist, "TCPStore"), (distributed_c10d, "ProcessGroupGloo"), (dist, "ProcessGroupGloo"))
]


@contextmanager
def inside() -> Iterator[None]:
    """Keep the body inside of this process, as a player of turns."""
    global _is_inside

    with ExitStack() as stack:
        for place, name, value in _REFUSED:
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(cooperating())
        stack.enter_context(Turns().alone())
        _is_inside = True
        try:
            yield
        finally:
            _is_inside = False


def is_inside() -> bool:
    """True in a test of `make test`."""
    return _is_inside


def run_threads(function: Callable[..., Any], arguments: tuple[Any, ...], *, nodes: int, local: int) -> list[Any]:
    """Run `function(*arguments)` on ranks that are threads of this process, each with copies of the arguments."""

    def body() -> Any:
        dist.init_process_group("gloo")
        result = function(*copy.deepcopy(arguments))
        dist.barrier()
        return result

    with left_as_it_was():
        return ranks(body, nodes=nodes, local=local)


def is_outside(item: pytest.Item) -> bool:
    """True if a test may leave the process."""
    return any(item.get_closest_marker(name) for name in OUTSIDE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run a test, with its fixtures, inside, unless its marker says otherwise."""
    if is_outside(item):
        return (yield)
    with inside():
        return (yield)
