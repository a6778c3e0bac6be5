"""Run a command with less privilege than this process has: python unprivileged.py HOW COMMAND...

HOW is one of
    user         no right to make a network, but the right to make user namespaces, as for most users on most kernels
    masked-proc  the same, and a part of /proc is hidden, as in a container; then the kernel refuses a new /proc
    nothing      no right to make user namespaces either
The user keeps its number, so that it can read the interpreter anywhere. Needs root.
"""

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_CAPBSET_DROP = 24
# The kernel asks for this right when user 0 makes a user namespace. It gives no right over networks or mounts.
_CAP_SETFCAP = 31

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    how, *command = sys.argv[1:]
    if how == "masked-proc":
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        _call("mount", b"/dev/null", b"/proc/version", None, ctypes.c_ulong(_MS_BIND), None)
    if how == "nothing":
        _call("unshare", _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text("0 0 1")
        Path("/proc/self/gid_map").write_text("0 0 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")  # in this new namespace and below it
    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        if capability != _CAP_SETFCAP:
            _call("prctl", _PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
