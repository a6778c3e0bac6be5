"""The execution of the programs of one device. See [Note: Messages of a batch] in program.py."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.cyclic.coding import RingWire
from laconic.cyclic.links import Baton, Links
from laconic.cyclic.meter import Report
from laconic.cyclic.optimizers import Settings
from laconic.cyclic.placement import PlacedStages, UsedVersion
from laconic.cyclic.program import (
    Compute,
    Instruction,
    Key,
    Message,
    Receive,
    RunFacts,
    Send,
    Square,
    Update,
    messages_to,
    norm_key,
    program,
)
from laconic.cyclic.schedule import Op, Schedule
from laconic.cyclic.stages import as_part_of, gradient_part
from laconic.ragged.dtensor import whole_of

LossFn = Callable[[Any, Any], Tensor]
MicroBatch = tuple[Any, Any]  # inputs and targets
LOOKAHEAD = 2
"""Receives are posted this many ops ahead, so that a transfer has a whole op to finish."""
DUE_WITH_OP = 2
"""An op needs the messages that are due at its time step and, to add up gradients, at the next one."""
_KEPT_BATCHES = 4
"""Hyper-parameters of this many batches are kept."""


@dataclass(kw_only=True)
class Worker:
    """The state of the device `number` within and between batches, and the execution of its programs."""

    stages: Sequence[nn.Module]
    """All stages of the model. The schedule decides which of them this device runs."""
    loss_fn: LossFn
    schedule: Schedule
    number: int
    links: Links
    placement: PlacedStages
    wire: RingWire
    baton: Baton
    max_grad_norm: float | None
    report: Report = field(default_factory=Report)
    run: RunFacts = field(default_factory=RunFacts)
    batch: int = 0
    """The batch of the run that comes next."""
    num_batches: int = 0
    """The number of batches trained, over all runs."""
    settings: dict[int, list[Settings]] = field(default_factory=dict)
    """The hyper-parameters of the run's latest batches, by batch and stage."""
    _pending: dict[tuple[int, int], tuple[UsedVersion, list[Tensor], list[Tensor]]] = field(default_factory=dict)
    """The version, inputs and outputs of the forwards whose backward has not run, by worker and stage."""
    _received: list[Tensor] = field(default_factory=list)  # from the neighbouring stage, for the next op
    _produced: list[Tensor] = field(default_factory=list)  # by the last op, for the neighbouring stage
    _losses: list[Tensor] = field(default_factory=list)
    _sum: Tensor | None = None  # the gradient of the last backward's stage, summed over workers
    _square: Tensor | None = None  # the sum of squares over stages

    def step(self, data: Mapping[int, MicroBatch]) -> list[Tensor]:
        """Train one batch. `data` has the micro-batches of workers; returns the losses that are computed here."""
        batch, number = self.batch, self.number
        if batch == 0:
            self.placement.begin_first_batch()
        self.settings[batch] = self.placement.optimizers.settings()
        self.settings.pop(batch - _KEPT_BATCHES, None)
        self.links.expect(messages_to(self.schedule, number, batch, self.run))
        self._losses = []
        report = self.report
        report.bytes_per_step, report.durations_s, report.waits_s = [0], [], []
        steps = [op.step for near in (batch, batch + 1) for op in self.schedule.ops(number, near)]
        self.links.post(steps[1] + DUE_WITH_OP)
        self.baton.begin(batch, _num_rows(next(iter(data.values()))))
        done = 0
        for instruction in program(self.schedule, number, batch, self.run):
            if not isinstance(instruction, Compute):
                report.bytes_per_step[-1] += self._exchange(instruction)
                continue
            self.links.post(steps[min(done + LOOKAHEAD, len(steps) - 1)] + DUE_WITH_OP)
            if self.baton.is_passed:  # otherwise the next worker cannot receive anything yet
                self.links.release(instruction.op.step, batch)
            self.baton.before_op(done)
            self._compute(instruction.op, instruction.version, data.get(instruction.op.worker))
            done += 1
            self.baton.after_op(done)
        # On other devices an op runs after the host has measured it; other ranks of a worker measure other times.
        if self.placement.device.type == "cpu" and not self.placement.has_peers:
            self.baton.end(report.durations_s)
        self.batch += 1
        self.num_batches += 1
        self.placement.optimizers.step()
        return self._losses

    def drain(self) -> None:
        """Exchange and apply the last gradients of the run, without another batch, and begin a new run."""
        last = RunFacts(is_pending=self.run.is_pending, num_batches=self.batch)
        for batch in (self.batch, self.batch + 1):
            self.links.expect(messages_to(self.schedule, self.number, batch, last))
            for instruction in program(self.schedule, self.number, batch, last):
                self._exchange(instruction)
        self.links.finish()
        self.placement.end_run()
        self.begin_run(is_pending=False)

    def begin_run(self, *, is_pending: bool) -> None:
        """Begin a run; `is_pending` says whether a gradient waits to be applied."""
        self.run, self.batch = RunFacts(is_pending=is_pending), 0
        self.settings.clear()
        self.wire.versions_before = self.num_batches
        self.placement.begin_run(is_pending=is_pending)

    def total_key(self, stage: int, batch: int) -> Key:
        """The key of a batch's total gradient on the devices that apply it."""
        return "total", stage, batch, self.schedule.num_stages - 1

    def total(self, stage: int, batch: int, *, stays: bool = True) -> Tensor:
        """A buffer with the total gradient of a stage, a new one if the total stays here. Waits for its message."""
        key, coding = self.total_key(stage, batch), self.wire.coding_of_total(stage, batch)
        content = self.links.peek(key) if stays else self.links.take(key)
        if coding is not None:
            return coding.decode(content)
        return content.clone() if stays else content

    def _exchange(self, instruction: Instruction) -> int:
        """Execute an instruction other than Compute; return the number of bytes sent."""
        match instruction:
            case Send(message):
                return self.links.send(message, self._content(message))
            case Receive(key):
                if (found := self.links.receive(key)) is not None:
                    self._receive(*found)
            case Update(stage, version):
                total = self.total(stage, version - 1, stays=False)
                if self.placement.version[stage] < version:  # a snapshot may have applied the total already
                    self.apply(stage, total)
            case Square(stage):
                self._add_square(stage)
        return 0

    def _content(self, message: Message) -> Any:
        match message.kind:
            case "activation" | "activation gradient":
                return self._produced
            case "weights" | "rear weights":
                return self.placement.content(message)
            case "square" | "norm":
                return self._square
            case "total" if message.source != message.target and self.schedule.states == "shared":
                return self.links.peek(message.key).clone()  # `apply` will overwrite this device's own total
            case _:
                assert self._sum is not None
                return self.wire.encode_sum(message, self._sum)

    def _receive(self, message: Message, content: Any) -> None:
        match message.kind:
            case "activation" | "activation gradient":
                self._received = content
            case "square":
                self._square = content
            case "weights" | "rear weights":
                self.placement.install(message, content)
            case "gradient":
                assert self._sum is not None
                views, coding = self.placement.layouts[message.stage].views, self.wire.coding_of(message)
                content = content if coding is None else coding.decode(content)
                for sum_before, own in zip(views(content), views(self._sum), strict=True):
                    sum_before.add_(own)
                self._sum = content

    def apply(self, stage: int, total: Tensor) -> None:
        """Make the next version of a stage from its total gradient. Overwrites `total`."""
        batch = self.placement.version[stage]
        if self.max_grad_norm is not None:
            norm = self.square(batch).sqrt()
            factor = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for view in self.placement.layouts[stage].views(total):
                view.mul_(factor.to(view.dtype))
        self.placement.update(stage, total, self.settings[batch][stage])

    def square(self, batch: int) -> Tensor:
        """The squared global norm of a batch's gradient, a scalar of float64. Waits for the message that brings it."""
        return self.links.peek(norm_key(self.schedule, batch)).view(torch.float64)[0]

    def _add_square(self, stage: int) -> None:
        assert self._sum is not None
        views, parameters = self.placement.layouts[stage].views(self._sum), self.placement.parameters[stage]
        parts = [as_part_of(*pair) for pair in zip(parameters, views, strict=True)]
        squares = [part.double().square().sum() for part in parts]
        square = torch.stack([whole_of(s) if isinstance(s, DTensor) else s for s in squares]).sum()
        if stage < self.schedule.num_stages - 1:
            assert self._square is not None
            square = self._square.view(torch.float64)[0] + square
        self._square = square.view(1).view(torch.uint8)

    def _compute(self, op: Op, version: int, data: MicroBatch | None) -> None:
        self.report.waits_s.append(self.links.waited_s)
        self.links.waited_s, start = 0.0, time.perf_counter()
        if op.is_forward:
            self.report.add_live(+1)
            used = self._forward(op, version, data)
        else:
            used = self._backward(op)
            self.report.add_live(-1)
        self.placement.leave(op, used)
        self.report.durations_s.append(time.perf_counter() - start)
        self.report.bytes_per_step.append(0)

    def _forward(self, op: Op, version: int, data: MicroBatch | None) -> UsedVersion:
        used = self.placement.enter_forward(op, version)
        inputs, self._received = self._received, []
        if op.stage == 0:
            assert data is not None
            inputs = _as_list(data[0], "the inputs of a batch")
        output = self.stages[op.stage](*inputs)
        if op.stage == self.schedule.num_stages - 1:
            assert data is not None
            output = _checked_loss(self.loss_fn(output, data[1]))
            self._losses.append(output.detach())
        outputs = _as_list(output, f"the output of stage {op.stage}")
        self._pending[op.worker, op.stage] = used, inputs, outputs
        self._produced = [t.detach().requires_grad_(t.requires_grad) for t in outputs]
        return used

    def _backward(self, op: Op) -> UsedVersion:
        used, inputs, outputs = self._pending.pop((op.worker, op.stage))
        self.placement.enter_backward(op, used)
        gradients, self._received = self._received or None, []
        parameters, layout = self.placement.parameters[op.stage], self.placement.layouts[op.stage]
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward([t for t in outputs if t.requires_grad], gradients)
        self._produced = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs if t.requires_grad]
        self._sum = layout.empty(self.placement.device)
        for view, parameter in zip(layout.views(self._sum), parameters, strict=True):
            if (part := gradient_part(parameter)) is not None:  # a batch that does not use it leaves a gradient of zero
                torch.div(part, self.schedule.num_stages, out=view)
                parameter.grad = None
        return used


def _num_rows(data: MicroBatch) -> int:
    inputs = _as_list(data[0], "the inputs of a batch")
    return inputs[0].shape[0] if inputs and inputs[0].ndim else 1


def _as_list(value: Any, name: str) -> list[Tensor]:
    values = [value] if isinstance(value, Tensor) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(v, Tensor) for v in values):
        raise ValueError(f"{name} must be a tensor or a tuple of tensors, got {type(value).__name__}")
    return list(values)


def _checked_loss(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"loss_fn must return a scalar tensor that depends on the parameters, got {loss!r:.80}; return the mean "
            "over the micro-batch"
        )
    return loss
