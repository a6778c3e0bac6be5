"""One device running its program: see [Note: Messages of a batch] in messages.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cyclic.links import Key, Links
from laconic.cyclic.optimizers import Settings
from laconic.cyclic.placement import Placement, Used
from laconic.cyclic.report import Report
from laconic.cyclic.scaling import LossScale
from laconic.cyclic.schedule.messages import Compute, Message, Op, Run, Send, Square, Take, Update
from laconic.cyclic.schedule.schedule import Schedule

LossFn = Callable[[Any, Any], Tensor]
_LOOKAHEAD = 2  # ops ahead that receives are posted: transfers then have a whole op to hide behind


@dataclass
class _Flight:
    """One stage's forward, until its backward."""

    used: Used
    inputs: list[Tensor]
    outputs: list[Tensor]


def total_key(stage: int, batch: int, num_stages: int) -> Key:
    """Where the total of a batch arrives."""
    return "total", stage, batch, num_stages - 1


def norm_key(batch: int, num_stages: int) -> Key:
    """Where the sum of squares of a batch's gradient arrives."""
    return "norm", 0, batch, num_stages - 1


class Worker:
    """Executes programs; knows nothing of how parameters are kept or messages travel."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: LossFn,
        schedule: Schedule,
        number: int,
        links: Links,
        placement: Placement,
        baton: Baton | None,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.stages, self.loss_fn, self.schedule, self.number = stages, loss_fn, schedule, number
        self.links, self.placement, self.baton = links, placement, baton
        self.max_grad_norm, self.loss_scale = max_grad_norm, loss_scale
        self.report = Report()
        self.settings: dict[int, list[Settings]] = {}
        """Of the gradients of the run's latest batches, by batch and stage."""
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._arguments: Any = None
        """What the next op needs, or the last one made: tensors handed from stage to stage."""
        self._results: list[Tensor] = []
        self._sum: Tensor | None = None
        self._square: Tensor | None = None
        self.squares: dict[int, Tensor] = {}
        """Sums of squares of the run's latest batches, where they are needed."""
        self._losses: dict[int, Tensor] = {}

    # -- programs ------------------------------------------------------------------------------------------------------

    def run(self, batch: int, run: Run, data: Mapping[int, tuple[Any, Any]]) -> dict[int, Tensor]:
        """One batch of the run; `data` is (inputs, targets) by worker. Returns the losses known here, by worker."""
        self.links.expect(self._coming(batch, run))
        self._losses = {}
        self.report.begin_step()
        if batch == 1 and -1 in self.squares and self.loss_scale is not None:
            self.loss_scale.saw(self.squares[-1])  # of the run that was resumed
        steps = [op.step for near in (batch, batch + 1) for op in self.schedule.ops(self.number, near)]
        self.links.post(steps[1] + 2)
        if self.baton is not None:
            self.baton.begin(_batch_size(data[self.number]))
        done = 0
        for instruction in self.schedule.program(self.number, batch, run):
            match instruction:
                case Compute(op, version):
                    self.links.post(steps[min(done + _LOOKAHEAD, len(steps) - 1)] + 2)
                    if self.baton is None or self.baton.is_passed:  # else the next worker cannot ask for anything yet
                        self.links.release(op.step, batch)
                    if self.baton is not None:
                        self.baton.before_op(done)
                    self._compute(op, version, data.get(op.worker))
                    done += 1
                    if self.baton is not None:
                        self.baton.after_op(done)
                case Send(message):
                    self.report.sent(self.links.send(message, self._content(message)))
                case Take(message):
                    self._take(message)
                case Update(stage, version):
                    self._update(stage, version)
                case Square(stage):
                    self._add_square(stage)
        if self.baton is not None:
            self.baton.end(self.report.durations_s)
        return self._losses

    def pass_on(self, num_batches: int, run: Run) -> None:
        """After the last batch: let its gradients and versions reach everybody, and compute nothing."""
        last = Run(is_pending=run.is_pending, num_batches=num_batches)
        for batch in (num_batches, num_batches + 1):
            self.links.expect(self._coming(batch, last))
            for instruction in self.schedule.program(self.number, batch, last):
                match instruction:
                    case Send(message):
                        self.links.send(message, self._content(message))
                    case Take(message, is_needed):
                        if is_needed:  # of what nobody needs nothing may be left under way
                            self._take(message)
                        else:
                            self.links.take(message)
                    case Update(stage, version):
                        self._update(stage, version)
        self.links.finish()

    def _coming(self, batch: int, run: Run) -> list[Message]:
        return list(_sent_to(self.schedule, self.number, batch, run))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _content(self, message: Message) -> Any:
        """What a message that leaves now carries."""
        match message.kind:
            case "activation" | "activation gradient":
                return self._results
            case "weights" | "rear weights":
                return self.placement.content(message)
            case "square" | "norm":
                return self._square
            case "total" if message.source != message.target and self.schedule.states == "shared":
                return self.links.peek(message).clone()  # it is used here too, and must not change on its way
            case _:
                assert self._sum is not None
                return self._sum

    def _take(self, message: Message) -> None:
        if message.kind == "norm":
            square = self.square(message.index)
            if self.loss_scale is not None:
                self.loss_scale.saw(square)
            return
        arrived = self.links.take(message)
        match message.kind:
            case "activation" | "activation gradient":
                self._arguments = arrived
            case "square":
                self._square = arrived
            case "weights" | "rear weights":
                self.placement.install(message, arrived)
            case "gradient":
                assert self._sum is not None
                views = self.placement.layouts[message.stage].views
                for before, own in zip(views(arrived), views(self._sum), strict=True):
                    before.add_(own)
                self._sum = arrived

    def _update(self, stage: int, version: int) -> None:
        """Bring a stage to a version; unless it was, for a checkpoint, brought there before."""
        total = self.links.take(total_key(stage, version - 1, self.schedule.num_stages))
        if self.placement.version[stage] < version:
            self.apply(stage, total)

    def apply(self, stage: int, total: Tensor) -> None:
        """Make a stage's next version from the total gradient, which is used up."""
        batch = self.placement.version[stage]
        inverse = 1.0
        if self.loss_scale is not None:
            if not torch.isfinite(self.square(batch)):
                self.placement.version[stage] += 1  # the same values again
                return
            inverse = 1.0 / self.loss_scale.by_batch[batch]
            self._multiply(stage, total, torch.tensor(inverse, dtype=torch.float64))
        if self.max_grad_norm is not None:
            norm = self.square(batch).sqrt() * inverse
            self._multiply(stage, total, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.placement.update(stage, total, self.settings[batch][stage])

    def _multiply(self, stage: int, total: Tensor, factor: Tensor) -> None:
        for view in self.placement.layouts[stage].views(total):
            view.mul_(factor.to(view.dtype))

    def square(self, batch: int) -> Tensor:
        """The sum of squares of all stages' totals, fp64."""
        if batch not in self.squares:
            arrived = self.links.take(norm_key(batch, self.schedule.num_stages))
            self.squares[batch] = arrived.view(torch.float64)[0]
            self.squares.pop(batch - 4, None)
        return self.squares[batch]

    def _add_square(self, stage: int) -> None:
        assert self._sum is not None
        views = self.placement.layouts[stage].views(self._sum)
        square = torch.stack([view.double().square().sum() for view in views]).sum()
        if stage < self.schedule.num_stages - 1:
            assert self._square is not None
            square = self._square.view(torch.float64)[0] + square
        self._square = square.view(1).view(torch.uint8)

    # -- computation ---------------------------------------------------------------------------------------------------

    def _compute(self, op: Op, version: int, data: tuple[Any, Any] | None) -> None:
        wait_s, self.links.waited_s = self.links.waited_s, 0.0
        start = time.perf_counter()
        if self.loss_scale is not None:
            self.loss_scale.use(op.batch)
        if op.is_forward:
            self.report.live(+1)
            self._forward(op, version, data)
        else:
            self._backward(op)
            self.report.live(-1)
        self.placement.leave(op)
        self.report.op(duration_s=time.perf_counter() - start, wait_s=wait_s)

    def _forward(self, op: Op, version: int, data: tuple[Any, Any] | None) -> None:
        used = self.placement.enter(op, version)
        if op.stage == 0:
            assert data is not None
            inputs = _as_list(data[0], "the inputs of a batch")
        else:
            inputs, self._arguments = self._arguments, None
        output = self.stages[op.stage](*inputs)
        if op.stage == self.schedule.num_stages - 1:
            assert data is not None
            output = _scalar(self.loss_fn(output, data[1]))
            self._losses[op.worker] = output.detach()
            if self.loss_scale is not None:
                output = output * self.loss_scale.scale
        outputs = _as_list(output, f"the output of stage {op.stage}")
        self._flights[op.worker, op.stage] = _Flight(used, inputs, outputs)
        self._results = [t.detach().requires_grad_(t.requires_grad) for t in outputs]

    def _backward(self, op: Op) -> None:
        flight = self._flights.pop((op.worker, op.stage))
        self.placement.reenter(op, flight.used)
        outputs = [t for t in flight.outputs if t.requires_grad]
        gradients, self._arguments = self._arguments, None
        parameters = self.placement.parameters[op.stage]
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(outputs, gradients)
        self._results = [_gradient(t) for t in flight.inputs if t.requires_grad]
        self._sum = self.placement.layouts[op.stage].empty(self.placement.device)
        for view, parameter in zip(self.placement.layouts[op.stage].views(self._sum), parameters, strict=True):
            if parameter.grad is not None:  # a parameter without a part in this batch has a gradient of zero
                torch.div(parameter.grad, self.schedule.num_stages, out=view)
                parameter.grad = None


class Baton:
    """Makes workers begin one after the other: each may start a batch when the one before has done its share of it.

    The share is 1/N of the time of a batch, times `stagger`; at first, when times are not known, and where the host
    runs ahead of the device, two ops of 2N. The word that is passed is the size of the batch, which must be equal.

    Without stagger (`dp`) the word is passed at once, and read when it does not hold anybody up.
    """

    def __init__(self, links: Links, number: int, count: int, stagger: float, *, measures: bool) -> None:
        self._links, self._number, self._count = links, number, count
        self._stagger, self._measures = stagger, measures
        self._after = round(2 * stagger)
        self._durations_s: list[float] = []
        self._size = 0
        self.is_passed = True
        """Whether the next worker may run; until then nothing must be awaited from it."""
        self._wait: Callable[[], int] | None = None

    def begin(self, size: int) -> None:
        """A batch of this size is to be computed."""
        self._size, self.is_passed = size, self._number == self._count - 1
        self._wait = self._links.ask_baton() if self._number > 0 else None
        self._pass_if_due(0)

    def before_op(self, done: int) -> None:
        """Wait for one's turn."""
        if done == (0 if self._stagger else self._count) and self._wait is not None:
            self._receive(self._wait)

    def after_op(self, done: int) -> None:
        """Let the next one begin, if it is time."""
        self._pass_if_due(done)

    def end(self, durations_s: Sequence[float]) -> None:
        """Choose the op after which the next batch's baton is passed."""
        if not (self._measures and self._stagger):
            return
        before = self._durations_s or durations_s
        self._durations_s = [(old + new) / 2 for old, new in zip(before, durations_s, strict=True)]
        share, spent = self._stagger * sum(self._durations_s) / self._count, 0.0
        for done, duration_s in enumerate(self._durations_s):
            if spent + duration_s / 2 >= share:
                self._after = min(max(done, 1), self._count + 1)
                return
            spent += duration_s

    def _pass_if_due(self, done: int) -> None:
        if not self.is_passed and done >= self._after:
            self.is_passed = True
            self._links.pass_baton(self._size)

    def _receive(self, wait: Callable[[], int]) -> None:
        self._wait = None
        theirs = wait()
        if theirs != self._size:
            raise ValueError(
                f"worker {self._number} has a batch of {self._size}, but worker {self._number - 1} one of {theirs}; "
                "gradients are averaged over workers with equal weight, so give all workers batches of equal size"
            )


@lru_cache(maxsize=64)
def _sent_to(schedule: Schedule, target: int, batch: int, run: Run) -> tuple[Message, ...]:
    return tuple(
        instruction.message
        for source in range(schedule.num_devices)
        if source != target
        for instruction in schedule.program(source, batch, run)
        if isinstance(instruction, Send) and instruction.message.target == target
    )


def _batch_size(data: tuple[Any, Any]) -> int:
    inputs = _as_list(data[0], "the inputs of a batch")
    return inputs[0].shape[0] if inputs and inputs[0].ndim else 1


def _as_list(value: Any, what: str) -> list[Tensor]:
    values = [value] if isinstance(value, Tensor) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(v, Tensor) for v in values):
        raise ValueError(f"{what} must be a tensor or a tuple of tensors, got {type(value).__name__}")
    return list(values)


def _scalar(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"loss_fn must return a scalar tensor that depends on the parameters, got {loss!r:.80}; return the mean "
            "over the micro-batch"
        )
    return loss


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
