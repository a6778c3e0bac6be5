"""The machine and the software that a figure was measured with."""

import contextlib
import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("laconic", "torch", "transformers", "peft")


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, cores, memory, kernel and versions, which belong beside every measurement."""
    found: dict[str, str | int | float] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # a source tree, or no adapters
            found[name] = version(name)
    return found


def in_words(machine: dict[str, str | int | float]) -> str:
    """Describe the result of `describe_machine` in one line."""
    software = ", ".join(f"{name} {machine[name]}" for name in ("python", *_PACKAGES) if name in machine)
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"{hardware}, Linux {machine['kernel']}; {software}"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
