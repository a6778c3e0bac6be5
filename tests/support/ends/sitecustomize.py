"""Python imports this module when a process begins whose PYTHONPATH has its folder: see tests/support/imported.py.

When the process ends, it writes which modules of laconic it has imported. A forked rank ends by `os._exit`.
"""

import atexit
import os
import sys
from typing import NoReturn

_folder, _exit = os.environ.get("LACONIC_IMPORTED", ""), os._exit


def _write() -> None:
    names = [name for name in sys.modules if name.partition(".")[0] == "laconic"]
    if names and os.path.isdir(_folder):  # it is gone once the measurement has ended
        with open(os.path.join(_folder, str(os.getpid())), "w", encoding="utf-8") as file:
            file.write("\n".join(names))


def _end(status: int) -> NoReturn:
    _write()
    _exit(status)


if _folder:
    os._exit = _end
    atexit.register(_write)
