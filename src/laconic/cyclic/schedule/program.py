"""A device's program of one batch, from the schedule's times. See [Note: Messages of a batch] in messages.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from laconic.cyclic.schedule.messages import Compute, Instruction, Message, Op, Run, Send, Square, Take, Update

if TYPE_CHECKING:
    from laconic.cyclic.schedule.schedule import Schedule


def program(schedule: Schedule, device: int, batch: int, run: Run) -> list[Instruction]:
    """What a device does in one batch of a run, in order."""
    compile_ = _stage_on_devices if schedule.states in ("single", "shared") else _ring_of_workers
    instructions = list(compile_(schedule, device, batch, run))
    if schedule.has_norm and run.has_gradient(batch - 2):
        return [Take(_norm_to(schedule, device, batch - 2)), *instructions]
    return instructions


def _compute(schedule: Schedule, op: Op, version: int) -> Iterator[Instruction]:
    """One stage's op, with what it takes from its neighbours and hands on to them."""
    return _forward(schedule, op, version) if op.is_forward else _backward(schedule, op, version)


def _forward(schedule: Schedule, op: Op, version: int) -> Iterator[Instruction]:
    if op.stage > 0:
        yield Take(_activation(schedule, op, op.stage - 1))
    yield Compute(op, version)
    if op.stage < schedule.num_stages - 1:
        yield Send(_activation(schedule, op, op.stage))


def _backward(schedule: Schedule, op: Op, version: int) -> Iterator[Instruction]:
    """And the gradients summed over this worker and those before it."""
    if op.stage < schedule.num_stages - 1:
        yield Take(_activation_gradient(schedule, op, op.stage + 1))
    yield Compute(op, version)
    if op.stage > 0:
        yield Send(_activation_gradient(schedule, op, op.stage))
    if op.worker > 0:
        yield Take(_gradient(schedule, op.worker - 1, op.stage, op.batch))
    yield from _norm(schedule, op)
    yield Send(_gradient(schedule, op.worker, op.stage, op.batch))


# -- all stages on every worker ----------------------------------------------------------------------------------------


def _ring_of_workers(schedule: Schedule, device: int, batch: int, run: Run) -> Iterator[Instruction]:
    """`replicated` and `sharded`: device i is worker i."""
    computes = run.has_gradient(batch)
    if batch == 0 and computes and schedule.states == "sharded":
        yield from _first_weights(schedule, device)
    for op in schedule.ops(device, batch):
        version = batch if schedule.rule.is_fresh(op.worker, op.stage) else batch - 1
        if op.is_forward and device == schedule.rule.owner(op.stage) and run.has_version(version):
            yield Update(op.stage, version)
        if op.is_forward or schedule.states == "sharded":
            yield from _weights(schedule, op, version, run)
        if computes:
            yield from _compute(schedule, op, version)


def _weights(schedule: Schedule, op: Op, version: int, run: Run) -> Iterator[Instruction]:
    """Take this version from the worker before in the stage's ring, and hand it on to the one after."""
    workers, owner = schedule.num_stages, schedule.rule.owner(op.stage)
    switch = schedule.rule.switch[op.stage]
    before = (op.worker - 1) % workers if version >= 0 or op.worker > 0 else owner
    after = (op.worker + 1) % workers

    def hop(source: int, target: int) -> Message:
        """From worker to worker; a worker uses the version in batch `version` if it is fresh, in the next if not."""
        is_first = version == -1 and source == owner and target == 0 and switch < workers
        used = [version if schedule.rule.is_fresh(worker, op.stage) else version + 1 for worker in (source, target)]
        step_of = schedule.forward_step if op.is_forward else schedule.backward_step
        due = step_of(target, op.stage, used[1])
        return Message(
            kind="weights" if op.is_forward else "rear weights",
            source=source,
            target=target,
            stage=op.stage,
            index=version,
            worker=target,
            step=max(due - 2, 0) if is_first else step_of(source, op.stage, used[0]),
            due=due,
            sent_in=0 if is_first else used[0],
            due_in=used[1],
        )

    def exists(message: Message) -> bool:
        if schedule.states == "replicated":
            return run.has_version(version)
        return run.has_gradient(message.sent_in)

    if op.worker != owner and exists(message := hop(before, op.worker)):
        yield Take(message, is_needed=schedule.states == "replicated" or run.has_gradient(op.batch))
    if after != owner and exists(message := hop(op.worker, after)):
        yield Send(message)


def _first_weights(schedule: Schedule, device: int) -> Iterator[Instruction]:
    """Version -1 for those that are stale in batch 0: no worker before them had it, so the owner begins the chain."""
    run = Run()
    for stage, switch in enumerate(schedule.rule.switch):
        if schedule.rule.owner(stage) != device or not 0 < switch < schedule.num_stages:
            continue
        for is_forward in (True, False):
            first = Op(0, 0, 0, stage, 0, is_forward)
            for instruction in _weights(schedule, first, -1, run):
                if isinstance(instruction, Take):
                    yield Send(instruction.message)


# -- one stage per device, or everything on one ------------------------------------------------------------------------


def _stage_on_devices(schedule: Schedule, device: int, batch: int, run: Run) -> Iterator[Instruction]:
    """`shared` and `single`: a device runs a stage's micro-batches one after the other and applies totals itself."""
    last, computes = schedule.num_stages - 1, run.has_gradient(batch)
    for op in schedule.ops(device, batch):
        version = batch if schedule.rule.is_fresh(op.worker, op.stage) else batch - 1
        if op.is_forward and run.has_version(version) and _is_new(schedule, op, version):
            yield from _pass_total_on(schedule, op, version - 1)
            yield Update(op.stage, version)
        if computes:
            yield from _compute(schedule, op, version)
        if computes and not op.is_forward and op.worker == last:
            yield from _pass_total_on(schedule, op, batch)


