"""Programs: the instructions of a device for one batch, and the messages that the instructions send.

Programs are the only source of messages. The planner counts their messages, the runtime executes them, and a receiver
learns from the sender's program which messages come and in which order. See [Note: Messages of a batch].

[Note: One message at a time]
With replicated states a staggered worker sends one message of a stage's size at a time, under every rule. Number the
beginnings of the worker's time steps from its first forward of a batch on; number 2N is number 0 of the next batch.

  gradients  That of stage j, or the total, is ready at 2N - j, so gradients leave at N + 1, ..., 2N. They do not wait:
             a total may be needed at once (`Rule.slack`).
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
3N messages in 2N time steps, so two at a time are the fewest for N > 3, and no two of them are of one kind.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

from laconic.cyclic.schedule import (
    Compute,
    Instruction,
    Message,
    Op,
    Receive,
    RunFacts,
    Schedule,
    Send,
    Square,
    Update,
)

_ENDLESS = RunFacts()


def program(schedule: Schedule, device: int, batch: int, run: RunFacts = _ENDLESS) -> list[Instruction]:
    """The instructions of a device for one batch of a run, in order."""
    compile_ = _ring_of_workers if schedule.has_device_per_worker else _stages_on_devices
    has_norm = schedule.has_norm and run.has_gradient(batch - 2)
    norm = [Receive(_norm_to(schedule, device, batch - 2))] if has_norm else []
    return [*norm, *compile_(schedule, device, batch, run)]


def messages_to(schedule: Schedule, target: int, batch: int, run: RunFacts = _ENDLESS) -> Sequence[Message]:
    """The messages that other devices send to `target` in one batch, for each sender in the order of its program."""
    return _messages_of(schedule, batch, run).get(target, ())


@lru_cache(maxsize=16)
def _messages_of(schedule: Schedule, batch: int, run: RunFacts) -> dict[int, list[Message]]:
    """The messages between devices in one batch, by the device that gets them."""
    found: dict[int, list[Message]] = {}
    for source in range(schedule.num_devices):
        for message in _sent(schedule, source, batch, run):
            if message.target != source:
                found.setdefault(message.target, []).append(message)
    return found


def messages_per_step(schedule: Schedule, batches: int) -> list[list[Message]]:
    """The messages between devices in a run that is drained after `batches` batches, by the time step of sending."""
    run = RunFacts(num_batches=batches)
    messages = [
        message
        for batch in range(batches + 2)
        for device in range(schedule.num_devices)
        for message in _sent(schedule, device, batch, run)
        if message.source != message.target
    ]
    # The last messages of the drain may leave after the last op.
    steps = max([schedule.num_steps(batches), *(message.step + 1 for message in messages)])
    by_step: list[list[Message]] = [[] for _ in range(steps)]
    for message in sorted(messages, key=lambda message: (message.source, message.target)):
        by_step[message.step].append(message)
    return by_step


def largest_burst(
    schedule: Schedule, batches: int, kinds: Sequence[str] = ("gradient", "total", "weights")
) -> tuple[int, int]:
    """The largest number of messages of these kinds that one device sends, and receives, in one time step."""
    sends, receives = 0, 0
    for messages in messages_per_step(schedule, batches):
        counted = [message for message in messages if message.kind in kinds]
        sends = max(sends, *Counter(message.source for message in counted).values(), 0)
        receives = max(receives, *Counter(message.target for message in counted).values(), 0)
    return sends, receives


def _sent(schedule: Schedule, device: int, batch: int, run: RunFacts) -> Iterator[Message]:
    for instruction in program(schedule, device, batch, run):
        if isinstance(instruction, Send):
            yield instruction.message


def _ring_of_workers(schedule: Schedule, device: int, batch: int, run: RunFacts) -> Iterator[Instruction]:
    """The program for replicated and sharded states, where worker i runs on device i."""
    computes = run.has_gradient(batch)
    if batch == 0 and computes and schedule.states == "sharded":
        yield from _first_weights(schedule, device)
    for op in schedule.ops(device, batch):
        version = schedule.rule.version_in_run(op.worker, op.stage, batch)
        if op.is_forward and device == schedule.rule.owner(op.stage) and run.has_version(version):
            yield Update(op.stage, version)
        receives, sends = _weights(schedule, op, version, run)
        yield from receives
        if not (waits := _waits(schedule, op.worker, op.stage)):
            yield from sends
        if computes:
            yield from _compute(schedule, op, version)
        if waits:
            yield from sends


def _weights(schedule: Schedule, op: Op, version: int, run: RunFacts) -> tuple[list[Receive], list[Send]]:
    """Receive a version from the previous worker in the stage's ring, and send it to the next worker."""
    receives: list[Receive] = []
    sends: list[Send] = []
    if not op.is_forward and schedule.states != "sharded":
        return receives, sends
    workers, owner, is_replicated = schedule.num_stages, schedule.rule.owner(op.stage), schedule.states == "replicated"
    previous = (op.worker - 1) % workers if version >= 0 or op.worker > 0 else owner
    following = (op.worker + 1) % workers

    def exists(message: Message) -> bool:
        return run.has_version(version) if is_replicated else run.has_gradient(message.sent_in)

    if op.worker != owner and exists(message := _hop(schedule, op, version, previous, op.worker, run)):
        receives.append(Receive(message, is_needed=is_replicated or run.has_gradient(op.batch)))
    if following != owner and exists(message := _hop(schedule, op, version, op.worker, following, run)):
        sends.append(Send(message))
    return receives, sends


