"""Functions and constants that a test's ranks replace, as a process might that ends with them.

Ranks in one process share their modules: [Note: State of a process] in laconic/rehearse/in_process.py. A function that
a rank replaces is replaced for all of them, until the launch is over, and no longer.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ROOMS = ("laconic", "tests")
_OF_OTHERS = ("os", "time", "torch", *(f"torch.{name}" for name in ("accelerator", "cuda", "distributed", "optim")),
              "torch.distributed.distributed_c10d")  # fmt: skip


@functools.lru_cache(maxsize=1)
def _places(names: tuple[str, ...]) -> list[Any]:
    """The modules of these names whose functions come back, and the classes of laconic's."""
    found: list[Any] = []
    for name in names:
        module = sys.modules[name]
        room = name.partition(".")[0]
        if isinstance(module, ModuleType) and (room in _ROOMS or name in _OF_OTHERS):
            classes = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name)
            found += [module, *(classes if room == "laconic" else ())]
    return found


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Put back the functions, classes and constants, which have names in capitals, that the body replaces."""
    before = [(place, dict(vars(place))) for place in _places(tuple(sys.modules))]
    try:
        yield
    finally:
        for place, variables in before:
            now = vars(place)
            if len(now) == len(variables) and all(map(operator.is_, now.values(), variables.values())):
                continue  # most of them; all of this takes place in C
            for name, value in variables.items():
                if (callable(value) or name.isupper()) and now.get(name) is not value:
                    setattr(place, name, value)
