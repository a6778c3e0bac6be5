"""The tape of a rehearsed step, played on a machine: seconds, bytes and memory at a cluster's rates.

[Note: Streams on a machine]
On a CPU the program is the only stream, and waits where it waits. On an accelerator each stream goes on by itself: a
transfer begins when its stream has come to it and the lane is free. Kernels beside the compute stream take their time
from it, since they share the device. What compute waits for is what an event of another stream was recorded behind.
The host waits for transfers of its own, and compute with it; it is never late itself, so what it waits for besides
costs nothing.

[Note: What others send]
Where all ranks do alike, what a rank receives has arrived when it has sent the message of the same number over the same
distance itself. In a pipeline ranks differ: there the tapes of all places are played together (meeting.py). A thread of
Gloo frees its memory when it gets there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

from torch.distributed.fsdp._fully_shard import _fsdp_param

from laconic.optim import dynamic_map
from laconic.plan import phantom
from laconic.plan.machine import KINDS, Job, Kind, PlanLane, Reading, Simulator
from laconic.plan.op_cost import Copy
from laconic.plan.phantom import Alive, PhaseBegin, Rest, Together
from laconic.plan.phase import OpWork
from laconic.plan.rehearsal import END, STEPS, Rehearsal
from laconic.rehearse.machine import COMPUTE, origin_of
from laconic.rehearse.tape import HOST, Entry, Free, Mark, MessageName, Record, Step, Transfer, Wait
from laconic.shard import cache, form, full, reduce, stored

_ASKED_BY: Mapping[Kind, Sequence[ModuleType | Callable[..., Any]]] = {
    "parameters": (stored, form, full, _fsdp_param),
    "gradients": (reduce, phantom, _fsdp_param.FSDPParam.to_accumulated_grad_if_needed),
    "cache": (cache, _fsdp_param.FSDPParam.to_sharded_post_forward),
    "optimizer": (dynamic_map,),
}
"""The modules of an engine, or functions of them, that ask for each kind of memory. All others take it for transfers
and for work."""
_KINDS = {origin_of(owner): kind for kind, owners in _ASKED_BY.items() for owner in owners}


Awaited = MessageName | Together | None
"""What a player cannot go on without; None if it only lets others catch up with its clock."""


class Mail(Protocol):
    """How the messages of a rank and those of others meet."""

    def send(self, taped: Transfer, name: str) -> bool:
        """Send a message. Returns whether who waits for it waits for its receiver, too."""
        ...

    def ask(self, taped: Transfer) -> None:
        """Ask for a message."""
        ...

    def has_begun(self, awaited: Awaited) -> bool:
        """Whether it is known when a message arrives, or when all are together."""
        ...

    def job(self, awaited: MessageName | Together) -> Job | None:
        """The job that ends when the message has arrived; None if nobody has sent it."""
        ...


class _OwnMail:
    """The messages of a rank that stands for all: [Note: What others send]."""

    def __init__(self, machine: Simulator) -> None:
        self._machine = machine
        self._sent: dict[Any, Job | None] = {}
        """By group, distance and number."""
        self._sizes: dict[str, int] = {}

    def send(self, taped: Transfer, name: str) -> bool:
        assert taped.message is not None
        purpose: Any = taped.purpose
        self._sizes[taped.group] = taped.size
        self._sent[self._key(taped.message)] = self._machine.send_message(taped.route, name, purpose)
        return False

    def ask(self, taped: Transfer) -> None:
        self._sizes[taped.group] = taped.size

    def has_begun(self, awaited: Awaited) -> bool:
        return True

    def job(self, awaited: MessageName | Together) -> Job | None:
        return self._sent.pop(self._key(awaited), None) if isinstance(awaited, MessageName) else None

    def _key(self, message: MessageName) -> tuple[str, int, int]:
        distance = (message.receiver - message.sender) % self._sizes[message.group]
        return message.group, distance, message.number


class Player:
    """Plays a rehearsal on a machine: [Note: Streams on a machine]."""

    def __init__(self, machine: Simulator, rehearsal: Rehearsal, mail: Mail | None = None) -> None:
        """Play on an idle machine. `mail`: how it meets the messages of other players. Default: it plays alone."""
        self._machine = machine
        self._mail = mail or _OwnMail(machine)
        self._rehearsal, self._memories = rehearsal, rehearsal.tape.memories
        self._entries = rehearsal.tape.entries
        self._stretches: list[tuple[Any, int]] = [
            (entry.label, place)
            for place, entry in enumerate(self._entries)
            if isinstance(entry, Mark) and not _is_phase(entry.label)
        ]
        """The label and the place of each mark that begins a stretch."""
        self._done = 0
        """The entries that have been played."""
        self._host_peak_bytes = 0.0
        """The host memory at its fullest: that of the syncs, as a step keeps what it has."""
        self._is_cpu = machine.device_type == "cpu"
        self._program = HOST if self._is_cpu else COMPUTE
        """The timeline that computes."""
        self._held: dict[int, Kind | None] = {}
        """The memories that are alive; those of the host have no kind."""
        self._streams: dict[int, Job | None] = {}
        """The last job of each other timeline."""
        self._events: dict[int, Any] = {}
        """The job before each event, or the message before it."""
        self._arriving: dict[int, MessageName] = {}
        """The last message on a timeline, until an event is recorded behind it."""
        self._late: list[tuple[Job, int]] = []
        """The memories that threads of Gloo free after a job."""
        self._threads = rehearsal.tape.threads - {HOST}
        self._awaited = {each.event for each in self._entries if isinstance(each, Wait) and each.timeline == HOST}
        self._beside = self._most_beside = 0
        """The memory that other threads hold, and the most of their last work."""
        self._working: dict[int, tuple[Kind | None, int]] = {}
        """The working memory of other threads until the events that end their work."""

    def readings(self, stands_for: int = 1) -> list[Reading]:
        """Play all, and read the last plain step, and then the steps in which each fragment of islands syncs.

        The first reading has the memory at rest. `stands_for`: the fragments for which each one stands, and of which
        one syncs at a time.
        """
        playing = self.play(stands_for)
        while True:
            try:
                next(playing)
            except StopIteration as end:
                return end.value

    @property
    def now_s(self) -> float:
        """The clock of the machine."""
        return self._machine.now_s

    def play(self, stands_for: int = 1) -> Generator[Awaited, None, list[Reading]]:
        """As `readings`, beside other players: yields what it waits for, and wants to go on when that has begun."""
        plain = yield from self._read(("step", STEPS - 1), END)
        self._host_peak_bytes = self._machine.host_bytes
        syncs = []
        for number in range(len(self._rehearsal.fragments)):
            syncs.append((yield from self._read(("sync", number), ("synced", number))))
        resting_bytes = self._machine.host_bytes
        plain.held = Counter({kind: self._machine.held[kind] for kind in KINDS})
        plain.host_bytes = resting_bytes + (self._host_peak_bytes - resting_bytes) / stands_for
        return [plain, *syncs]

    def _read(self, first: object, last: object) -> Generator[Awaited, None, Reading]:
        """Play on to a mark, and read from there to another one."""
        labels = [label for label, _ in self._stretches]
        begin, end = labels.index(first), labels.index(last)
        yield from self._play(self._entries[self._done : self._stretches[begin][1]])
        reading = Reading(begin_s=self._machine.now_s)
        for (label, start), (_, stop) in pairwise(self._stretches[begin : end + 1]):
            with self._machine.reading(label) as part:
                yield from self._play(self._entries[start:stop])
            reading.add(part)
        self._done = self._stretches[end][1]
        return reading

    def _play(self, entries: Sequence[Entry]) -> Generator[Awaited, None, None]:
        for entry in entries:
            match entry:
                case Step():
                    if entry.transfer is not None:
                        yield None
                    self._step(entry)
                case Free():
                    self._free_later(entry)
                case Record():
                    self._end_beside(entry)
                    is_now = entry.timeline in (self._program, HOST)
                    job = Job(None, self._machine.now_s) if is_now else self._streams.get(entry.timeline)
                    self._events[entry.event] = self._arriving.pop(entry.timeline, None) or job
                case Wait():
                    awaited = self._events.get(entry.event)
                    while isinstance(awaited, MessageName) and not self._mail.has_begun(awaited):
                        yield awaited
                    self._wait(entry.timeline, entry.event)
                case Mark(Together() as awaited):
                    while not self._mail.has_begun(awaited):
                        yield awaited
                    self._machine.wait(self._mail.job(awaited))
                    self._free_late()
                case Mark():
                    self._mark(entry.label)

    def _step(self, step: Step) -> None:
        machine, cost = self._machine, step.cost
        if step.allocates is not None:
            self._allocate(step.allocates)
        elif step.transfer is not None:
            self._transfer(step.transfer, step.timeline)
        elif isinstance(cost, Copy) and not self._is_cpu:
            since, after = self._place_of(step.timeline)
            job = machine.copy(step.name, cost.nbytes, after, to_device=cost.to_device, since=since)
            self._streams[step.timeline] = job
        elif isinstance(cost, Copy):
            machine.run(step.name, OpWork(2 * cost.nbytes))
        elif isinstance(cost, OpWork):
            self._work(step, cost)

    def _work(self, step: Step, work: OpWork) -> None:
        """Compute, or let the host or another thread compute. Compute waits for what its own thread does there."""
        is_beside = step.timeline in self._threads
        if not work.on_host and not is_beside:
            self._machine.run(step.name, work)
            return
        since, after = self._place_of(step.timeline) if is_beside else (None, None)
        job = self._machine.on_host(step.name, work.nbytes, after, since=since)
        if is_beside:
            self._streams[step.timeline] = job
        else:
            self._machine.wait(job, step.name)

    def _transfer(self, taped: Transfer, timeline: int) -> None:
        purpose: Any = taped.purpose
        name = f"{purpose} {taped.unit}".strip()
        if taped.message is not None:
            is_awaited = True
            if taped.op == "receive":
                self._mail.ask(taped)
            else:
                is_awaited = self._mail.send(taped, name)
            if is_awaited:
                self._arriving[timeline] = taped.message
            return
        since, after = self._place_of(timeline)
        job = self._machine.send(taped.route, name, purpose, after, since=since)
        if job is not None and timeline != self._program:
            self._streams[timeline] = job

    def _mark(self, label: object) -> None:
        machine = self._machine
        match label:
            case PhaseBegin(name, phase):
                self._free_late()
                machine.compute(name, phase)
            case Alive(extra_bytes):
                machine.set_extra(extra_bytes)
            case Rest(nbytes):
                machine.leave(nbytes)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _allocate(self, number: int) -> None:
        memory, kind = self._memories[number], self._kind_of(number)
        self._held[number] = kind
        self._hold(kind, memory.nbytes)
        if memory.timeline in self._threads:
            self._beside += memory.nbytes
            self._most_beside = max(self._most_beside, self._beside)

    def _end_beside(self, record: Record) -> None:
        """Hold the working memory of another thread until its end is waited for: it works beside what follows."""
        is_end = record.timeline in self._threads and record.event in self._awaited
        if is_end and self._most_beside > self._beside:
            kind: Kind | None = "transfers" if self._is_cpu else None
            self._working[record.event] = kind, self._most_beside - self._beside
            self._hold(*self._working[record.event])
            self._most_beside = self._beside

    def _free_later(self, entry: Free) -> None:
        """Free a memory, now or when its thread of Gloo gets there."""
        is_on_gloo = self._is_cpu and entry.timeline != HOST and entry.timeline not in self._threads
        job = self._streams.get(entry.timeline) if is_on_gloo else None
        if job is None or job.end_s <= self._machine.now_s:
            self._free(entry.memory)
        else:
            self._late.append((job, entry.memory))

    def _free_late(self) -> None:
        for each in list(self._late):
            if each[0].end_s <= self._machine.now_s:
                self._late.remove(each)
                self._free(each[1])

    def _free(self, number: int) -> None:
        if number in self._held and self._memories[number].timeline in self._threads:
            self._beside -= self._memories[number].nbytes
        if number in self._held:
            self._hold(self._held.pop(number), -self._memories[number].nbytes)

    def _hold(self, kind: Kind | None, nbytes: int) -> None:
        if kind is None:
            self._machine.host_bytes += nbytes
            self._host_peak_bytes = max(self._host_peak_bytes, self._machine.host_bytes)
        else:
            self._machine.hold(kind, nbytes)

    def _kind_of(self, number: int) -> Kind | None:
        memory = self._memories[number]
        if number in self._rehearsal.outer_states or (memory.is_pinned if self._is_cpu else not memory.is_device):
            return None
        own = self._rehearsal.kinds.get(number) or _KINDS.get(memory.place)
        return own or _KINDS.get(memory.place.partition(":")[0], "transfers")

    # -- order ---------------------------------------------------------------------------------------------------------

    def _place_of(self, timeline: int) -> tuple[float | None, Job | None]:
        """When a timeline's next job may begin: now, for the program's, or after another job."""
        return (None, None) if timeline == self._program else (0.0, self._streams.get(timeline))

    def _wait(self, timeline: int, event: int) -> None:
        if event in self._working and timeline == HOST:
            kind, nbytes = self._working.pop(event)
            self._hold(kind, -nbytes)
        job = self._events.get(event)
        if isinstance(job, MessageName):
            job = self._mail.job(job)
        if job is None:
            return
        if timeline == self._program or (
            timeline == HOST and job.lane in (PlanLane.WIRE, PlanLane.LOCAL, PlanLane.HOST)
        ):
            self._machine.wait(job)
            self._free_late()
            return
        before = self._streams.get(timeline)
        if before is None or job.end_s > before.end_s:
            self._streams[timeline] = job


def _is_phase(label: object) -> bool:
    return isinstance(label, Alive | PhaseBegin | Rest | Together)
