"""The peak of a step's memory: [Note: Frees that the profiler does not see] in strategies/memory.py."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laconic._compat import AllocatorEvent
from laconic.strategies.memory import measured_peak, peak_of_totals


def in_another_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kept", [1, 3])
def test_peak_is_what_lives_at_once(kept: int) -> None:
    before = torch.empty(5_000_000)
    with measured_peak() as peak:
        held = []
        for _ in range(6):
            held.append(torch.empty(250_000))
            held = held[-kept:]
    assert peak.nbytes == pytest.approx((kept + 1) * 1_000_000, rel=0.01)  # the new one comes before the oldest goes
    assert len(before) == 5_000_000


def test_a_free_in_another_thread_counts_and_memory_of_an_earlier_body_does_not() -> None:
    held: list[Tensor] = []
    with measured_peak() as peak:
        for size in (250_000, 240_000, 230_000, 220_000):
            in_another_thread(held.clear)
            held.append(torch.empty(size))
    assert peak.nbytes == 1_000_000
    with measured_peak() as peak:
        held.clear()
        small = torch.empty(25_000)
    assert peak.nbytes == small.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_true_where_frees_are_lost(seed: int) -> None:
    draw = random.Random(seed)
    alive: dict[int, int] = {}
    events: list[AllocatorEvent] = []
    true, total = [0], 0
    for time in range(60):
        if alive and draw.random() < 0.5:
            address = draw.choice(list(alive))
            size = -alive.pop(address)
        else:
            address, size = draw.randrange(200), draw.randrange(1, 30)
            if any(start < address + size and address < start + other for start, other in alive.items()):
                continue
            alive[address] = size
        total += size
        true.append(sum(alive.values()))
        if size > 0 or draw.random() < 0.7:
            events.append(AllocatorEvent(time, address, size, 1000 + total))
    assert peak_of_totals(events) == max(true)


def test_frees_of_what_was_there_before_do_not_count() -> None:
    sizes = [100, -40, 50, -50, 60]
    totals = list(itertools.accumulate(sizes, initial=500))[1:]
    addresses = [1000, 7, 2000, 2000, 3000]
    events = [AllocatorEvent(*each) for each in zip(range(5), addresses, sizes, totals, strict=True)]
    assert peak_of_totals(events) == 160
    assert peak_of_totals([]) == 0
