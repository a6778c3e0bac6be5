"""The tape of a rehearsed step, played on a machine: seconds, bytes and memory at a cluster's rates.

[Note: Streams on a machine]
On a CPU the program is the only stream, and waits where it waits. On an accelerator each stream goes on by itself: a
transfer begins when its stream has come to it and the lane is free. Kernels beside the compute stream take their time
from it, since they share the device. What compute waits for is what an event of another stream was recorded behind.
The host waits for transfers of its own, and compute with it; it is never late itself, so what it waits for besides
costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.plan.machine import Job, Kind, Lane, Machine, Reading, Transfer
from laconic.plan.op_cost import Copy, Work
from laconic.plan.phantom import Peak, PhaseBegin, Rest
from laconic.plan.rehearsal import END, STEPS, Rehearsal
from laconic.rehearse.machine import COMPUTE
from laconic.rehearse.tape import HOST, Entry, Free, Mark, Record, Step, Wait

_KINDS: Mapping[str, Kind] = {
    "shard/ledger.py": "parameters", "shard/bucket.py": "parameters", "shard/reduce.py": "gradients",
    "shard/cache.py": "cache",
}  # fmt: skip
"""The kind of memory that a file of the engine asks for. All others take it for transfers and for work."""


class Player:
    """Plays a rehearsal on a machine: [Note: Streams on a machine]."""

    def __init__(self, machine: Machine, rehearsal: Rehearsal) -> None:
        self.machine = self._machine = machine
        self._rehearsal, self._memories = rehearsal, rehearsal.tape.memories
        self.peaks: dict[object, dict[Kind, float]] = {}
        """The memory at its fullest in each stretch of the last step."""
        self._is_cpu = machine.device_type == "cpu"
        self._program = HOST if self._is_cpu else COMPUTE
        """The timeline that computes."""
        self._held: dict[int, Kind | None] = {}
        """The memories that are alive; those of the host have no kind."""
        self._streams: dict[int, Job | None] = {}
        """The last job of each other timeline."""
        self._events: dict[int, Job | None] = {}

    def run(self) -> Reading:
        """Play all steps, and read the last."""
        entries = self._rehearsal.tape.entries
        stretches = [i for i, each in enumerate(entries) if isinstance(each, Mark) and not _is_phase(each.label)]
        labels: list[Any] = [entries[i].label for i in stretches]  # type: ignore[union-attr]  # they are marks
        last, end = labels.index(("step", STEPS - 1)), labels.index(END)
        self._play(entries[: stretches[last]])
        with self._machine.reading() as reading:
            for label, begin, stop in zip(labels[last:end], stretches[last:end], stretches[last + 1 :], strict=False):
                self._play_stretch(label, entries[begin:stop])
        reading.peak = max(self.peaks.values(), key=lambda peak: sum(peak.values()))
        return reading

    def _play_stretch(self, label: object, entries: Sequence[Entry]) -> None:
        """Play from one mark to the next."""
        with self._machine.peak() as peak:
            self._play(entries)
        if sum(peak.values()) > sum(self.peaks.get(label, {}).values()):
            self.peaks[label] = peak

    def _play(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            match entry:
                case Step():
                    self._step(entry)
                case Free():
                    self._free(entry.memory)
                case Record():
                    is_now = entry.timeline in (self._program, HOST)
                    job = Job(None, self._machine.now_s) if is_now else self._streams.get(entry.timeline)
                    self._events[entry.event] = job
                case Wait():
                    self._wait(entry.timeline, self._events.get(entry.event))
                case Mark():
                    self._mark(entry.label)

    def _step(self, step: Step) -> None:
        machine, cost = self._machine, step.cost
        if step.allocates is not None:
            self._allocate(step.allocates)
        elif step.transfer is not None:
            purpose: Any = step.transfer.purpose
            route = step.transfer.route
            name = f"{purpose} {step.transfer.unit}".strip()
            transfer = Transfer(name=name, purpose=purpose, sent=dict(route.sent), hops=route.hops or 1)
            since, after = self._place_of(step.timeline)
            job = machine.send(transfer, after, since=since)
            if job is not None and step.timeline != self._program:
                self._streams[step.timeline] = job
        elif isinstance(cost, Copy) and not self._is_cpu:
            since, after = self._place_of(step.timeline)
            job = machine.copy(step.name, cost.nbytes, after, to_device=cost.to_device, since=since)
            self._streams[step.timeline] = job
        elif isinstance(cost, Copy):
            machine.touch(step.name, 2 * cost.nbytes)
        elif isinstance(cost, Work):
            machine.touch(step.name, cost.nbytes)

    def _mark(self, label: object) -> None:
        machine = self._machine
        match label:
            case PhaseBegin(name, phase):
                machine.compute(name, phase, ends=False)
            case Peak(extra_bytes):
                machine.note_peak(extra_bytes)
            case Rest(nbytes):
                machine.hold("activations", nbytes)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _allocate(self, number: int) -> None:
        memory, kind = self._memories[number], self._kind_of(number)
        self._held[number] = kind
        self._hold(kind, memory.nbytes)

    def _free(self, number: int) -> None:
        if number in self._held:
            self._hold(self._held.pop(number), -self._memories[number].nbytes)

    def _hold(self, kind: Kind | None, nbytes: int) -> None:
        if kind is None:
            self._machine.host_bytes += nbytes
        else:
            self._machine.hold(kind, nbytes)

    def _kind_of(self, number: int) -> Kind | None:
        memory = self._memories[number]
        if memory.is_pinned if self._is_cpu else not memory.is_device:
            return None
        return self._rehearsal.kinds.get(number) or _KINDS.get(memory.place.partition(":")[0], "transfers")

    # -- order ---------------------------------------------------------------------------------------------------------

    def _place_of(self, timeline: int) -> tuple[float | None, Job | None]:
        """When a timeline's next job may begin: now, for the program's, or after another job."""
        return (None, None) if timeline == self._program else (0.0, self._streams.get(timeline))

    def _wait(self, timeline: int, job: Job | None) -> None:
        if job is None:
            return
        if timeline == self._program or (timeline == HOST and job.lane in (Lane.WIRE, Lane.LOCAL)):
            self._machine.wait(job)
            return
        before = self._streams.get(timeline)
        if before is None or job.end_s > before.end_s:
            self._streams[timeline] = job


def _is_phase(label: object) -> bool:
    return isinstance(label, PhaseBegin | Peak | Rest)
