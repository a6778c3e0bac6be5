"""Where the parameters of stages live on a device, and which version is there.

[Note: Versions by pointer swap]
A version of a stage is one buffer, and the module's parameters are views of the one in use. A new version is always
another buffer: what arrives is put in place by pointing the parameters at it, and an owner steps its optimizer on a
copy. So a graph that was recorded on the old version keeps it until its backward, a message that is still leaving is
not overwritten, and no version outlives its last user. Autograd notices neither pointer swaps nor, for biases and the
first stage, changes in place; so every backward checks that its stage has the version, and the counters of in-place
changes, that its forward had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.cyclic.flat import Layout
from laconic.cyclic.optimizers import Settings, StageOptimizers
from laconic.cyclic.schedule.messages import Message, Op


class VersionError(RuntimeError):
    """A backward would run on other parameters than its forward did."""


@dataclass(frozen=True)
class Used:
    """What a forward ran on."""

    version: int
    buffer: Tensor
    counters: tuple[int, ...]


class Placement:
    """`single` and `shared`: a device holds its stages whole, and applies their totals itself.

    Args:
        stages: all of them, of the same values on every device. Their trainable parameters become views.
        held: the stages that are kept here between uses.
    """

    def __init__(self, stages: Sequence[nn.Module], held: Sequence[int], optimizers: StageOptimizers) -> None:
        self.parameters = [trainable(stage) for stage in stages]
        self.layouts = [Layout(parameters) for parameters in self.parameters]
        self.device = self.parameters[0][0].device
        self.held = frozenset(held)
        self.optimizers = optimizers
        self.version = dict.fromkeys(range(len(stages)), 0)
        self.first = 0
        self._is_swapped = False
        self._hidden: dict[int, list[Tensor]] = {}
        self.buffers = [
            layout.pack((p.detach() for p in parameters), self.device)
            for layout, parameters in zip(self.layouts, self.parameters, strict=True)
        ]
        for stage in range(len(stages)):
            self._point(stage, self.buffers[stage])
            if stage not in self.held:
                optimizers.by_stage[stage].state.clear()
                self._free(stage)

    # -- the run -------------------------------------------------------------------------------------------------------

    def begin_run(self, *, is_pending: bool) -> None:
        """All that is held is the run's first version: -1 if a gradient is waiting, else 0."""
        self.first = -1 if is_pending else 0
        self.version = dict.fromkeys(self.version, self.first)

    def replace(self, stage: int, buffer: Tensor) -> None:
        """Put other values in place."""
        self.buffers[stage] = buffer
        self._point(stage, buffer)

    def update(self, stage: int, total: Tensor, settings: Settings) -> None:
        """Apply a total gradient, a buffer, with the settings of its batch."""
        self.replace(stage, self.buffers[stage].clone())
        parameters, gradients = self.parameters[stage], self.layouts[stage].views(total)
        # What graphs saved is another buffer, so this is no change in place to them.
        with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):
            self.optimizers.apply(stage, gradients, parameters, settings)
        self.version[stage] += 1

    def install(self, message: Message, buffer: Tensor) -> None:
        """Take a version that another device sent."""
        raise AssertionError(f"{type(self).__name__} receives no {message.kind}")

    def content(self, message: Message) -> Tensor:
        """The buffer that a message of weights carries."""
        raise AssertionError(f"{type(self).__name__} sends no {message.kind}")

    # -- one op --------------------------------------------------------------------------------------------------------

    def enter(self, op: Op, version: int) -> Used:
        """Before a forward: the stage must have this version."""
        expected = max(version, self.first)
        if self.version[op.stage] != expected:
            raise VersionError(
                f"stage {op.stage} has version {self.version[op.stage]}, but worker {op.worker} needs {expected} in "
                f"batch {op.batch}"
            )
        return Used(expected, self.buffers[op.stage], self._counters(op.stage))

    def reenter(self, op: Op, used: Used) -> None:
        """Before the backward."""
        if self.buffers[op.stage] is not used.buffer:  # recomputation must see the old one too
            self._is_swapped = True
            self._point(op.stage, used.buffer)
        self._check(op, used)

    def leave(self, op: Op) -> None:
        """After either."""
        if self._is_swapped:
            self._is_swapped = False
            self._point(op.stage, self.buffers[op.stage])

    def _check(self, op: Op, used: Used) -> None:
        if self._counters(op.stage) != used.counters:
            raise VersionError(
                f"parameters of stage {op.stage} were changed in place between the forward and the backward of worker "
                f"{op.worker}, batch {op.batch}; change them between steps, in `with consistent_parameters()` or after "
                "`drain()`"
            )

    def _counters(self, stage: int) -> tuple[int, ...]:
        return tuple(p._version for p in self.parameters[stage])

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def show(self, stage: int, buffer: Tensor) -> None:
        """Let the module see these values for a while; `hide` ends it."""
        self._hidden[stage] = [p.data for p in self.parameters[stage]]
        self._point(stage, buffer)

    def hide(self, stage: int) -> None:
        """Let the module see what is held here again, or nothing."""
        for parameter, data in zip(self.parameters[stage], self._hidden.pop(stage), strict=True):
            parameter.data = data

    # -- memory --------------------------------------------------------------------------------------------------------

    def _point(self, stage: int, buffer: Tensor) -> None:
        for parameter, view in zip(self.parameters[stage], self.layouts[stage].views(buffer), strict=True):
            parameter.data = view

    def _free(self, stage: int) -> None:
        self.buffers[stage].untyped_storage().resize_(0)


class Replicated(Placement):
    """`replicated`: all stages on every worker; a stage's owner steps its optimizer, the others receive the result."""

    def __init__(self, stages: Sequence[nn.Module], owned: Sequence[int], optimizers: StageOptimizers) -> None:
        super().__init__(stages, range(len(stages)), optimizers)
        for stage in set(range(len(stages))) - set(owned):
            optimizers.by_stage[stage].state.clear()

    def install(self, message: Message, buffer: Tensor) -> None:
        """See Placement."""
        self.replace(message.stage, buffer)
        self.version[message.stage] = message.index

    def content(self, message: Message) -> Tensor:
        """See Placement."""
        assert self.version[message.stage] == message.index
        return self.buffers[message.stage]

    def reenter(self, op: Op, used: Used) -> None:
        """A version changes only before a forward of the same worker: see [Note: Versions by pointer swap]."""
        if self.version[op.stage] != used.version or self.buffers[op.stage] is not used.buffer:
            raise VersionError(
                f"stage {op.stage} went from version {used.version} to {self.version[op.stage]} between the forward "
                f"and the backward of worker {op.worker}, batch {op.batch}"
            )
        self._check(op, used)

    def leave(self, op: Op) -> None:
        """Nothing: parameters stay."""


def trainable(stage: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, each once."""
    return [p for p in stage.parameters() if p.requires_grad]
