"""Programs: the instructions of a device for one batch, and the messages that the instructions send.

Programs are the only source of messages. The runtime executes them, and a receiver learns from the sender's program
which messages come, in which order, and what they are. Its own program says only when it needs which content.

[Note: Messages of a batch]
There are N workers and N stages; s_j is the switch of stage j under the rule. A batch sends these messages:

  gradient      The gradient of stage j, summed over workers 0..i. Worker i sends it to worker i + 1 after its backward.
  total         The sum over all workers. The last worker sends it to the devices that step the stage's optimizer.
  weights       One version of a stage's parameters. It travels along a ring of workers, from the stage's owner, worker
                s_j mod N. Each worker uses it two time steps after the previous worker, and sends it on before its
                forward or after it: [Note: One message at a time].
  rear weights  The same version once more for the backward, if workers do not keep parameters after the forward. With
                cache="host" a worker keeps them, in host memory, and this message is never sent.
  activation, activation gradient
                The output of a stage, and the gradient of its input, between stages on different devices.
  square        The sum of squares of the totals of stages j..N-1. It travels from the last stage to the first.
  norm          The sum of squares over all stages, for every device. Square and norm are sent if updates need the norm.
  baton         Worker i + 1 may begin the batch. It leaves in the middle of the program: [Note: Baton] in links.py.

states        parameters                 optimizer state   total goes to              other devices get a version by
replicated    all stages, every worker   owner             owner                      weights
sharded       owner                      owner             owner                      weights and rear weights
shared        one stage per device       every device      every device of the stage  applying the total themselves
single        one device                 that device       that device                -

A run begins with batch 0. Version t of a stage contains the gradients of batches 0..t-1 of the run. Stale workers use
version t - 1 in batch t, hence version -1 in batch 0. If the run was resumed while a gradient waited to be applied,
version -1 lacks that gradient and version 0 contains it. In every other run the two versions are equal.

[Note: One message at a time]
With replicated states a staggered worker sends one message of a stage's size at a time, under every rule. Number the
beginnings of the worker's time steps from its first forward of a batch on; number 2N is number 0 of the next batch.

  gradients  That of stage j, or the total, is ready at 2N - j, so gradients leave at N + 1, ..., 2N. They do not wait:
             a total may be needed at once.
  weights    Those of stage j are ready at j, before the worker's own forward. The next worker in the ring needs them at
             j + 2 under every rule, so they have one time step to spare.

If weights left when they are ready, number 0 would have two messages, the gradient and the weights of stage 0, and
number N none. So weights wait for one time step where another message leaves: those of stage 0 for its gradient, those
of stage j for the weights of stage j - 1 that have waited. This ends at a stage whose weights the worker does not send,
because the next worker owns it, or else at number N, which is free. If a worker sends the weights of all stages, its 2N
messages have 2N places. Only the weights of stage N - 1 can leave at N, then only those of stage N - 2 at N - 1, and so
on. In the end one choice is left: the gradient of stage 0 could wait instead of its weights, if it is not a total.

Weights that wait have one time step to arrive instead of two. No op is delayed as long as a message takes less than a
time step. If messages take longer, 2N of them do not fit into 2N time steps in any order.

Other schedules do not wait. Plain data parallelism needs the weights at once. With sharded states a worker sends about
3N messages in 2N time steps, so two at a time are the fewest for N > 3, and no two of them are of one kind. With
cache="host" they are 2N too, but a worker that keeps no copy of the weights cannot send them later than it frees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from laconic.cyclic.schedule import Op, Schedule

MessageKind = Literal[
    "gradient", "total", "weights", "rear weights", "activation", "activation gradient", "square", "norm", "baton"
]
Key = tuple[str, int, int, int]
"""The kind, stage, index and worker of a `Message`, which name its content at the receiver."""


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer from one device to another, or a value that a device keeps for itself if both are the same."""

    kind: MessageKind
    source: int
    target: int
    stage: int
    index: int
    """The version, for weights and rear weights. The batch of the gradient, for all other kinds."""
    worker: int
    """The worker whose activation is sent, the last worker of a sum of gradients, or the worker that uses weights."""
    due: int
    """The time step at whose beginning the receiver needs it."""
    due_in: int
    """The receiver's batch when it needs the message."""
    is_last: bool = False
    """Whether it brings weights of the last version of a run, which is known once the run is drained."""

    @property
    def key(self) -> Key:
        """The name of the content at the receiver."""
        return self.kind, self.stage, self.index, self.worker

    def __str__(self) -> str:
        stage = "" if self.kind in ("norm", "baton") else f" of stage {self.stage}"
        return f"the {self.kind}{stage} between devices {self.source} and {self.target}"


class Compute(NamedTuple):
    """Run the op with this version of its stage."""

    op: Op
    version: int


class Receive(NamedTuple):
    """Wait for the message of this key and use it, if one comes."""

    key: Key


