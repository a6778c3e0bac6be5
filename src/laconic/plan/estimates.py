"""What a strategy takes on a cluster: seconds, bytes and memory of a step, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laconic.comm.traffic import WIRE_LEVELS, Level, Purpose
from laconic.config import Config
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.machine import Kind, PlanLane, Span
from laconic.plan.rehearsed import RehearsedStep
from laconic.registry import Strategy

MARGIN = 0.03
"""The share of a device's memory that allocators lose to fragments and that no figure here can know."""
PROCESS_BYTES = {"cuda": 1.5e9, "cpu": 0.6e9}
"""The device memory of a process before it has a model: CUDA's context, NCCL's buffers, cuBLAS's workspace; on CPU the
private memory of Python and its libraries, with the stacks of Gloo's threads: 0.55 GB (benchmarks, row `fits`)."""


def process_bytes(device_type: str) -> float:
    """See `PROCESS_BYTES`; a device of another type counts as CUDA's."""
    return PROCESS_BYTES.get(device_type, PROCESS_BYTES["cuda"])


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The prediction of one strategy. Bytes and memory are of one rank, as a mean over the ranks of a node.

    In a pipeline the bytes are those of the node that sends most, and the memory that of the fullest rank.
    """

    strategy: str
    label: str
    is_peer: bool
    seconds: float
    """Of one optimizer step."""
    tokens: int
    """The tokens that all ranks train on in a step."""
    sent_bytes: Mapping[tuple[Level, Purpose], float]
    """The payload bytes that one rank sends in a step, by level and purpose."""
    waits_s: Mapping[PlanLane, float]
    """The seconds of a step in which compute waits, by the lane that it waits for."""
    busy_s: Mapping[PlanLane, float]
    """The seconds of a step in which each lane works."""
    peak: Mapping[Kind, float]
    """The device memory at its fullest, in bytes by kind."""
    resting: Mapping[Kind, float]
    """The device memory between steps."""
    host_bytes: float
    """The host memory of the cache and of outer states, with what a sync of islands takes besides. On a CPU that is in
    `peak`."""
    ranks_per_node: int
    header_factor: float
    spare_device_bytes: float
    """What is left of a device's memory at the peak; negative if the strategy does not fit."""
    spare_host_bytes: float
    """What is left of a node's memory, for one rank."""
    inexact: str = ""
    """What the strategy trains otherwise than ZeRO-3; empty if it trains the same."""
    spans: tuple[Span, ...] = ()
    begin_s: float = 0.0
    notes: tuple[str, ...] = ()
    job: Config
    """The job under the strategy, with whatever the plan has chosen for it."""

    @property
    def fits(self) -> bool:
        """Whether device and host have memory enough."""
        return self.spare_device_bytes >= 0 and self.spare_host_bytes >= 0

    @property
    def peak_bytes(self) -> float:
        """The device memory at its fullest."""
        return sum(self.peak.values())

    @property
    def resting_bytes(self) -> float:
        """The device memory between steps."""
        return sum(self.resting.values())

    @property
    def wire_bytes(self) -> float:
        """The payload bytes that leave one node in a step."""
        return self.ranks_per_node * sum(size for (level, _), size in self.sent_bytes.items() if level in WIRE_LEVELS)

    @property
    def interface_bytes(self) -> float:
        """`wire_bytes` as a node's network interface counts them, with headers."""
        return self.wire_bytes * self.header_factor

    @property
    def local_bytes(self) -> float:
        """The payload bytes that the ranks of one node send to each other in a step."""
        return self.ranks_per_node * sum(size for (level, _), size in self.sent_bytes.items() if level == "local")

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the whole cluster for one token."""
        return self.seconds / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """The tokens that the whole cluster trains on in a second."""
        return self.tokens / self.seconds

    @property
    def wire_bytes_per_token(self) -> float:
        """The payload bytes on all nodes' wires for one token, of one node."""
        return self.wire_bytes / self.tokens

    @property
    def bound_by(self) -> PlanLane:
        """What a step takes most of its time for: compute, or the lane that it waits for longest."""
        waited = sum(self.waits_s.values())
        most = max(self.waits_s, key=lambda lane: self.waits_s[lane], default=PlanLane.COMPUTE)
        return most if self.waits_s.get(most, 0.0) > self.seconds - waited else PlanLane.COMPUTE


def estimate_of(
    program: RehearsedStep,
    cluster: ClusterSpec,
    strategy: Strategy,
    *,
    device_type: str,
    tokens: int,
    notes: tuple[str, ...],
    job: Config,
) -> Estimate:
    """Read a step of a program on a cluster."""
    reading = program.read()
    on_host, needed = reading.host_bytes, reading.peak_bytes + process_bytes(device_type)
    if device_type == "cpu":  # one memory serves as both
        needed += on_host
    return Estimate(
        strategy=strategy.name,
        label=strategy.label,
        is_peer=not strategy.is_own,
        seconds=reading.seconds,
        tokens=tokens,
        sent_bytes=dict(reading.sent_bytes),
        waits_s=dict(reading.waits_s),
        busy_s=dict(reading.busy_s),
        peak=dict(reading.peak),
        resting=dict(reading.held),
        host_bytes=on_host,
        ranks_per_node=cluster.ranks_per_node,
        header_factor=cluster.wire_header_factor,
        spare_device_bytes=cluster.device_memory_bytes * (1 - MARGIN) - needed,
        spare_host_bytes=cluster.host_memory_bytes * (1 - MARGIN) / cluster.ranks_per_node - on_host,
        inexact=strategy.inexact or program.inexact,
        spans=tuple(reading.spans),
        begin_s=reading.begin_s,
        notes=(*notes, *program.notes),
        job=job,
    )
