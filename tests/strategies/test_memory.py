"""The peak of a step's memory: [Note: Frees that the profiler does not see] in strategies/memory.py."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from laconic._compat import AllocatorEvent
from laconic.strategies import memory
from laconic.strategies.memory import measured_peak, peak_of_pairs, peak_of_totals


def in_another_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@contextlib.contextmanager
def counts_in_its_own_thread() -> Iterator[bool]:
    yield False


@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("counts_all", [True, False])
def test_peak_is_what_lives_at_once(kept: int, counts_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counts_all:
        monkeypatch.setattr(memory, "count_in_all_threads", counts_in_its_own_thread)
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


def test_without_a_count_of_all_threads_memory_that_is_taken_again_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "count_in_all_threads", counts_in_its_own_thread)
    held: list[Tensor] = []
    addresses = set()
    with measured_peak() as peak:
        for _ in range(8):
            held.append(torch.empty(25_000_000))  # too large for the C library to keep: the kernel gives it out again
            addresses.add(held[0].data_ptr())
            in_another_thread(held.clear)
    assert len(addresses) < 8
    assert peak.nbytes == len(addresses) * 100_000_000


def naive_peak(events: list[AllocatorEvent]) -> int:
    """`peak_of_pairs`, byte by byte."""
    owners: dict[int, int] = {}
    most = 0
    for number, event in enumerate(events):
        if event.nbytes > 0:
            taken = range(event.address, event.address + event.nbytes)
            lost = {owners[byte] for byte in taken if byte in owners}
            owners = {byte: owner for byte, owner in owners.items() if owner not in lost}
            owners.update(dict.fromkeys(taken, number))
        else:
            begun = [n for n, each in enumerate(events[:number]) if each.address == event.address and each.nbytes > 0]
            owner = owners.get(event.address)
            if begun and owner == begun[-1]:
                owners = {byte: each for byte, each in owners.items() if each != owner}
        most = max(most, len(owners))
    return most


@pytest.mark.parametrize("seed", range(20))
def test_pairs_equal_the_naive_count_where_frees_are_lost(seed: int) -> None:
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
    assert peak_of_pairs(events) == naive_peak(events) >= max(true)
    assert peak_of_totals(events) == max(true)


def test_frees_of_what_was_there_before_do_not_count() -> None:
    sizes = [100, -40, 50, -50, 60]
    totals = list(itertools.accumulate(sizes, initial=500))[1:]
    addresses = [1000, 7, 2000, 2000, 3000]
    events = [AllocatorEvent(*each) for each in zip(range(5), addresses, sizes, totals, strict=True)]
    assert peak_of_totals(events) == peak_of_pairs(events) == 160
    assert peak_of_pairs([]) == peak_of_totals([]) == 0