def _waits(schedule: Schedule, worker: int, stage: int) -> bool:
    """Whether the worker sends the weights of a stage after its forward: see [Note: One message at a time]."""
    if schedule.states != "replicated" or not schedule.rule.is_staggered:
        return False
    last, owner, following = schedule.num_stages - 1, schedule.rule.owner, (worker + 1) % schedule.num_stages
    sends_first_gradient = worker < last or owner(0) != last
    return sends_first_gradient and all(owner(earlier) != following for earlier in range(stage))


def _hop(schedule: Schedule, op: Op, version: int, source: int, target: int, run: RunFacts = _ENDLESS) -> Message:
    """The message that brings a version of the op's stage from `source` to `target`, for their forward or backward."""
    rule, stage = schedule.rule, op.stage
    kind: Literal["weights", "rear weights"] = "weights" if op.is_forward else "rear weights"
    step_of = schedule.forward_step if op.is_forward else schedule.backward_step
    # A fresh worker uses the version in batch `version`, a stale worker in the batch after it.
    sent_in, due_in = (version if rule.is_fresh(worker, stage) else version + 1 for worker in (source, target))
    due = step_of(target, stage, due_in)
    if version == -1 and source == rule.owner(stage) and target == 0 and rule.switch[stage] < schedule.num_stages:
        early = max(due - 2, 0)  # a message of weights leaves two time steps before it is due: see _first_weights
        return Message(kind, source, target, stage, version, target, early, due, 0, due_in)
    step = step_of(source, stage, sent_in) + _waits(schedule, source, stage)
    is_last = version == run.num_batches
    return Message(kind, source, target, stage, version, target, step, due, sent_in, due_in, is_last)


def _first_weights(schedule: Schedule, device: int) -> Iterator[Instruction]:
    """Let the owner send version -1 to worker 0, if worker 0 is stale in batch 0: no earlier worker can send it on."""
    for stage, switch in enumerate(schedule.rule.switch):
        if schedule.rule.owner(stage) == device and 0 < switch < schedule.num_stages:
            for is_forward in (True, False):
                yield Send(_hop(schedule, Op(0, 0, 0, stage, 0, is_forward), -1, device, 0))


def _stages_on_devices(schedule: Schedule, device: int, batch: int, run: RunFacts) -> Iterator[Instruction]:
    """The program for shared and single states, where a device runs several workers' micro-batches."""
    last, computes = schedule.num_stages - 1, run.has_gradient(batch)
    for op in schedule.ops(device, batch):
        version = schedule.rule.version_in_run(op.worker, op.stage, batch)
        if op.is_forward and run.has_version(version) and _is_first_use(schedule, op, version):
            yield from _pass_total_on(schedule, op, version - 1)
            yield Update(op.stage, version)
        if computes:
            yield from _compute(schedule, op, version)
        if computes and not op.is_forward and op.worker == last:
            yield from _pass_total_on(schedule, op, batch)


def _is_first_use(schedule: Schedule, op: Op, version: int) -> bool:
    """Whether the device's previous micro-batch used an older version."""
    period = len(schedule.devices_of(op.stage))
    previous = op.batch * schedule.num_stages + op.worker - period
    if previous < 0:
        return version >= 0
    batch, worker = divmod(previous, schedule.num_stages)
    return version > schedule.rule.version_in_run(worker, op.stage, batch)


