"""Functions that find and end the descendants of this process, and that read how a process ended."""

import contextlib
import signal
import time
from collections.abc import Container, Iterable
from pathlib import Path

import psutil

START_TIME, _EXIT_CODE = 22 - 3, 52 - 3  # the indices of these fields in the list of `stat_fields`


def stat_fields(pid: int) -> list[str]:
    """Return fields 3 and up of /proc/PID/stat: state, parent, and so on (proc_pid_stat(5) counts from 1).

    Raises: FileNotFoundError or ProcessLookupError if there is no such process.
    """
    # The second field is the command's name in parentheses, which may contain anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def exit_status(pid: int) -> int | None:
    """Return the wait status of a process that has ended and that its parent has not waited for, else None."""
    # The process need not be a child of this one, so neither `os.waitpid` nor psutil can tell.
    with contextlib.suppress(OSError):
        fields = stat_fields(pid)
        if fields[0] == "Z":
            return int(fields[_EXIT_CODE])
    return None


def descendants(*, excluding: Container[int] = ()) -> list[psutil.Process]:
    """Return the living descendants of this process, adopted orphans included, except those with PIDs `excluding`."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if process.pid not in excluding and _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to every process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill_descendants(*, excluding: Container[int] = ()) -> None:
    """Kill the descendants of this process, except those with PIDs `excluding`, until none is alive.

    A killed process may have started another before.
    """
    while below := descendants(excluding=excluding):
        send(below, signal.SIGKILL)
        time.sleep(0.005)
