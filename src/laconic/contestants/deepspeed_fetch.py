"""What DeepSpeed's ZeRO-3 gathers, when, and how long it keeps it: the program of its parameter coordinator.

[Note: DeepSpeed's coordinator]
Source: Rajbhandari and others, "ZeRO-Infinity", arXiv 2104.07857, section 6, and DeepSpeed 0.19's
`runtime/zero/partitioned_param_coordinator.py` and `partition_parameters.py`. ZeRO-3 works on single modules. The first
steps record the order in which modules run in forward and backward. From then on, each module that begins

- gathers those of its parameters that are neither there nor on their way, in one message;
- waits for its own parameters;
- begins to gather parameters of the modules to come, in the order recorded, until a message has
  `stage3_prefetch_bucket_size` elements, or `stage3_max_live_parameters` are there or on their way. A parameter
  that is still there when its next use comes up is skipped, and is then not released before that use.

So the parameters that were gathered ahead when forward ends stay for backward: about `stage3_max_live_parameters`
elements cross once less. A message that has arrived is copied into its parameters. Its buffer stays until all of them
have been used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from laconic.plan.machine import Job, Simulator


@dataclass(frozen=True, kw_only=True)
class FetchSizes:
    """DeepSpeed's settings, in elements."""

    prefetch: int
    """`stage3_prefetch_bucket_size`."""
    max_live: int
    """`stage3_max_live_parameters`."""
    max_reuse: int
    """`stage3_max_reuse_distance`."""


class _Status(Enum):
    AWAY = auto()
    IN_FLIGHT = auto()
    HERE = auto()


@dataclass(eq=False)
class CoalescedGather:
    """One gather of several parameters."""

    job: Job | None
    buffer_bytes: float
    landing_bytes: float
    """Gloo's own buffer."""
    members: list[Parameter]
    unused: int
    has_arrived: bool = False


@dataclass(eq=False)
class Parameter:
    """One parameter in the course of the program."""

    numel: int
    itemsize: int
    partition_numel: int
    """The elements of one rank, with padding."""
    is_trained: bool
    has_two_dims: bool
    num_scales: int
    """The scales of its gradient under qgZ: one for each group, of which there are as many as its longest side."""
    status: _Status = _Status.AWAY
    has_secondary: bool = False
    """True while a node shard is there: hpZ."""
    message: CoalescedGather | None = None
    fetched_for: int = -1
    """The last step of the recorded order for which the parameter was fetched or kept."""

    @property
    def nbytes(self) -> int:
        """The bytes of the whole parameter."""
        return self.numel * self.itemsize


Send = Callable[[Sequence[Parameter]], tuple[Job | None, float]]
"""Begins the gather of parameters; returns its job and the bytes of the buffer in which it arrives."""


@dataclass(eq=False)
class Coordinator:
    """DeepSpeed's coordinator on a machine: [Note: DeepSpeed's coordinator]."""

    machine: Simulator
    order: Sequence[Sequence[Parameter]]
    """The parameters of each module, in the order in which modules run in forward, then in backward."""
    sizes: FetchSizes
    send: Send
    keep: Callable[[Parameter], None]
    """Called when a parameter is released."""
    _queue: deque[tuple[int, Parameter]] = field(default_factory=deque)
    _step: int = 0
    _available: int = 0
    _in_flight: list[CoalescedGather] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._queue = deque((step, parameter) for step, own in enumerate(self.order) for parameter in own)
        self._step = self._available = 0
        for own in self.order:
            for parameter in own:
                parameter.fetched_for = -1

    def fetch(self) -> None:
        """Gather the parameters of the next module, wait for them, and begin to gather those to come."""
        own = self.order[self._step]
        self._gather([each for each in own if each.status is _Status.AWAY])
        for parameter in own:
            if parameter.message is not None:
                self._wait(parameter.message)
                self._use(parameter)
        pending = {id(each) for each in own if each.fetched_for < self._step}
        while self._queue and pending:
            step, parameter = self._queue.popleft()
            parameter.fetched_for = step
            pending.discard(id(parameter))
        self._prefetch()
        self._step += 1

    def release(self, step: int) -> None:
        """End the module of a step of the order: free those of its parameters that are not kept for a later use."""
        own = self.order[step]
        reused = self._used_soon(step + 1)
        for parameter in own:
            if parameter.status is _Status.HERE and parameter.fetched_for <= step and id(parameter) not in reused:
                self._free(parameter)

    def end(self) -> None:
        """End a micro-batch: free everything."""
        for message in list(self._in_flight):
            self._wait(message)
        for own in self.order:
            for parameter in own:
                if parameter.message is not None:
                    self._use(parameter)
                if parameter.status is _Status.HERE:
                    self._free(parameter)

    def settle(self) -> None:
        """Free Gloo's own buffers of gathers that have ended."""
        for message in self._in_flight:
            if message.landing_bytes and (message.job is None or message.job.end_s <= self.machine.now_s):
                self._free_landing(message)

    def _used_soon(self, step: int) -> set[int]:
        found: set[int] = set()
        numel = 0
        while numel < self.sizes.max_reuse and step < len(self.order):
            for parameter in self.order[step]:
                found.add(id(parameter))
                numel += parameter.numel
            step += 1
        return found

    def _prefetch(self) -> None:
        most = min(self.sizes.max_live - self._available, self.sizes.prefetch)
        chosen: list[Parameter] = []
        numel = 0
        while self._queue and numel < most:
            step, parameter = self._queue.popleft()
            parameter.fetched_for = max(parameter.fetched_for, step)
            if parameter.status is _Status.AWAY and parameter not in chosen:
                chosen.append(parameter)
                numel += parameter.numel
        self._gather(chosen)

    def _gather(self, parameters: Sequence[Parameter]) -> None:
        for has_secondary in (True, False):  # hpZ gathers inside the node what it can
            members = [each for each in parameters if each.has_secondary is has_secondary]
            if not members:
                continue
            job, buffer_bytes = self.send(members)
            landing_bytes = buffer_bytes if self.machine.device_type == "cpu" and job is not None else 0.0
            self.machine.hold("transfers", buffer_bytes + landing_bytes)
            message = CoalescedGather(job, buffer_bytes, landing_bytes, members, len(members))
            self._in_flight.append(message)
            for parameter in members:
                parameter.status, parameter.message = _Status.IN_FLIGHT, message
                self._available += parameter.numel

    def _wait(self, message: CoalescedGather) -> None:
        if message.has_arrived:
            return
        message.has_arrived = True
        self._in_flight.remove(message)
        self.machine.wait(message.job, "gather")
        self._free_landing(message)
        nbytes = sum(each.nbytes for each in message.members)
        if len(message.members) > 1:  # a lone parameter is the buffer itself
            self.machine.touch("copy out", 2 * nbytes)
            self.machine.hold("parameters", nbytes)
        else:
            self.machine.hold("parameters", nbytes)
            self.machine.hold("transfers", -message.buffer_bytes)
            message.buffer_bytes = 0.0
        for parameter in message.members:
            parameter.status = _Status.HERE

    def _use(self, parameter: Parameter) -> None:
        message, parameter.message = parameter.message, None
        assert message is not None
        message.unused -= 1
        if not message.unused:
            self.machine.hold("transfers", -message.buffer_bytes)

    def _free_landing(self, message: CoalescedGather) -> None:
        self.machine.hold("transfers", -message.landing_bytes)
        message.landing_bytes = 0.0

    def _free(self, parameter: Parameter) -> None:
        self.keep(parameter)
        self.machine.hold("parameters", -parameter.nbytes)
        parameter.status = _Status.AWAY
        self._available -= parameter.numel