class Send(NamedTuple):
    """Start to send the message, without waiting for the receiver."""

    message: Message


class Update(NamedTuple):
    """Apply the total of batch `version - 1` to the stage, unless the stage has this version already."""

    stage: int
    version: int


class Square(NamedTuple):
    """Add the squares of this stage's total, which is now complete, to the squares of later stages."""

    stage: int


Instruction = Compute | Receive | Send | Update | Square


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run on which its programs depend."""

    is_pending: bool = False
    """Whether a gradient waited to be applied when the run began."""
    num_batches: int | None = None
    """The number of batches, known once the run is drained. Programs of later batches only pass messages on."""

    def has_gradient(self, batch: int) -> bool:
        """Whether the run computes this batch."""
        return batch >= 0 and (self.num_batches is None or batch < self.num_batches)

    def has_version(self, version: int) -> bool:
        """Whether the run makes this version, and it differs from the version before."""
        first = 0 if self.is_pending else 1
        return version >= first and (self.num_batches is None or version <= self.num_batches)


_ENDLESS = RunFacts()


def messages_to(schedule: Schedule, target: int, batch: int, run: RunFacts = _ENDLESS) -> list[Message]:
    """The messages that other devices send to `target` in one batch, for each sender in the order of its program."""
    return [
        instruction.message
        for source in range(schedule.num_devices)
        for instruction in program(schedule, source, batch, run)
        if isinstance(instruction, Send) and instruction.message.target == target != source
    ]


def program(schedule: Schedule, device: int, batch: int, run: RunFacts = _ENDLESS) -> Iterator[Instruction]:
    """Yield the instructions of a device for one batch of a run, in order."""
    computes = run.has_gradient(batch)
    if batch == 0 and computes and schedule.states == "sharded":
        yield from _first_weights(schedule, device)
    for op in schedule.ops(device, batch):
        version = schedule.rule.version_in_run(op.worker, op.stage, batch)
        if run.has_version(version) and _makes(schedule, op, version):
            yield from _pass_total_on(schedule, op, version - 1)
            yield Update(op.stage, version)
        if schedule.has_device_per_worker and (computes or schedule.states == "replicated"):
            yield Receive(("weights" if op.is_forward else "rear weights", op.stage, version, op.worker))
        sends, waits = _weights(schedule, op, version, run), _waits(schedule, op.worker, op.stage)
        if not waits:
            yield from sends
        if computes:
            yield from _compute(schedule, op, version)
        if waits:
            yield from sends
    if schedule.has_norm and run.has_gradient(batch - 2):
        yield Receive(norm_key(schedule, batch - 2))  # the device has made all versions that need it


def norm_key(schedule: Schedule, batch: int) -> Key:
    """The key of the squared global norm of a batch's gradient."""
    return "norm", 0, batch, schedule.num_stages - 1


def _makes(schedule: Schedule, op: Op, version: int) -> bool:
    """Whether the op is the first on its device to use a version that the device makes itself."""
    if not op.is_forward or op.device not in schedule.updaters(op.stage):
        return False
    # The micro-batch before on this device; before the run, it is one that would have used an older version.
    previous = op.batch * schedule.num_stages + op.worker - len(schedule.devices_of(op.stage))
    batch, worker = divmod(previous, schedule.num_stages)
    return version > schedule.rule.version_in_run(worker, op.stage, batch)


# -- weights: rings of workers -----------------------------------------------------------------------------------------


def _weights(schedule: Schedule, op: Op, version: int, run: RunFacts) -> list[Send]:
    """Send a version on to the next worker in the stage's ring, which ends before the owner."""
    following = (op.worker + 1) % schedule.num_stages
    if schedule.states == "replicated":
        crosses = op.is_forward and run.has_version(version)
    else:
        is_needed = op.is_forward or schedule.cache == "none"
        crosses = schedule.states == "sharded" and is_needed and run.has_gradient(op.batch)
    is_sent = crosses and following != schedule.rule.owner(op.stage)
    return [Send(_hop(schedule, op, version, following, run))] if is_sent else []


def _waits(schedule: Schedule, worker: int, stage: int) -> bool:
    """Whether the worker sends the weights of a stage after its forward: see [Note: One message at a time]."""
    if schedule.states != "replicated" or not schedule.rule.is_staggered:
        return False
    last, owner, following = schedule.num_stages - 1, schedule.rule.owner, (worker + 1) % schedule.num_stages
    sends_first_gradient = worker < last or owner(0) != last
    return sends_first_gradient and all(owner(earlier) != following for earlier in range(stage))


def _hop(schedule: Schedule, op: Op, version: int, target: int, run: RunFacts = _ENDLESS) -> Message:
    """The message that brings a version of the op's stage from its device to `target`, for a forward or backward."""
    kind: Literal["weights", "rear weights"] = "weights" if op.is_forward else "rear weights"
    due_in = schedule.rule.batch_of_version(target, op.stage, version)
    due = schedule.step(target, op.stage, due_in, is_forward=op.is_forward)
    return Message(kind, op.device, target, op.stage, version, target, due, due_in, version == run.num_batches)


