"""Whose leftovers are whose: processes and folders carry the identity of the keeper that made them.

[Note: Leaving nothing behind]
The keeper of a lab ends every process it started and removes its folder, whatever ends the lab itself: an exception,
a signal, or SIGKILL, for the keeper sees its socket close. With a wire the processes also share a PID namespace whose
first process dies with the keeper, so that the kernel ends them even if the keeper is killed. What may remain then is
the folder, and without a wire the processes. Both carry the keeper's identity, and the next keeper removes those whose
keeper is gone.
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path

OWNER_VARIABLE = "LACONIC_LAB_OWNER"
_FOLDER_PREFIX = "laconic-lab-"


def identity(pid: int | None = None) -> str:
    """PID namespace, PID and start time: unlike a PID alone it is never used twice."""
    pid = os.getpid() if pid is None else pid
    return f"{os.stat('/proc/self/ns/pid').st_ino}.{pid}.{_start_time(pid)}"


def _start_time(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()  # the command's name, in parentheses, may contain anything
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return fields[19]


def make_folder(owner: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"{_FOLDER_PREFIX}{owner}"
    folder.mkdir(mode=0o700)
    return folder


def _is_gone(owner: str) -> bool:
    """Whether the keeper `owner` lived in our PID namespace and has ended; of other namespaces we know nothing."""
    parts = owner.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts) or owner == identity():
        return False
    if int(parts[0]) != os.stat("/proc/self/ns/pid").st_ino:
        return False
    try:
        return _start_time(int(parts[1])) != parts[2]
    except (FileNotFoundError, ProcessLookupError):
        return True


def clean() -> None:
    """End the processes and remove the folders of this user's labs whose keeper is gone."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # ended meanwhile, or another user's
            prefix = f"{OWNER_VARIABLE}=".encode()
            owners = [variable[len(prefix) :].decode() for variable in variables if variable.startswith(prefix)]
            if owners and _is_gone(owners[0]):
                try:
                    os.kill(int(process.name), signal.SIGKILL)
                except OSError:
                    continue
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        try:
            is_ours = folder.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        if is_ours and _is_gone(folder.name.removeprefix(_FOLDER_PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)
