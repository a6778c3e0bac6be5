"""The few Linux calls that Python 3.11 lacks. Each raises OSError if the kernel refuses."""

import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Give the calling process namespaces of its own (man 2 unshare)."""
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace of an open descriptor (man 2 setns)."""
    _call("setns", ctypes.c_int(fd), ctypes.c_int(kind))


def mount(source: str, target: str, flags: int) -> None:
    """Mount a file or a folder in another place, or change a mount (man 2 mount)."""
    _call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)


def prctl(option: int, value: int) -> None:
    """Change a property of the calling process (man 2 prctl)."""
    _call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel kill the calling process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
