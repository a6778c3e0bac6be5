"""Readers of the order on a tape: accesses that no order separates, and the compute beside which a transfer may run.

[Note: Timelines]
A timeline is a thread of the host or one stream. Work of a timeline runs in its order. A thread issues the work, so it
comes after whatever this thread had done by then. Otherwise only events order timelines: what waits for an event comes
after everything that its timeline had issued when the event was recorded.

[Note: Memory is used again]
The caching allocator gives a freed block to the next allocation on the stream that allocated it, at once. So both the
allocation of a block and the first allocation after its free, on the same stream, are writes of the whole block on this
stream. If no access races with them, no reuse of the memory, in whatever pieces, can race: the old owner's accesses end
before that allocation, and the new owner's begin after it. Host memory is used again by the thread that allocated it,
but not before all threads have dropped it: Python counts references. So only transfers can race with its reuse. Pinned
memory is left out: its allocator waits for the copies that use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laconic.rehearse.tape import Memory, Record, Step, Tape, Transfer, Wait

Clock = list[int]


def clocks(tape: Tape) -> Iterator[tuple[Step, Clock]]:
    """Yield each step with its vector clock: for each timeline, how many of its steps come before this one, or are it.

    The clock changes when the next step is asked for. See [Note: Timelines].
    """
    now = [[0] * len(tape.timelines) for _ in tape.timelines]
    events: dict[int, Clock] = {}
    for entry in tape.entries:
        clock = now[entry.timeline]
        if isinstance(entry, Record):
            events[entry.event] = list(clock)
        elif isinstance(entry, Wait):
            _join(clock, events.get(entry.event, []))  # the device was idle before the recording
        elif isinstance(entry, Step):
            if entry.timeline != entry.thread:
                _join(clock, now[entry.thread])
            clock[entry.timeline] += 1
            yield entry, clock


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, at least one of them a write, without an order."""

    memory: Memory
    first: tuple[str, str, str]
    """The timeline, the operation and the place in the code."""
    second: tuple[str, str, str]

    def __str__(self) -> str:
        where = "device" if self.memory.is_device else "host"
        ends = "\n".join(f"  {name} on {timeline}, {place}" for timeline, name, place in (self.first, self.second))
        return f"{self.memory.nbytes} bytes of {where} memory of {self.memory.place}:\n{ends}"


def races(tape: Tape) -> Iterator[Race]:
    """Yield the races of a program, by vector clocks: [Note: Timelines]."""
    # for each memory, the accesses that a later one may race with: begin, end, is_write, timeline, time, step
    history: dict[int, list[tuple[int, int, bool, int, int, Step]]] = {}
    for entry, clock in clocks(tape):
        ordered = tape.threads if entry.is_reuse else ()
        now = clock[entry.timeline]
        for access in entry.accesses:
            earlier = history.setdefault(access.memory, [])
            for begin, end, is_write, timeline, time, step in earlier:
                overlaps = begin < access.end and access.begin < end
                is_racing = overlaps and (is_write or access.is_write) and clock[timeline] < time
                if is_racing and timeline not in ordered:
                    names = tape.timelines
                    yield Race(
                        tape.memories[access.memory],
                        (names[timeline], step.name, step.place),
                        (names[entry.timeline], entry.name, entry.place),
                    )
            # a write comes after all that it covers; a read comes after its own timeline's reads
            earlier[:] = [
                old
                for old in earlier
                if not (
                    access.begin <= old[0]
                    and old[1] <= access.end
                    and (access.is_write or (not old[2] and old[3] == entry.timeline))
                )
            ]
            earlier.append((access.begin, access.end, access.is_write, entry.timeline, now, entry))


@dataclass(frozen=True)
class Beside:
    """A transfer, and the compute beside which it may run."""

    transfer: Transfer
    place: str
    compute: list[Step]
    """The operations on other streams that no event orders before or after it. Without any, the transfer is exposed."""


def overlap(tape: Tape) -> list[Beside]:
    """The compute that no event orders before or after each transfer of the device, in the order of transfers.

    What is not ordered may overlap; whether it does is for rates and sizes to say. Operations of other transfers, and
    those that a transfer consists of, are no compute.
    """
    steps = [(step, list(clock)) for step, clock in clocks(tape) if step.timeline not in tape.threads]
    compute = [(step, clock) for step, clock in steps if step.transfer is None and "::" in step.name]
    parts: dict[int, list[tuple[Step, Clock]]] = {}
    for step, clock in steps:
        if step.transfer is not None:
            parts.setdefault(id(step.transfer), []).append((step, clock))
    found = []
    for first, *rest in parts.values():
        (begin, earliest), (end, latest) = first, (rest or [first])[-1]
        assert begin.transfer is not None
        beside = [
            step
            for step, clock in compute
            if step.timeline != begin.timeline
            and earliest[step.timeline] < clock[step.timeline]
            and clock[end.timeline] < latest[end.timeline]
        ]
        found.append(Beside(begin.transfer, begin.place, beside))
    return found


def _join(clock: Clock, other: Clock) -> None:
    for index, time in enumerate(other):
        if time > clock[index]:
            clock[index] = time
