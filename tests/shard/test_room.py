"""The room for placements: files of a pretended machine, and a device of a few bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from laconic.shard import room as room_module
from laconic.shard.room import MARGIN, Room, held_bytes, host_memory, room_after_a_step

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
KIB = 1024


def _pretend(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, str]) -> None:
    """Let the files of this machine be these."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(room_module, "Path", lambda name: root / str(name).lstrip("/"))


MEMINFO = "MemTotal:       64000 kB\nMemFree:         5000 kB\nMemAvailable:   40000 kB\nHugePages_Total:   0\n"


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        ({}, (40000 * KIB, 64000 * KIB)),
        ({"memory.max": "max\n", "memory.current": "77\n"}, (40000 * KIB, 64000 * KIB)),
        ({"memory.max": "1000000\n", "memory.current": "400000\n"}, (600_000, 1_000_000)),
        ({"memory.max": "1000000\n", "memory.current": "1000001\n"}, (0, 1_000_000)),
        ({"memory.max": f"{50000 * KIB}\n", "memory.current": "0\n"}, (40000 * KIB, 50000 * KIB)),
        ({"memory.max": "1000000\n"}, (40000 * KIB, 64000 * KIB)),
        (
            {"memory/memory.limit_in_bytes": "2000000\n", "memory/memory.usage_in_bytes": "500000\n"},
            (1_500_000, 2_000_000),
        ),
        (
            {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "5\n"},
            (40000 * KIB, 64000 * KIB),
        ),
    ],
    ids=["none", "no limit", "v2", "v2 over its limit", "v2 above what is free", "v2 without a use", "v1", "v1, none"],
)
def test_a_control_group_limits_the_machine(
    group: dict[str, str], wanted: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in group.items()}
    _pretend(monkeypatch, tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert host_memory() == wanted


def test_on_a_cpu_the_ranks_share_what_is_free_less_what_a_step_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most that this process has ever had, less what it had before the first step, is what a step needs again."""
    _pretend(monkeypatch, tmp_path, {"proc/meminfo": MEMINFO, "proc/self/statm": "9999 250 7 1 0 5 0\n"})
    monkeypatch.setattr(room_module.resource, "getpagesize", lambda: 4 * KIB)
    before = held_bytes(CPU)
    assert before == 4 * 250 * KIB
    step_bytes, free = (4000 - 4 * 250) * KIB, (40000 - 64000 // MARGIN) * KIB
    for peak, num_local, device_bytes, needed in (
        (4000, 1, free - step_bytes, step_bytes),
        (4000, 3, free // 3 - step_bytes, step_bytes),
        (1, 3, free // 3, 0),
        (10**9, 3, 0, 10**9 * KIB - before),
    ):
        monkeypatch.setattr(room_module.resource, "getrusage", lambda who, peak=peak: SimpleNamespace(ru_maxrss=peak))
        room = room_after_a_step(CPU, held_before=before, num_local=num_local)
        assert room == Room(device_bytes=device_bytes, host_bytes=0, step_bytes=needed)


def _on_device(monkeypatch: pytest.MonkeyPatch, *, allocated: int, peak: int, reserved: int) -> None:
    """An accelerator of 1,600 bytes, of which another process has 200."""
    device = SimpleNamespace(
        memory_allocated=lambda device: allocated,
        max_memory_allocated=lambda device: peak,
        memory_reserved=lambda device: reserved,
        mem_get_info=lambda device: (1600 - 200 - reserved, 1600),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device_: device)
    monkeypatch.setattr(room_module, "host_memory", lambda: (5000, 8000))


def test_on_an_accelerator_the_next_step_has_what_the_first_one_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that needed 400 bytes left 150 more than it found, as states of the optimizer: the next needs 550."""
    for reserved in (700, 1400):  # reserved memory counts for nothing
        _on_device(monkeypatch, allocated=250, peak=400, reserved=reserved)
        assert held_bytes(GPU) == 250
        room = room_after_a_step(GPU, held_before=100, num_local=4)
        assert room == Room(device_bytes=1600 - 200 - 550 - 100, host_bytes=(5000 - 500) // 4, step_bytes=300)
    _on_device(monkeypatch, allocated=1000, peak=1390, reserved=1400)
    assert room_after_a_step(GPU, held_before=1000, num_local=1).device_bytes == 0, "a full device has no room"
    _on_device(monkeypatch, allocated=100, peak=100, reserved=100)  # less than before: nothing was made
    assert room_after_a_step(GPU, held_before=400, num_local=1).step_bytes == 0
