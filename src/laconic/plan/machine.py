"""A machine that runs the program of a strategy without doing the work: it keeps the time, the memory and the bytes.

[Note: One program, three readings]
A strategy's step is a program: it computes phases, begins transfers, waits for them, and holds and frees memory. It is
a record of the real code: [Note: Rehearsed steps] in rehearsal.py. The machine runs the program of one rank, and reads
it three times at once. The bytes of the transfers are summed. The memory that is held is summed, and its peak kept. And
each transfer occupies a lane for as long as the cluster's figures say: it starts when it is issued, but not before the
lane's last transfer has ended. The program goes on meanwhile, until it waits. So the seconds of a step are those of a
discrete-event simulation whose events come in the order of the program, as all ranks issue their transfers at fixed
points.

All ranks are alike, so one rank stands for all; in a pipeline one for each place in it, with a machine of its own.
Bytes are means over the ranks of a node. The ranks of a node share its wire, so a transfer on the wire takes as long as
the bytes of the whole node.

On an accelerator compute goes on during a transfer. On a CPU the cores that compute also copy the bytes, and ranks that
share cores wait for a core. So compute loses the share of the transfer that the cluster file says, and the latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from laconic.comm.traffic import Level, Purpose
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.phase import OpWork, Phase
from laconic.rehearse.rings import Route

Kind = Literal["parameters", "gradients", "optimizer", "transfers", "activations", "cache"]
"""What device memory holds."""
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "transfers", "activations", "cache")


class PlanLane(Enum):
    """The resources that work at the same time."""

    COMPUTE = "compute"
    WIRE = "wire"
    """The network between nodes."""
    LOCAL = "inside the node"
    """The network between the ranks of a node."""
    TO_HOST = "copies to the host"
    TO_DEVICE = "copies to the device"
    HOST = "the host"
    """Work in host memory, and on a CPU that of other threads."""
    STAGES = "other stages"
    """The ranks that hold other layers, which are waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The time in which a lane worked, or in which compute waited for it."""

    lane: PlanLane
    name: str
    begin_s: float
    end_s: float
    is_wait: bool = False
    """True if compute has waited for `lane`."""
    place: int = 0
    """The place in a pipeline."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work on a lane that has begun."""

    lane: PlanLane | None
    """None for work of the compute stream, for which it never waits itself."""
    end_s: float
    cause: Job | None = None
    """The job that it had to wait for, if any."""


@dataclass(kw_only=True)
class Reading:
    """The readings of a part of a program."""

    begin_s: float = 0.0
    seconds: float = 0.0
    sent_bytes: Counter[tuple[Level, Purpose]] = field(default_factory=Counter)
    """The payload bytes that one rank sends, as a mean over ranks."""
    waits_s: Counter[PlanLane] = field(default_factory=Counter)
    """The seconds that compute waits, by the lane that it waits for."""
    busy_s: Counter[PlanLane] = field(default_factory=Counter)
    """The seconds that each lane works."""
    peaks: dict[object, Counter[Kind]] = field(default_factory=dict)
    """The device memory at its fullest in each stretch of the part, by kind, in bytes."""
    held: Counter[Kind] = field(default_factory=Counter)
    """The device memory at rest after the whole program."""
    host_bytes: float = 0.0
    """The host memory that the whole program needs."""
    spans: list[Span] = field(default_factory=list)

    @property
    def peak(self) -> Counter[Kind]:
        """The device memory at its fullest, by kind."""
        return max(self.peaks.values(), key=Counter.total, default=Counter())

    @property
    def peak_bytes(self) -> float:
        """The device memory at its fullest."""
        return self.peak.total()

    def add(self, other: Reading, share: float = 1.0) -> None:
        """Add a share of what another part takes and sends. Of a stretch of both, the higher peak counts."""
        self.seconds += share * other.seconds
        for name in ("sent_bytes", "waits_s", "busy_s"):
            counter = getattr(self, name)
            for key, value in getattr(other, name).items():
                counter[key] += share * value
        for stretch, peak in other.peaks.items():
            self.peaks[stretch] = max(self.peaks.get(stretch, Counter()), peak, key=Counter.total)
        self.spans += other.spans


