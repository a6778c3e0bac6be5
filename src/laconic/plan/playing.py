"""The record of a rehearsed step, played on a machine: seconds, bytes and memory at a cluster's rates.

[Note: Streams on a machine]
On a CPU the program is the only stream, and waits where it waits. On an accelerator each stream goes on by itself: a
transfer begins when its stream has come to it and the lane is free. Kernels beside the compute stream take their time
from it, since they share the device. What compute waits for is what an event of another stream was recorded behind.
"""

from __future__ import annotations

from collections.abc import Mapping

from laconic.plan.machine import Job, Kind, Machine, Reading, Transfer
from laconic.plan.recording import (
    COMPUTE,
    Allocate,
    Await,
    Compute,
    Copy,
    Free,
    Mark,
    Peak,
    Record,
    Rest,
    Send,
    Wait,
    Work,
)
from laconic.plan.rehearsal import STEPS, Rehearsal

_KINDS: Mapping[str, Kind] = {
    "shard/ledger.py": "parameters", "shard/bucket.py": "parameters", "shard/reduce.py": "gradients",
    "shard/cache.py": "cache",
}  # fmt: skip
"""The kind of memory that a file of the engine asks for. All others take it for transfers and for work."""


class Player:
    """Plays a rehearsal on a machine: [Note: Streams on a machine]."""

    def __init__(self, machine: Machine, rehearsal: Rehearsal) -> None:
        self.machine = self._machine = machine
        self._rehearsal = rehearsal
        self.peaks: dict[object, dict[Kind, float]] = {}
        """The memory at its fullest in each stretch of the last step."""
        self._is_cpu = machine.device_type == "cpu"
        self._held: dict[int, tuple[Kind | None, int]] = {}
        """The memories that are alive; those of the host have no kind."""
        self._transfers: dict[int, Job | None] = {}
        self._streams: dict[int, Job | None] = {}
        """The last job of each stream besides the compute stream."""
        self._events: dict[int, Job | None] = {}

    def run(self) -> Reading:
        """Play all steps, and read the last."""
        entries = self._rehearsal.entries
        last = next(i for i, each in enumerate(entries) if isinstance(each, Mark) and each.label == ("step", STEPS - 1))
        for entry in entries[:last]:
            self._play(entry)
        with self._machine.reading() as reading:
            stretch: list[object] = []
            for entry in entries[last:]:
                if isinstance(entry, Mark):
                    self._play_stretch(stretch)
                    stretch = []
                stretch.append(entry)
        reading.peak = max(self.peaks.values(), key=lambda peak: sum(peak.values()))
        return reading

    def _play_stretch(self, entries: list[object]) -> None:
        """Play from one mark to the next."""
        with self._machine.peak() as peak:
            for entry in entries:
                self._play(entry)
        if entries:
            before = self.peaks.get(entries[0].label, {})  # type: ignore[attr-defined]  # the first is a mark
            if sum(peak.values()) > sum(before.values()):
                self.peaks[entries[0].label] = peak  # type: ignore[attr-defined]

    def _play(self, entry: object) -> None:
        machine = self._machine
        match entry:
            case Allocate():
                self._allocate(entry)
            case Free(memory):
                kind, nbytes = self._held.pop(memory)
                if kind is None:
                    machine.host_bytes -= nbytes
                else:
                    machine.hold(kind, -nbytes)
            case Work(stream, name, nbytes):
                machine.touch(name, nbytes)
            case Copy(stream, name, nbytes, to_device):
                if self._is_cpu:
                    machine.touch(name, 2 * nbytes)
                else:
                    since, after = self._place_of(stream)
                    self._streams[stream] = machine.copy(name, nbytes, after, to_device=to_device, since=since)
            case Compute(name, phase):
                machine.compute(name, phase, ends=False)
            case Peak(extra_bytes):
                machine.note_peak(extra_bytes)
            case Rest(nbytes):
                machine.hold("activations", nbytes)
            case Send(number, stream, name, purpose, sent):
                transfer = Transfer(name=name, purpose=purpose, sent=dict(sent))
                since, after = self._place_of(stream)
                job = self._transfers[number] = machine.send(transfer, after, since=since)
                if job is not None and stream != COMPUTE:
                    self._streams[stream] = job
            case Await(number):
                machine.wait(self._transfers.pop(number, None))
            case Record(stream, event):
                self._events[event] = Job(None, machine.now_s) if stream == COMPUTE else self._streams.get(stream)
            case Wait(stream, event):
                self._wait(stream, self._events.get(event))

    def _allocate(self, entry: Allocate) -> None:
        kind: Kind | None = None
        if entry.on_host:
            self._machine.host_bytes += entry.nbytes
        else:
            kind = self._rehearsal.kinds.get(entry.memory) or _KINDS.get(entry.place.partition(":")[0], "transfers")
            self._machine.hold(kind, entry.nbytes)
        self._held[entry.memory] = kind, entry.nbytes

    def _place_of(self, stream: int) -> tuple[float | None, Job | None]:
        """When a stream's next job may begin: now, for the compute stream, or after another job."""
        return (None, None) if stream == COMPUTE else (0.0, self._streams.get(stream))

    def _wait(self, stream: int, job: Job | None) -> None:
        before = self._streams.get(stream)
        if stream == COMPUTE:
            self._machine.wait(job)
        elif job is not None and (before is None or job.end_s > before.end_s):
            self._streams[stream] = job
