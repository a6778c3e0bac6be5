"""The memory of the stages' parameters on a device, and the version of each stage.

[Note: Versions by pointer swap]
Each version of a stage is one buffer, and the module's parameters are views of the buffer in use. A new version is
always a new buffer. When a version arrives, the parameters are pointed at its buffer; an optimizer steps on a copy of
the old buffer. So a graph that was recorded on the old version keeps the old buffer until its backward, a message that
is still being sent is not overwritten, and no version outlives its last user.
Autograd does not notice a pointer swap, and it does not check biases and the first stage for in-place changes. So every
backward checks that the version of its stage, and the counters of in-place changes, are the same as in the forward.

[Note: A home without memory]
With sharded states a worker has most stages only during an op, but the graph of a forward refers to the storage of the
parameters until its backward. So a stage that is not held has one *home*, a buffer that its parameters always view. The
home's storage has no bytes between ops. When a version arrives, it is copied into the home, and the buffer in which it
arrived is sent on to the next worker.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.cyclic.links import ByteLayout
from laconic.cyclic.optimizers import Settings, StageOptimizers
from laconic.cyclic.schedule import Message, Op, Schedule
from laconic.cyclic.stage import trainable


class VersionError(RuntimeError):
    """A backward would run on other parameters than its forward."""


@dataclass(frozen=True)
class UsedVersion:
    """The version of a stage that a forward used, for its backward."""

    version: int
    buffer: Tensor
    counters: tuple[int, ...]  # the number of in-place changes of each parameter


class Placement:
    """The parameters of all stages on the device `number`.

    The trainable parameters of `stages`, equal on all devices, become views of buffers. The `schedule` decides which
    stages the device holds and updates. The `optimizers` of stages that another device updates lose their state.
    """

    def __init__(
        self, stages: Sequence[nn.Module], schedule: Schedule, number: int, optimizers: StageOptimizers
    ) -> None:
        named = [trainable(stage) for stage in stages]
        self.names = [list(parameters) for parameters in named]
        self.parameters = [list(parameters.values()) for parameters in named]
        self.layouts = [ByteLayout(parameters) for parameters in self.parameters]
        self.device = self.parameters[0][0].device
        self.optimizers = optimizers
        self.updated = schedule.updated_on(number)
        """The stages whose optimizer steps here."""
        self.held = range(len(stages)) if schedule.states == "replicated" else self.updated
        """The stages that keep their memory between ops."""
        self._interleaves = not schedule.has_device_per_worker  # then an update may come between forward and backward
        self.begin_run(is_pending=False)
        self.buffers = [
            layout.pack((p.detach() for p in parameters), self.device)
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

    def replace(self, stage: int, buffer: Tensor) -> None:
        """Point a stage's parameters at another buffer."""
        self.buffers[stage] = buffer
        self._point(stage, buffer)

    def update(self, stage: int, total: Tensor, settings: Settings) -> None:
        """Make the next version of a stage from the buffer of its total gradient, with the settings of its batch."""
        self.replace(stage, self.buffers[stage].clone())
        # Graphs saved views of the previous buffer, so autograd must not see this step as a change in place.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.parameters[stage])):
            self.optimizers.apply(stage, self.layouts[stage].views(total), settings)
        self.version[stage] += 1

    def install(self, message: Message, buffer: Tensor) -> None:
        """Use the version that a message from another device has brought, in its buffer."""
        stage = message.stage
        if stage in self.held:
            self.replace(stage, buffer)
        else:
            self.buffers[stage].untyped_storage().resize_(buffer.numel())
            self.buffers[stage].copy_(buffer)
            self._arrived = buffer  # to be sent on: see [Note: A home without memory]
        self.version[stage] = max(message.index, self.first_version)

    def content(self, message: Message) -> Tensor:
        """The buffer to send in a message of weights."""
        assert self.version[message.stage] == max(message.index, self.first_version), message
        return self.buffers[message.stage] if message.stage in self.held else self._arrived

    @contextmanager
    def showing(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the parameters of all stages are views of these buffers."""
        data = [[p.data for p in parameters] for parameters in self.parameters]
        for stage, buffer in enumerate(buffers):
            self._point(stage, buffer)
        try:
            yield
        finally:
            for parameters, own in zip(self.parameters, data, strict=True):
                for parameter, value in zip(parameters, own, strict=True):
                    parameter.data = value

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
        return UsedVersion(expected, self.buffers[op.stage], self._counters(op.stage))

    def enter_backward(self, op: Op, used: UsedVersion) -> None:
        """Point the parameters at the version of the forward, which a backward with recomputation reads again.

        Raises:
            VersionError: the stage has another version than in the forward, or parameters were changed in place.
        """
        is_same_buffer = self.buffers[op.stage] is used.buffer
        if not self._interleaves and (self.version[op.stage] != used.version or not is_same_buffer):
            raise VersionError(
                f"stage {op.stage} went from version {used.version} to {self.version[op.stage]} between the forward "
                f"and the backward of worker {op.worker}, batch {op.batch}"
            )
        if not is_same_buffer:
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
            self._free(op.stage)
        elif self.buffers[op.stage] is not used.buffer:
            self._point(op.stage, self.buffers[op.stage])

    def _counters(self, stage: int) -> tuple[int, ...]:
        return tuple(p._version for p in self.parameters[stage])

    def _point(self, stage: int, buffer: Tensor) -> None:
        for parameter, view in zip(self.parameters[stage], self.layouts[stage].views(buffer), strict=True):
            parameter.data = view

    def _free(self, stage: int) -> None:
        self.buffers[stage].untyped_storage().resize_(0)