def _is_new(schedule: Schedule, op: Op, version: int) -> bool:
    """Whether the device's micro-batch before used an older version."""
    period = schedule.num_stages - op.stage if schedule.states == "shared" else 1
    micro_batch = op.batch * schedule.num_stages + op.worker
    before = micro_batch - period
    if before < 0:
        return version >= 0
    batch, worker = divmod(before, schedule.num_stages)
    return version > (batch if schedule.rule.is_fresh(worker, op.stage) else batch - 1)


def _users(schedule: Schedule, stage: int, total_of: int) -> list[tuple[int, int, int]]:
    """(device, worker, batch) of the first uses of the version that a total makes, one per device, in order.

    Without the device that has the total already.
    """
    n, period = schedule.num_stages, len(schedule.devices_of(stage))
    first = (total_of + 1) * n + schedule.rule.switch[stage]
    uses = [divmod(micro_batch, n) for micro_batch in range(first, first + period)]
    maker = schedule.device(n - 1, stage, total_of)
    found = [(schedule.device(worker, stage, batch), worker, batch) for batch, worker in uses]
    return [use for use in found if use[0] != maker]


def _pass_total_on(schedule: Schedule, op: Op, total_of: int) -> Iterator[Instruction]:
    """From the device that completed the total, or the one that uses it now, to the next that will."""
    if total_of < 0 or schedule.states == "single":
        return  # what was waiting when the run began is on every device of the stage
    users = _users(schedule, op.stage, total_of)
    devices = [device for device, _, _ in users]
    if op.is_forward and op.device not in devices:
        return
    place = devices.index(op.device) + 1 if op.is_forward else 0
    if place < len(users):
        device, worker, batch = users[place]
        yield Send(
            Message(
                kind="total",
                source=op.device,
                target=device,
                stage=op.stage,
                index=total_of,
                worker=schedule.num_stages - 1,
                step=op.step if op.is_forward else op.step + 1,
                due=schedule.forward_step(worker, op.stage, batch),
                sent_in=op.batch,
                due_in=batch,
            )
        )


def _norm(schedule: Schedule, op: Op) -> Iterator[Instruction]:
    """After the last worker's backward, stage by stage: the last stage's total is complete first."""
    last = schedule.num_stages - 1
    if not schedule.has_norm or op.worker != last:
        return

    def square(stage: int) -> Message:
        source, target = (schedule.device(last, j, op.batch) for j in (stage, stage - 1))
        step = schedule.backward_step(last, stage, op.batch) + 1
        return Message("square", source, target, stage, op.batch, last, step, step + 1, op.batch, op.batch)

    if op.stage < last:
        yield Take(square(op.stage + 1))
    yield Square(op.stage, op.batch)
    if op.stage > 0:
        yield Send(square(op.stage))
        return
    for device in range(schedule.num_devices):
        yield Send(_norm_to(schedule, device, op.batch))


def _norm_to(schedule: Schedule, device: int, batch: int) -> Message:
    """The global norm of a batch, which everybody has when the batch after the next begins; who updates, earlier."""
    last = schedule.num_stages - 1
    step, due = schedule.backward_step(last, 0, batch) + 1, schedule.ops(device, batch + 2)[0].step
    return Message("norm", schedule.device(last, 0, batch), device, 0, batch, last, step, due, batch, batch + 2)


# -- messages that all have --------------------------------------------------------------------------------------------


def _gradient(schedule: Schedule, worker: int, stage: int, batch: int) -> Message:
    """The sum over workers 0..worker; the last one's is the total."""
    source, last = schedule.device(worker, stage, batch), schedule.num_stages - 1
    step = schedule.backward_step(worker, stage, batch) + 1
    if worker < last:
        # It is added after the next worker's own backward.
        due, due_in = schedule.backward_step(worker + 1, stage, batch) + 1, batch
        target = schedule.device(worker + 1, stage, batch)
        return Message("gradient", source, target, stage, batch, worker, step, due, batch, due_in)
    target, due_in = source, batch
    due = step
    if schedule.states in ("replicated", "sharded"):
        target = schedule.rule.owner(stage)
        due_in = batch + 1 if schedule.rule.is_fresh(target, stage) else batch + 2
        due = schedule.forward_step(target, stage, due_in)
    return Message("total", source, target, stage, batch, worker, step, due, batch, due_in)


def _activation(schedule: Schedule, op: Op, stage: int) -> Message:
    """The output of `stage`, to the next one."""
    source, target = (schedule.device(op.worker, j, op.batch) for j in (stage, stage + 1))
    step = schedule.forward_step(op.worker, stage + 1, op.batch)
    return Message("activation", source, target, stage, op.batch, op.worker, step, step, op.batch, op.batch)


def _activation_gradient(schedule: Schedule, op: Op, stage: int) -> Message:
    """The gradient of the input of `stage`, to the one before."""
    source, target = (schedule.device(op.worker, j, op.batch) for j in (stage, stage - 1))
    step = schedule.backward_step(op.worker, stage - 1, op.batch)
    return Message("activation gradient", source, target, stage, op.batch, op.worker, step, step, op.batch, op.batch)