def _first_weights(schedule: Schedule, device: int) -> Iterator[Instruction]:
    """Let the owner send version -1 to worker 0, if worker 0 is stale in batch 0: no earlier worker can send it on."""
    for stage, switch in enumerate(schedule.rule.switch):
        if schedule.rule.owner(stage) == device and 0 < switch < schedule.num_stages:
            for is_forward in (True, False) if schedule.cache == "none" else (True,):
                yield Send(_hop(schedule, Op(0, 0, device, stage, 0, is_forward), -1, 0))


# -- gradients and activations -----------------------------------------------------------------------------------------


def _compute(schedule: Schedule, op: Op, version: int) -> Iterator[Instruction]:
    """Run an op: receive its input from the neighbouring stage, send its output, and add up gradients over workers."""
    last, hop = schedule.num_stages - 1, 1 if op.is_forward else -1
    kind: Literal["activation", "activation gradient"] = "activation" if op.is_forward else "activation gradient"
    if 0 <= op.stage - hop <= last:
        yield Receive((kind, op.stage - hop, op.batch, op.worker))
    yield Compute(op, version)
    if 0 <= op.stage + hop <= last:
        target = schedule.device(op.worker, op.stage + hop, op.batch)
        due = schedule.step(op.worker, op.stage + hop, op.batch, is_forward=op.is_forward)
        yield Send(Message(kind, op.device, target, op.stage, op.batch, op.worker, due, op.batch))
    if op.is_forward:
        return
    if op.worker > 0:
        yield Receive(("gradient", op.stage, op.batch, op.worker - 1))
    if op.worker == last and schedule.has_norm:
        yield from _norm(schedule, op)
    yield Send(_gradient(schedule, op))
    if op.worker == last:
        yield from _pass_total_on(schedule, op, op.batch)


def _gradient(schedule: Schedule, op: Op) -> Message:
    """The sum of a stage's gradients over workers 0..op.worker; the sum of the last worker is the total."""
    kind: MessageKind
    if op.worker < schedule.num_stages - 1:
        kind, target, due_in = "gradient", schedule.device(op.worker + 1, op.stage, op.batch), op.batch
        # The next worker adds it after its own backward.
        due = schedule.step(op.worker + 1, op.stage, op.batch, is_forward=False) + 1
    elif schedule.has_device_per_worker:
        kind, target = "total", schedule.rule.owner(op.stage)
        due_in = schedule.rule.batch_of_version(target, op.stage, op.batch + 1)
        due = schedule.step(target, op.stage, due_in)
    else:
        kind, target, due, due_in = "total", op.device, op.step + 1, op.batch  # it is passed on from here
    return Message(kind, op.device, target, op.stage, op.batch, op.worker, due, due_in)


def _pass_total_on(schedule: Schedule, op: Op, total_batch: int) -> Iterator[Instruction]:
    """Send a batch's total on: each device of a shared stage sends it to the one that uses the new version next."""
    if total_batch < 0 or schedule.states != "shared":
        return  # a gradient that waited when the run began is on every device of the stage
    n, count = schedule.num_stages, len(schedule.devices_of(op.stage))
    completed_on = schedule.device(n - 1, op.stage, total_batch)
    if op.is_forward and op.device == completed_on:
        return
    first_use = (total_batch + 1) * n + schedule.rule.switch[op.stage]
    uses = [divmod(micro_batch, n) for micro_batch in range(first_use, first_use + count)]
    by_device = {schedule.device(worker, op.stage, batch): (batch, worker) for batch, worker in uses}
    order = [completed_on, *(device for device in by_device if device != completed_on)]
    if op.device != order[-1]:
        target = order[order.index(op.device) + 1]
        batch, worker = by_device[target]
        due = schedule.step(worker, op.stage, batch)
        yield Send(Message("total", op.device, target, op.stage, total_batch, n - 1, due, batch))


def _norm(schedule: Schedule, op: Op) -> Iterator[Instruction]:
    """Add up squares after the last worker's backward of each stage: the total of the last stage is complete first."""
    last, batch = schedule.num_stages - 1, op.batch
    if op.stage < last:
        yield Receive(("square", op.stage + 1, batch, last))
    yield Square(op.stage)
    if op.stage > 0:
        target, due = schedule.device(last, op.stage - 1, batch), op.step + 2
        yield Send(Message("square", op.device, target, op.stage, batch, last, due, batch))
        return
    for device in range(schedule.num_devices):  # each needs the norm when it begins the batch after the next, or before
        due = schedule.ops(device, batch + 2)[0].step
        yield Send(Message("norm", op.device, device, 0, batch, last, due, batch + 2))
