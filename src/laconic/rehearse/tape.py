"""What a program does on each timeline, and the pairs of accesses that no order separates.

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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = 0
"""The timeline of the thread that runs the program. The others are streams, and further threads."""


@dataclass(frozen=True, slots=True)
class Site:
    """A call that orders timelines: one of the calls that the mutation test takes out."""

    file: str
    line: int
    function: str
    call: str
    """What is called there, and which of its arguments: `running`, `running after[0]`, `record_event`, ..."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.call}"


@dataclass(slots=True)
class Memory:
    """One allocation, from its first to its last byte."""

    id: int
    nbytes: int
    is_device: bool
    timeline: int
    """The timeline that allocated it."""
    place: str
    is_pinned: bool = False
    is_freed: bool = False
    stands_for: Any = 0
    """Without values: the number, or the tensor, that the program reads. [Note: Data without values] in operations.py.
    """


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [begin, end) of a memory that a step reads or writes."""

    memory: int
    begin: int
    end: int
    is_write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What crosses to or from other ranks at once."""

    op: str
    """"gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "send" or "receive"."""
    group: str
    size: int
    """The number of ranks in the group."""
    level: str
    """The farthest level between two ranks of the group: see `laconic.comm.traffic.Level`."""
    purpose: str
    """Why, and for which unit, if it is laconic's own: as it says to its journal."""
    unit: str
    sent_bytes: int
    """What leaves this rank, if the group moves it as a ring does."""
    received_bytes: int


@dataclass(slots=True)
class Step:
    """Work on a timeline: an operation, an allocation or a free."""

    timeline: int
    thread: int
    """The timeline of the thread that issued it."""
    name: str
    place: str
    accesses: Sequence[Access]
    run: Any = None
    """What the executor needs to run it again; None for allocations and frees."""
    is_reuse: bool = False
    """True for the next allocation after a free."""
    allocates: int | None = None
    """The memory that this step allocates."""
    transfer: Transfer | None = None
    """The transfer of which this step is a part."""
    cost: Any = None
    """What `Machine.cost_of` says of the operation."""


@dataclass(slots=True)
class Record:
    """An event is recorded on a timeline. Events are numbers; each is recorded once."""

    timeline: int
    event: int
    site: Site | None


@dataclass(slots=True)
class Wait:
    """A timeline waits for an event."""

    timeline: int
    event: int
    site: Site | None


@dataclass(slots=True)
class Free:
    """A memory is free for the next allocation on the timeline that allocated it."""

    memory: int
    timeline: int


@dataclass(slots=True)
class Mark:
    """A place in the program to which it has given a name."""

    name: str
    timeline: int


Entry = Step | Record | Wait | Free | Mark


@dataclass
class Tape:
    """Everything in the order in which the host has issued it."""

    entries: list[Entry] = field(default_factory=list)
    memories: dict[int, Memory] = field(default_factory=dict)
    allocated: set[int] = field(default_factory=set)
    """The memories that were allocated while the program ran."""
    timelines: list[str] = field(default_factory=lambda: ["host"])
    threads: set[int] = field(default_factory=lambda: {HOST})
    """The timelines that are threads of the program."""

    @property
    def sites(self) -> list[Site]:
        """The sites that this program has passed, in order."""
        found = dict.fromkeys(e.site for e in self.entries if isinstance(e, Record | Wait) and e.site is not None)
        return list(found)

    def without(self, sites: Collection[Site]) -> Tape:
        """The same program without the effect of some sites."""
        lost = {e.event for e in self.entries if isinstance(e, Record) and e.site in sites}
        entries = [
            e
            for e in self.entries
            if not isinstance(e, Record | Wait) or not (e.site in sites or (isinstance(e, Wait) and e.event in lost))
        ]
        return Tape(entries, self.memories, self.allocated, self.timelines, self.threads)


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


Clock = list[int]


def races(tape: Tape) -> Iterator[Race]:
    """Yield the races of a program, by vector clocks: [Note: Timelines]."""
    clocks = [[0] * len(tape.timelines) for _ in tape.timelines]
    events: dict[int, Clock] = {}
    # for each memory, the accesses that a later one may race with: begin, end, is_write, timeline, time, step
    history: dict[int, list[tuple[int, int, bool, int, int, Step]]] = {}
    for entry in tape.entries:
        clock = clocks[entry.timeline]
        if isinstance(entry, Record):
            events[entry.event] = list(clock)
        elif isinstance(entry, Wait):
            _join(clock, events.get(entry.event, []))  # the device was idle before the recording
        elif isinstance(entry, Step):
            ordered = tape.threads if entry.is_reuse else ()
            if entry.timeline != entry.thread:
                _join(clock, clocks[entry.thread])
            clock[entry.timeline] += 1
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


def _join(clock: Clock, other: Clock) -> None:
    for index, time in enumerate(other):
        if time > clock[index]:
            clock[index] = time
