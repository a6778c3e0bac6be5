"""The memory that is free on a rank's device and on its machine, less a margin: where placements may go."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import torch

MARGIN = 16
"""One part in so many of all memory stays free: steps differ, and allocators leave gaps."""
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""The files of a control group with its limit and its use, of version 2 and of version 1."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes on one rank."""

    device_bytes: int
    """Free on the device while a step needs most."""
    host_bytes: int
    """This rank's part of what is free on the machine; 0 if the device is the CPU, whose memory is the host's."""
    step_bytes: int
    """Bytes that a step needs besides those that are held between steps."""


def held_bytes(device: torch.device) -> int:
    """The bytes that this process holds now: tensors on an accelerator, or all that is resident on CPU."""
    return _resident_bytes() if device.type == "cpu" else int(torch.get_device_module(device).memory_allocated(device))


def room_after_a_step(device: torch.device, *, held_before: int, num_local: int) -> Room:
    """The room on this rank between two steps, the optimizer's states of which are made.

    Args:
        device: of the rank.
        held_before: `held_bytes` before the first step. The fullest moment so far lacked what was made since.
        num_local: the ranks that share the machine.
    """
    available, total = host_memory()
    host_bytes = max(0, available - total // MARGIN) // num_local
    if device.type == "cpu":
        # what was made since may not have been there at the fullest moment, so the next step needs as much besides it
        step_bytes = max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held_before)
        return Room(device_bytes=max(0, host_bytes - step_bytes), host_bytes=0, step_bytes=step_bytes)
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    held, peak = held_bytes(device), int(module.max_memory_allocated(device))
    others = total - free - int(module.memory_reserved(device))
    fullest = peak + max(0, held - held_before)
    device_bytes = max(0, total - others - fullest - total // MARGIN)
    return Room(device_bytes=device_bytes, host_bytes=host_bytes, step_bytes=max(0, fullest - held))


def host_memory() -> tuple[int, int]:
    """The available and the total bytes of the machine, or of the control group in which this process runs."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(value) for name, value, *_ in lines}
    available, total = 1024 * kib["MemAvailable:"], 1024 * kib["MemTotal:"]
    for limit, used in ((_read(limit), _read(used)) for limit, used in _LIMITS):
        if limit is not None and used is not None:
            available, total = min(available, max(0, limit - used)), min(total, limit)
    return available, total


def _read(name: str) -> int | None:
    """The number in a file of the control group; None if there is no such file, or it says "max"."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
