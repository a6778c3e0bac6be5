"""Functions that find and end processes: the descendants of this one, and the leftovers of killed labs.

[Note: Leaving nothing behind]
The keeper of a lab ends every process that it started and removes its folder, whatever ends the lab: an exception, a
signal or SIGKILL. It notices the lab's end because its socket closes. If the keeper itself is killed, the kernel kills
what it has started, and the ranks. Its folder remains, and what scripts have left in the background. The folder's name
identifies the keeper and is in each process's environment. So the next keeper removes such folders, and ends such
processes.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Container, Iterable
from pathlib import Path

import psutil

from laconic.lab.worker import FOLDER_VARIABLE

_START_TIME, _EXIT_CODE = 22 - 3, 52 - 3  # the indices of these fields in the list of `_stat_fields`
_PREFIX = "laconic-lab-"


def _stat_fields(pid: int) -> list[str]:
    """Return fields 3 and up of /proc/PID/stat: state, parent, and so on (proc_pid_stat(5) counts from 1).

    Raises: FileNotFoundError or ProcessLookupError if there is no such process.
    """
    # The second field is the command's name in parentheses, which may contain anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def exit_status(pid: int) -> int | None:
    """Return the wait status of a process that has ended and that its parent has not waited for, else None."""
    # The process need not be a child of this one, so neither `os.waitpid` nor psutil can tell.
    with contextlib.suppress(OSError):
        fields = _stat_fields(pid)
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


def make_keepers_folder() -> Path:
    """Make the folder of this keeper, and name it after the keeper: PID namespace, PID and start time."""
    name = f"{_PREFIX}{_pid_namespace()}.{os.getpid()}.{_start_time(os.getpid())}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700)
    return folder


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_time(pid: int) -> str | None:
    """The clock ticks from boot to the start of a process, or None if the process does not live."""
    # psutil adds the time of boot, which changes when somebody sets the machine's clock.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = _stat_fields(pid)
        return None if fields[0] in "ZX" else fields[_START_TIME]
    return None


def _is_stale(folder: Path) -> bool:
    """Whether the folder's keeper has ended; False if it is in another PID namespace, where this process sees none."""
    namespace, *process = folder.name.removeprefix(_PREFIX).split(".")
    if namespace != _pid_namespace() or len(process) != 2 or not process[0].isdigit():
        return False
    return _start_time(int(process[0])) != process[1]


def clean() -> None:
    """End the processes and remove the folders of all labs of this user whose keeper has ended."""
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}  # None for another user's process
        if _is_stale(Path(variables.get(FOLDER_VARIABLE, ""))):
            with contextlib.suppress(psutil.Error):
                process.kill()
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if folder.lstat().st_uid == os.geteuid() and _is_stale(folder):
                shutil.rmtree(folder, ignore_errors=True)
