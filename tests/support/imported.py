"""Which modules of laconic a measurement has imported, in this process and in those that it started."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_ENDS = Path(__file__).parent / "ends"
"""The folder of `sitecustomize`, which writes a process's modules when it ends."""


@contextmanager
def collected() -> Iterator[Callable[[], set[str]]]:
    """Give a function that returns the modules so far; of a process that was killed, they are missing."""
    with tempfile.TemporaryDirectory(prefix="laconic-imported-") as folder:
        path = os.pathsep.join([str(_ENDS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with mock.patch.dict(os.environ, LACONIC_IMPORTED=folder, PYTHONPATH=path):
            yield lambda: imported_here().union(*(file.read_text("utf-8").split() for file in Path(folder).iterdir()))


def imported_here() -> set[str]:
    """The modules of laconic that this process has imported."""
    return {name for name in sys.modules if name.partition(".")[0] == "laconic"}
