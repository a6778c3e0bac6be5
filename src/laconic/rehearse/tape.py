"""What a program does on each timeline, in the order in which the host has issued it: the entries of a tape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from laconic.rehearse.rings import Route

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


class MessageName(NamedTuple):
    """What one rank sends to another: both have it on their tapes, by the same name."""

    group: str
    sender: int
    """Its place in the group."""
    receiver: int
    number: int
    """Of those from this sender to this receiver, from 1."""


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
    """Why, if it is laconic's own: as it counts it, or else as it says to its journal."""
    unit: str
    """For which unit, if it is laconic's own."""
    sent_bytes: int
    """What leaves this rank, if the group moves it as a ring does."""
    received_bytes: int
    route: Route
    """What leaves a rank on each level, as a mean over the ranks of the group; what laconic counts of its own
    transfers, without hops. Of messages that it sends at once the first has the bytes of all."""
    message: MessageName | None = None
    """The message that this rank sends or receives; None for collectives, and for messages that are parts of one."""


@dataclass(slots=True)
class Step:
    """Work on a timeline: an operation, an allocation or a free."""

    timeline: int
    thread: int
    """The timeline of the thread that issued it."""
    name: str
    place: str
    accesses: Sequence[Access]
    """Empty if the machine asks for costs, and no order can be read then."""
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
    """A place in the program to which it has given a name, or what a reader wants to know there."""

    label: Any
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

    def peak_bytes(self, counts: Callable[[Memory], bool] = lambda memory: memory.is_device) -> int:
        """The most bytes that allocations hold at once, of the memories that count: by default those of the device."""
        held = most = 0
        for entry in self.entries:
            if isinstance(entry, Free) and counts(self.memories[entry.memory]):
                held -= self.memories[entry.memory].nbytes
            elif isinstance(entry, Step) and entry.allocates is not None and counts(self.memories[entry.allocates]):
                held += self.memories[entry.allocates].nbytes
            most = max(most, held)
        return most

    def without(self, sites: Collection[Site]) -> Tape:
        """The same program without the effect of some sites."""
        lost = {e.event for e in self.entries if isinstance(e, Record) and e.site in sites}
        entries = [
            e
            for e in self.entries
            if not isinstance(e, Record | Wait) or not (e.site in sites or (isinstance(e, Wait) and e.event in lost))
        ]
        return Tape(entries, self.memories, self.allocated, self.timelines, self.threads)
