"""The memory of the stages' parameters on a device, and the version of each stage.

[Note: Versions by pointer swap]
Each version of a stage is one buffer, and the module's parameters are views of the buffer in use. A new version is
always a new buffer. When a version arrives, the parameters are pointed at its buffer; an optimizer steps on a copy of
the old buffer. So a graph that was recorded on the old version keeps the old buffer until its backward, a message that
is still being sent is not overwritten, and no version outlives its last user.
Autograd does not notice a pointer swap, and it does not check biases and the first stage for in-place changes. So every
forward checks the version of its stage, and every backward that the counters of in-place changes are as in the forward.

[Note: A home without memory]
With sharded states a worker has most stages only during an op, but the graph of a forward refers to the storage of the
parameters until its backward. So a stage that is not held has one *home*, a buffer that its parameters always view. The
home's storage has no bytes between ops. When a version arrives, it is copied into the home, and the buffer in which it
arrived is sent on to the next worker. With cache="host" the forward copies its home to host memory, page-locked on an
accelerator, and the backward copies it back: so the version crosses once. These copies are work of the current stream.

[Note: Exact weights and copies]
If weights cross in few bits, all devices compute with what they decode: [Note: Few bits on the ring] in coding.py. The
owner of a stage keeps two buffers then: the exact weights, with which its optimizer steps, and the copy that all have.
An edit of a copy in the middle of a run would get lost, or make the copies differ, so it is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.cyclic.coding import RingWire
from laconic.cyclic.optimizers import Settings, StageOptimizers
from laconic.cyclic.program import Message
from laconic.cyclic.schedule import Op, Schedule
from laconic.cyclic.stages import local_part, trainable


class VersionError(RuntimeError):
    """A backward would run on other parameters than its forward."""


class UsedVersion(NamedTuple):
    """The version of a stage that a forward used, for its backward."""

    buffer: Tensor
    counters: tuple[int, ...]  # the number of in-place changes of each parameter


class PlacedStages:
    """The parameters of all stages on the device `number`.

    The trainable parameters of `stages`, equal on all devices, become views of buffers. The `schedule` decides which
    stages the device holds and updates, and `wire` how their weights cross. The `optimizers` of stages that another
    device updates lose their state.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        number: int,
        optimizers: StageOptimizers,
        wire: RingWire,
    ) -> None:
        named = [trainable(stage) for stage in stages]
        self.names = [list(parameters) for parameters in named]
        self.parameters = [list(parameters.values()) for parameters in named]
        self.layouts = wire.layouts
        self.device = self.parameters[0][0].device
        self.has_peers = any(isinstance(p, DTensor) for stage in stages for p in stage.parameters())
        """Whether other ranks belong to this worker: [Note: Workers of several ranks] in stages.py."""
        self.optimizers, self.wire = optimizers, wire
        self.updated = [stage for stage in range(len(stages)) if number in schedule.updaters(stage)]
        """The stages whose optimizer steps here."""
        self.held = range(len(stages)) if schedule.states == "replicated" else self.updated
        """The stages that keep their memory between ops."""
        self._keeps_on_host = schedule.cache == "host"
        self._on_host: dict[int, Tensor] = {}  # the homes of stages between their forward and their backward
        self._exact: dict[int, Tensor] = {}  # [Note: Exact weights and copies]
        self._coded: dict[int, Tensor] = {}  # the message that brings the newest version of a stage, if it is coded
        self.begin_run(is_pending=False)
        self.buffers = [
            layout.pack(map(local_part, parameters), self.device)
            for layout, parameters in zip(self.layouts, self.parameters, strict=True)
        ]
        """The newest version of each stage, or its home."""
        for stage, buffer in enumerate(self.buffers):
            self._point(stage, buffer)
            if stage not in self.updated:
                optimizers.by_stage[stage].state.clear()
            if stage not in self.held:
                self._free(stage)

    def begin_run(self, *, is_pending: bool) -> None:
        """Give every stage the run's first version number: -1 if a gradient waits to be applied, otherwise 0."""
        self.first_version = -1 if is_pending else 0
        self.version = dict.fromkeys(range(len(self.parameters)), self.first_version)
        """The version of each stage, counted in the run."""
        self._counted: dict[int, tuple[int, ...]] = {}  # the in-place changes of a stage when its copy was made

    def begin_first_batch(self) -> None:
        """Take the weights with which a run begins: code them, if even the first version crosses in few bits."""
        for stage in self.held:
            self._counted.setdefault(stage, self._counters(stage))
            if self.wire.codes_first:
                self._use(stage, self.buffers[stage])

    def end_run(self) -> None:
        """Compute with exact weights again, after the last message of a run."""
        for stage, exact in self._exact.items():
            self.replace(stage, exact)
        self._exact.clear()
        self._coded.clear()

    def load(self, stage: int, exact: Tensor, copy: Tensor | None) -> None:
        """Begin with these weights of a stage that is held and, if workers keep copies, with this copy."""
        self.replace(stage, exact if copy is None else copy)
        if copy is not None:
            self._exact[stage] = exact  # on other devices than the owner until the next version arrives

    def exact(self, stage: int) -> Tensor:
        """The buffer with the exact weights of a stage, where they are known."""
        return self._exact.get(stage, self.buffers[stage])

    def replace(self, stage: int, buffer: Tensor) -> None:
        """Point a stage's parameters at another buffer."""
        self.buffers[stage] = buffer
        self._point(stage, buffer)
        self._counted[stage] = self._counters(stage)

    def update(self, stage: int, total: Tensor, settings: Settings) -> None:
        """Make the next version of a stage from the buffer of its total gradient, with the settings of its batch."""
        exact = self.exact(stage).clone()
        self._point(stage, exact)
        # Graphs saved views of the previous buffer, so autograd must not see this step as a change in place.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.parameters[stage])):
            self.optimizers.apply(stage, self.layouts[stage].views(total), settings)
        self.version[stage] += 1
        self._use(stage, exact)

    def _use(self, stage: int, exact: Tensor) -> None:
        """Compute with the exact weights of a stage or, if they cross in few bits, with what receivers decode."""
        coding = self.wire.coding_of_weights(stage, self.version[stage])
        if coding is None:
            self._exact.pop(stage, None)
            self.replace(stage, exact)
            return
        base = self._base(stage)
        self._exact[stage], self._coded[stage] = exact, coding.encode(exact, base)
        self.replace(stage, coding.decode(self._coded[stage], base))

    def _base(self, stage: int) -> Tensor | None:
        """The copy of a stage to which the next version crosses as a difference; None if it crosses by itself."""
        if not self.wire.sends_differences:
            return None
        if self._counted.get(stage, counters := self._counters(stage)) != counters:
            raise VersionError(
                f"parameters of stage {stage} were changed in place in the middle of a run, but wire= sends "
                "differences to them; change them after `drain()`, or train with wire='exact'"
            )
        return self.buffers[stage]

    def install(self, message: Message, buffer: Tensor) -> None:
        """Use the version that a message from another device has brought, in its buffer."""
        stage, coding = message.stage, self.wire.coding_of(message)
        if stage not in self.held:
            self._arrived = buffer  # to be sent on: see [Note: A home without memory]
            with self._filling(stage) as home:
                if coding is None:
                    home.copy_(buffer)
                else:
                    coding.decode_into(buffer, home)
        else:
            self._exact.pop(stage, None)
            if coding is not None:
                self._coded[stage] = buffer
                buffer = coding.decode(buffer, self._base(stage))
            self.replace(stage, buffer)
        self.version[stage] = max(message.index, self.first_version)

    def content(self, message: Message) -> Tensor:
        """The buffer to send in a message of weights."""
        stage = message.stage
        assert self.version[stage] == max(message.index, self.first_version), message
        if stage not in self.held:
            return self._arrived
        return self.exact(stage) if self.wire.coding_of(message) is None else self._coded[stage]

    @contextmanager
    def showing(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the parameters of all stages are views of these buffers."""
        data = [list(map(local_part, parameters)) for parameters in self.parameters]
        for stage, buffer in enumerate(buffers):
            self._point(stage, buffer)
        try:
            yield
        finally:
            for stage, (parameters, own) in enumerate(zip(self.parameters, data, strict=True)):
                for parameter, value in zip(parameters, own, strict=True):
                    _point(parameter, value)
                if stage in self._counted:  # changes inside were not of the stage's own buffer
                    self._counted[stage] = self._counters(stage)

    def enter_forward(self, op: Op, version: int) -> UsedVersion:
        """Check that the stage has this version; return the record of it that `enter_backward` needs.

        Raises:
            VersionError: the stage has another version.
        """
        expected = max(version, self.first_version)
        if self.version[op.stage] != expected:
            raise VersionError(
                f"stage {op.stage} has version {self.version[op.stage]}, but worker {op.worker} needs {expected} in "
                f"batch {op.batch}"
            )
        return UsedVersion(self.buffers[op.stage], self._counters(op.stage))

    def enter_backward(self, op: Op, used: UsedVersion) -> None:
        """Point the parameters at the version of the forward, which a backward with recomputation reads again.

        Raises:
            VersionError: parameters were changed in place since the forward.
        """
        if (kept := self._on_host.pop(op.stage, None)) is not None:
            with self._filling(op.stage) as home:
                home.copy_(kept, non_blocking=True)
        if self.buffers[op.stage] is not used.buffer:  # an update came between, as it may with shared stages
            self._point(op.stage, used.buffer)
        if self._counters(op.stage) != used.counters:
            raise VersionError(
                f"parameters of stage {op.stage} were changed in place between the forward and the backward of worker "
                f"{op.worker}, batch {op.batch}; change them between steps, in `with consistent_parameters()` or after "
                "`drain()`"
            )

    def leave(self, op: Op, used: UsedVersion) -> None:
        """After an op, free a stage that is not held, or point its parameters at the newest version again."""
        if op.stage not in self.held:
            if op.is_forward and self._keeps_on_host:
                home = self.buffers[op.stage]
                kept = torch.empty(home.shape, dtype=home.dtype, pin_memory=home.device.type != "cpu")
                self._on_host[op.stage] = kept.copy_(home, non_blocking=True)
            self._free(op.stage)
        elif self.buffers[op.stage] is not used.buffer:
            self._point(op.stage, self.buffers[op.stage])

    def _counters(self, stage: int) -> tuple[int, ...]:
        return tuple(p._version for p in self.parameters[stage])

    def _point(self, stage: int, buffer: Tensor) -> None:
        for parameter, view in zip(self.parameters[stage], self.layouts[stage].views(buffer), strict=True):
            _point(parameter, view)

    @contextmanager
    def _filling(self, stage: int) -> Iterator[Tensor]:
        """The home of a stage, with memory, to be filled: [Note: A home without memory]."""
        home = self.buffers[stage]
        home.untyped_storage().resize_(self.layouts[stage].num_bytes)
        # A graph may have saved views of a DTensor's part. Their values come back, so they are not changed in place.
        with torch.autograd._unsafe_preserve_version_counter(home):
            yield home

    def _free(self, stage: int) -> None:
        self.buffers[stage].untyped_storage().resize_(0)


def _point(parameter: nn.Parameter, part: Tensor) -> None:
    """Let a parameter have this memory; a DTensor keeps its own, and has its part's."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = part
    else:
        parameter.data = part
