"""Finding and ending every process below this one."""

import contextlib
import os
import signal
import time
from pathlib import Path


def _stat(pid: int) -> list[str]:
    """Fields 3 and up of /proc/PID/stat: state, parent, ... (proc_pid_stat(5) counts from 1)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def exit_status(pid: int) -> int | None:
    """The wait status of a process that has ended and was not yet waited for; None when that is not known."""
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        if fields[0] == "Z":
            return int(fields[49])
    return None


def descendants() -> set[int]:
    """The living processes below this one. Orphans count, since this process adopts them (init, or a subreaper)."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = _stat(int(entry.name))
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                if fields[0] not in "ZX":
                    alive.add(int(entry.name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue.extend(below)
    return found & alive


def send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_descendants() -> None:
    """SIGKILL every process below this one, also those just being born, until none is left alive."""
    while pids := descendants():
        send(pids, signal.SIGKILL)
        time.sleep(0.005)
