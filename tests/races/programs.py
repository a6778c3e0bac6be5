"""All programs that the race checker watches."""

from __future__ import annotations

from typing import Protocol

from tests.races.cyclic import CYCLIC
from tests.races.engine import ENGINE
from tests.races.local_steps import LOCAL_STEPS
from tests.races.machine import Machine
from tests.races.saves import SAVES


class Watched(Protocol):
    """A program that runs on a machine of its own."""

    def record(self) -> Machine:
        """Run the program on a machine, which has its trace."""
        ...


PROGRAMS: dict[str, Watched] = {**ENGINE, **SAVES, **LOCAL_STEPS, **CYCLIC}
