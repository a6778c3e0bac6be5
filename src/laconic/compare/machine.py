"""The machine and the software of a measurement."""

import contextlib
import datetime
import os
import platform
from pathlib import Path

from laconic.extras import versions_of

_PACKAGES = ("laconic", "torch", "transformers", "peft")


def describe_machine() -> dict[str, str | int | float]:
    """Return date, processor, cores, memory in GiB, kernel, GPU if any, and versions: every record needs them."""
    found: dict[str, str | int | float] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }
    if gpu := _gpu():
        found["gpu"] = gpu
    return found | versions_of(*_PACKAGES)


def in_words(machine: dict[str, str | int | float]) -> str:
    """Return the result of `describe_machine` as one line of text."""
    software = ", ".join(f"{name} {machine[name]}" for name in ("python", *_PACKAGES) if name in machine)
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    return f"{hardware}, Linux {machine['kernel']}; {gpu}{software}"


def _gpu() -> str:
    """The number of GPUs, the name of the first, and the versions of CUDA and of NCCL, if there; "" without a GPU."""
    import torch  # here: `laconic compare` reports a mistake in a job before it imports torch

    if not torch.cuda.is_available():
        return ""
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    if torch.distributed.is_nccl_available():
        found += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
