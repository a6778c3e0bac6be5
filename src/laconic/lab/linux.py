"""The few Linux calls that Python 3.11 lacks."""

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x1000, 0x4000, 0x80000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Give the calling process namespaces of its own."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def set_network_namespace(fd: int) -> None:
    """Move the calling thread into a network namespace."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(CLONE_NEWNET)), "setns")


def keep_mounts_private() -> None:
    """Keep what is mounted from now on in this mount namespace."""
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "mount(/, slave)")


def mount_own_proc() -> None:
    """Show this process's PID namespace in /proc."""
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _check(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount(/proc)")


def bind_mount(source: Path, target: Path) -> None:
    """Show `source` at the place of `target`."""
    _check(_libc.mount(bytes(source), bytes(target), None, ctypes.c_ulong(_MS_BIND), None), f"mount({target})")


def die_with_parent(signal: int) -> None:
    """Have the kernel send `signal` to this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal), 0, 0, 0), "prctl(PDEATHSIG)")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that none can leave its tree."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl(CHILD_SUBREAPER)")