class Simulator:
    """The machine of [Note: One program, three readings]."""

    def __init__(self, cluster: ClusterSpec, *, device_type: str = "cuda", keeps_spans: bool = False) -> None:
        """Make an idle, empty machine with the figures of `cluster`. On "cpu", host and device are one memory."""
        self.cluster, self.device_type = cluster, device_type
        self.now_s = 0.0
        self.held: Counter[Kind] = Counter()
        """The device memory that one rank holds, in bytes."""
        self.host_bytes = 0.0
        """The host memory that one rank needs."""
        self._last: dict[PlanLane, Job | None] = dict.fromkeys(PlanLane)
        self.keeps_spans = keeps_spans
        self._reading = Reading()
        self._stretch: object = None
        self._total = 0.0
        self._extra_bytes = 0.0
        """The activations and temporaries that are alive besides what is held."""
        self._peak_total = -1.0
        self._memory_s = 1.0 / cluster.device_memory_bytes_per_s
        self._launch_s = cluster.device_launch_s or 0.0

    # -- memory --------------------------------------------------------------------------------------------------------

    def hold(self, kind: Kind, nbytes: float) -> None:
        """Allocate device memory; a negative number frees it."""
        self.held[kind] += nbytes  # type: ignore[assignment]
        self._total += nbytes
        self._note_peak(self._extra_bytes)

    def set_extra(self, extra_bytes: float) -> None:
        """Let `extra_bytes` of activations and temporaries be alive besides what is held, until the next call."""
        self._extra_bytes = extra_bytes
        self._note_peak(extra_bytes)

    def leave(self, nbytes: float) -> None:
        """Hold `nbytes` of activations, or free some of earlier phases, and let none be alive besides."""
        self._extra_bytes = 0.0
        self.hold("activations", nbytes)

    def _note_peak(self, extra_bytes: float) -> None:
        """Note that `extra_bytes` of activations and temporaries are alive besides what is held."""
        if self._total + extra_bytes > self._peak_total:
            self._peak_total = self._total + extra_bytes
            peak = Counter({kind: self.held[kind] for kind in KINDS})
            peak["activations"] += extra_bytes  # type: ignore[assignment]  # bytes are means
            self._reading.peaks[self._stretch] = peak

    # -- time ----------------------------------------------------------------------------------------------------------

    def compute(self, name: str, phase: Phase) -> None:
        """Run a phase of the unit `name`. What it leaves is held later: `leave`."""
        self._note_peak(phase.peak_bytes)
        self._work(name, self.seconds(phase))

    def seconds(self, phase: Phase) -> float:
        """The seconds of a phase on one device. ConfigError: the cluster has no rate for a dtype."""
        return sum(map(self._seconds_of, phase.work))

    def _seconds_of(self, work: OpWork) -> float:
        """See [Note: Seconds of an operation]."""
        product_s = 0.0
        if work.dtype is not None:
            share = self.cluster.device_attention_share if work.is_attention else 1.0
            product_s = work.flops / (share * self.cluster.flops_per_s(work.dtype))
        return max(product_s, work.nbytes * self._memory_s) + work.count * self._launch_s

    def run(self, name: str, work: OpWork) -> None:
        """Run operations on the device. ConfigError: the cluster has no rate for their dtype."""
        self._work(name, self._seconds_of(work))

    def on_host(self, name: str, nbytes: float, *after: Job | None, since: float | None = None) -> Job:
        """Begin work on the host that reads and writes `nbytes`, of which each rank of the node has as much."""
        memory_s, rate = self._memory_s, self.cluster.host_memory_bytes_per_s
        if self.device_type != "cpu" and rate is not None:
            memory_s = max(memory_s, self.cluster.ranks_per_node / rate)
        return self._occupy(PlanLane.HOST, name, nbytes * memory_s, after, since)

    def _work(self, name: str, seconds: float) -> None:
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self._note(PlanLane.COMPUTE, name, begin_s, self.now_s)

    def send(
        self, route: Route, name: str, purpose: Purpose, *after: Job | None, since: float | None = None
    ) -> Job | None:
        """Begin a collective along a route, now or when its stream has come to it. None if it sends nothing."""
        lane, latency_s, bytes_s = self._cost_of(route, purpose)
        if lane is None:
            return None
        job = self._occupy(lane, name, latency_s + bytes_s, after, since)
        self._expose(name, lane, bytes_s, latency_s)
        return job

    def send_message(
        self, route: Route, name: str, purpose: Purpose, *, since: float | None = None, ready_s: float = 0.0
    ) -> Job | None:
        """Begin one of many messages, now. The next one follows on its lane, whatever the latency of this one.

        Of a message to another machine, `since` is when it was sent, and `ready_s` when that machine has asked for it.
        The other machine loses the other half of what computing loses: `lose_to_message`.
        """
        lane, latency_s, bytes_s = self._cost_of(route, purpose)
        if lane is None:
            return None
        if since is None:
            sent = self._occupy(lane, name, bytes_s, ())
        else:
            sent = self._occupy(lane, name, bytes_s, (Job(PlanLane.STAGES, max(since, ready_s)),), 0.0)
        self._expose(name, lane, bytes_s if since is None else bytes_s / 2, 0.0)
        return Job(lane, sent.end_s + latency_s, sent.cause)

    def lose_to_message(self, route: Route, name: str) -> None:
        """Let compute lose what it loses to a message that comes from another machine."""
        lane, _, bytes_s = self._cost_of(route, None)
        if lane is not None:
            self._expose(name, lane, bytes_s / 2, 0.0)

    def _cost_of(self, route: Route, purpose: Purpose | None) -> tuple[PlanLane | None, float, float]:
        """The lane of a transfer, if it sends anything, its latency, and the seconds of its bytes. Count what is sent.

        A route without hops has one message, on its slowest level.
        """
        lane, latency_s, bytes_s, seconds = None, 0.0, 0.0, 0.0
        for level, nbytes in route.sent.items():
            if nbytes <= 0:
                continue
            if purpose is not None:
                self._reading.sent_bytes[level, purpose] += nbytes  # type: ignore[assignment]
            sharing = 1 if level == "local" else self.cluster.ranks_per_node  # of a node, its wire
            each = (
                0.0 if route.hops else self.cluster.latency_s(level), nbytes * sharing / self.cluster.bytes_per_s(level)
            )  # fmt: skip
            if sum(each) >= seconds:
                (latency_s, bytes_s), seconds = each, sum(each)
            lane = PlanLane.LOCAL if level == "local" and lane is None else PlanLane.WIRE if level != "local" else lane
        if lane is not None and route.hops:
            latency_s = sum(hops * self.cluster.latency_s(level) for level, hops in route.hops.items() if hops)
        return lane, latency_s, bytes_s

    def _expose(self, name: str, lane: PlanLane, bytes_s: float, latency_s: float) -> None:
        """Let compute lose what it loses to a transfer in which a rank sends and receives as much."""
        overlap = self.cluster.overlap("local" if lane is PlanLane.LOCAL else "node")
        exposed_s = (1 - overlap) * bytes_s + (latency_s if self.device_type == "cpu" else 0.0)
        if exposed_s:
            self._work(name, exposed_s)

    def copy(
        self, name: str, nbytes: float, *after: Job | None, to_device: bool, since: float | None = None
    ) -> Job | None:
        """Begin a copy between host and device, now or when its stream has come to it. On CPU there is none."""
        if self.device_type == "cpu" or not nbytes:
            return None
        lane = PlanLane.TO_DEVICE if to_device else PlanLane.TO_HOST
        return self._occupy(lane, name, nbytes / self.cluster.host_bytes_per_s(to_device=to_device), after, since)

    def _occupy(
        self, lane: PlanLane, name: str, seconds: float, after: tuple[Job | None, ...], since: float | None = None
    ) -> Job:
        ready_s = self.now_s if since is None else since
        causes = [job for job in (self._last[lane], *after) if job is not None and job.end_s > ready_s]
        cause = max(causes, key=lambda job: job.end_s, default=None)
        begin_s = ready_s if cause is None else cause.end_s
        self._note(lane, name, begin_s, begin_s + seconds)
        self._last[lane] = job = Job(lane, begin_s + seconds, cause)
        return job

    def wait(self, job: Job | None, name: str = "") -> None:
        """Let compute wait until a job has ended, and before that the jobs that it waited for itself."""
        if job is None or job.end_s <= self.now_s:
            return
        chain = [job]
        while chain[-1].cause is not None and chain[-1].cause.end_s > self.now_s:
            chain.append(chain[-1].cause)
        for each in reversed(chain):
            self._wait(each, name)

    def _wait(self, job: Job, name: str) -> None:
        if job.lane is None:
            return
        self._reading.waits_s[job.lane] += job.end_s - self.now_s  # type: ignore[assignment]
        if self.keeps_spans:
            span = Span(lane=job.lane, name=name, begin_s=self.now_s, end_s=job.end_s, is_wait=True)
            self._reading.spans.append(span)
        self.now_s = job.end_s

    def _note(self, lane: PlanLane, name: str, begin_s: float, end_s: float) -> None:
        self._reading.busy_s[lane] += end_s - begin_s  # type: ignore[assignment]
        if self.keeps_spans and end_s > begin_s:
            self._reading.spans.append(Span(lane=lane, name=name, begin_s=begin_s, end_s=end_s))

    # -- readings ------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, stretch: object = None) -> Iterator[Reading]:
        """Read a stretch of the program: yields the reading, which is complete when the body ends."""
        self._reading = own = Reading(begin_s=self.now_s)
        self._stretch, self._peak_total = stretch, -1.0
        self._note_peak(self._extra_bytes)
        yield own
        own.seconds = self.now_s - own.begin_s
        self._reading = Reading()