def _pass_total_on(schedule: Schedule, op: Op, total_batch: int) -> Iterator[Instruction]:
    """Send a batch's total on: each device of the stage sends it to the device that uses the new version next."""
    if total_batch < 0 or schedule.states == "single":
        return  # a gradient that waited when the run began is on every device of the stage
    n, devices = schedule.num_stages, schedule.devices_of(op.stage)
    completed_on = schedule.device(n - 1, op.stage, total_batch)
    if op.is_forward and op.device == completed_on:
        return
    first_use = (total_batch + 1) * n + schedule.rule.switch[op.stage]
    uses = [divmod(micro_batch, n) for micro_batch in range(first_use, first_use + len(devices))]
    by_device = {schedule.device(worker, op.stage, batch): (batch, worker) for batch, worker in uses}
    order = [completed_on, *(device for device in by_device if device != completed_on)]
    place = order.index(op.device) + 1
    if place < len(order):
        batch, worker = by_device[order[place]]
        step, due = op.step if op.is_forward else op.step + 1, schedule.forward_step(worker, op.stage, batch)
        yield Send(Message("total", op.device, order[place], op.stage, total_batch, n - 1, step, due, op.batch, batch))


def _compute(schedule: Schedule, op: Op, version: int) -> Iterator[Instruction]:
    """Run an op: receive its input from the neighbouring stage, send its output, and add up gradients over workers."""
    last = schedule.num_stages - 1
    hop = 1 if op.is_forward else -1
    if 0 <= op.stage - hop <= last:
        yield Receive(_activation(schedule, op, op.stage - hop))
    yield Compute(op, version)
    if 0 <= op.stage + hop <= last:
        yield Send(_activation(schedule, op, op.stage))
    if not op.is_forward:
        if op.worker > 0:
            yield Receive(_gradient(schedule, op.worker - 1, op.stage, op.batch))
        if op.worker == last and schedule.has_norm:
            yield from _norm(schedule, op)
        yield Send(_gradient(schedule, op.worker, op.stage, op.batch))


def _activation(schedule: Schedule, op: Op, stage: int) -> Message:
    """The output of `stage` for the next stage or, in a backward, the gradient of its input for the previous stage."""
    receiver = stage + 1 if op.is_forward else stage - 1
    source, target = (schedule.device(op.worker, j, op.batch) for j in (stage, receiver))
    step = (schedule.forward_step if op.is_forward else schedule.backward_step)(op.worker, receiver, op.batch)
    kind: Literal["activation", "activation gradient"] = "activation" if op.is_forward else "activation gradient"
    return Message(kind, source, target, stage, op.batch, op.worker, step, step, op.batch, op.batch)


def _gradient(schedule: Schedule, worker: int, stage: int, batch: int) -> Message:
    """The sum of a stage's gradients over workers 0..worker; the sum of the last worker is the total."""
    source, step = schedule.device(worker, stage, batch), schedule.backward_step(worker, stage, batch) + 1
    if worker < schedule.num_stages - 1:
        target = schedule.device(worker + 1, stage, batch)
        due = schedule.backward_step(worker + 1, stage, batch) + 1  # the next worker adds it after its own backward
        return Message("gradient", source, target, stage, batch, worker, step, due, batch, batch)
    target, due, due_in = source, step, batch
    if schedule.has_device_per_worker:
        target = schedule.rule.owner(stage)
        due_in = batch + 1 if schedule.rule.is_fresh(target, stage) else batch + 2
        due = schedule.forward_step(target, stage, due_in)
    return Message("total", source, target, stage, batch, worker, step, due, batch, due_in)


def _norm(schedule: Schedule, op: Op) -> Iterator[Instruction]:
    """Add up squares after the last worker's backward of each stage: the total of the last stage is complete first."""
    last = schedule.num_stages - 1

    def square(stage: int) -> Message:
        source, target = (schedule.device(last, j, op.batch) for j in (stage, stage - 1))
        step = schedule.backward_step(last, stage, op.batch) + 1
        return Message("square", source, target, stage, op.batch, last, step, step + 1, op.batch, op.batch)

    if op.stage < last:
        yield Receive(square(op.stage + 1))
    yield Square(op.stage)
    if op.stage > 0:
        yield Send(square(op.stage))
        return
    for device in range(schedule.num_devices):
        yield Send(_norm_to(schedule, device, op.batch))


def _norm_to(schedule: Schedule, device: int, batch: int) -> Message:
    """The global norm of a batch, which a device needs at the latest when it begins the batch after the next."""
    last = schedule.num_stages - 1
    step, due = schedule.backward_step(last, 0, batch) + 1, schedule.ops(device, batch + 2)[0].step
    return Message("norm", schedule.device(last, 0, batch), device, 0, batch, last, step, due, batch, batch + 2)
