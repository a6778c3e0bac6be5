"""The removal of the leftovers of killed labs.

[Note: Leaving nothing behind]
The keeper of a lab ends every process that it started and removes its folder, whatever ends the lab: an exception, a
signal or SIGKILL. It notices the lab's end because its socket closes. With a wire, the processes also share a PID
namespace, whose first process dies with the keeper. Then the kernel ends all others, even if the keeper was killed.
After a killed keeper the folder remains, and without a wire the processes too. The folder's name identifies the keeper
and is in each process's environment. So the next keeper removes such folders, and ends such processes.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from laconic.lab.processes import START_TIME, stat_fields
from laconic.lab.worker import FOLDER_VARIABLE

_PREFIX = "laconic-lab-"


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
        fields = stat_fields(pid)
        return None if fields[0] in "ZX" else fields[START_TIME]
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
