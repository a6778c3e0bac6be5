"""Functions that find the leftovers of a lab from outside."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MARKER = "LACONIC_TEST_MARKER"


def wait_until(condition: Callable[[], bool], *, at_most_s: float = 60.0) -> bool:
    """Wait until `condition` is true, and return whether it became true in time; for events in other processes."""
    deadline = time.monotonic() + at_most_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())


def processes_with_marker(marker: str) -> set[int]:
    """Return the PIDs of the living processes that were started with MARKER=marker in their environment."""
    found = set()
    for process in _processes():
        try:
            if f"{MARKER}={marker}\0".encode() in (process / "environ").read_bytes():
                found.add(int(process.name))
        except OSError:
            continue
    return found


def network_namespace_is_held(inode: int) -> bool:
    """Return whether some other process is in the namespace, holds its descriptor, or has it mounted."""
    name = f"net:[{inode}]"
    for process in _processes():
        if int(process.name) == os.getpid():
            continue
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
            if name in (process / "mountinfo").read_text():
                return True
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(link) == name:
                    return True
            except OSError:
                continue
    return False


def interfaces() -> set[str]:
    """Return the names of the interfaces in this process's network namespace."""
    return {line.partition(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]}
