"""All programs that the race checker watches: `python -m tests.rehearse.programs` runs each once."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch

from laconic.rehearse.machine import Machine
from tests.rehearse.cyclic import CYCLIC
from tests.rehearse.engine import ENGINE
from tests.rehearse.local_steps import LOCAL_STEPS
from tests.rehearse.saves import SAVES


class Watched(Protocol):
    """A program that runs on a machine of its own."""

    def record(self, *, has_values: bool = True) -> Machine:
        """Run the program on a machine, which has its tape."""
        ...


PROGRAMS: dict[str, Watched] = {**ENGINE, **SAVES, **LOCAL_STEPS, **CYCLIC}

if __name__ == "__main__":
    torch.set_num_threads(1)  # the operations are tiny
    warnings.simplefilter("ignore")  # of settings that are odd on purpose
    for program in PROGRAMS.values():
        program.record()
