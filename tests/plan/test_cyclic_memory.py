"""The planned buffers of every device of the cyclic schedule against those of a real run, op by op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from laconic.cyclic.links import ByteLayout, Links
from laconic.cyclic.placement import Placement
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Op, Rule, Schedule, StatePlacement
from laconic.cyclic.stage import trainable
from laconic.cyclic.worker import Worker
from laconic.plan.cyclic_memory import DeviceMemory, messages_by_target
from laconic.plan.cyclic_stages import PlannedStage, Stages
from laconic.plan.machine import Simulator
from laconic.plan.optimizer_cost import OptimizerCost
from laconic.plan.phase import Phase
from tests.cyclic.toys import OPTIMIZERS, WIDTH, make_stages, train
from tests.plan.traces import cluster
from tests.support.launch import run_ranks

BATCHES = 4
ROWS = 4
HIDDEN_BYTES, MASK_BYTES = ROWS * WIDTH * 4, 32  # 24 bytes of mask end at a multiple of 16
NOTHING = Phase(work=(), peak_bytes=0, end_bytes=0)


class Buffers:
    """The buffers of messages and of versions that are alive in this process."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self.by_op: list[int] = []

    def add(self, buffer: Tensor) -> Tensor:
        storage = buffer.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)
        return buffer

    def note(self) -> None:
        """Sum up what is alive when an op begins."""
        alive = [each.cdata for each in self._storages.values() if not each.expired()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in alive]
        self.by_op.append(sum(storage.nbytes() for storage in storages if storage is not None))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the places where buffers are made."""
        empty, receive, update = ByteLayout.empty, Links._receive, Placement.update
        content, compute = Worker._content, Worker._compute

        def receiving(links: Links, *args: Any) -> Any:
            transfer = receive(links, *args)
            self.add(transfer.buffers[0])
            return transfer

        def updating(placement: Placement, stage: int, *args: Any) -> None:
            update(placement, stage, *args)
            self.add(placement.buffers[stage])

        def sending(worker: Worker, message: Any) -> Any:
            found = content(worker, message)
            return self.add(found) if message.kind == "total" else found

        def computing(worker: Worker, *args: Any) -> None:
            self.note()
            compute(worker, *args)

        with (
            mock.patch.object(ByteLayout, "empty", lambda layout, device: self.add(empty(layout, device))),
            mock.patch.object(Links, "_receive", receiving),
            mock.patch.object(Placement, "update", updating),
            mock.patch.object(Worker, "_content", sending),
            mock.patch.object(Worker, "_compute", computing),
        ):
            yield


def job_alive(states: StatePlacement, count: int, rule: str) -> list[int]:
    """The bytes of the buffers that are alive when each op of the last batch begins."""
    mesh, buffers = init_device_mesh("cpu", (dist.get_world_size(),)), Buffers()
    with buffers.watched():
        run = CyclicDataParallel(
            make_stages(count),
            nn.functional.cross_entropy,
            OPTIMIZERS["sgd"],
            mesh,
            rule=rule,
            states=states,
            stagger=0,
        )
        worker = None if states == "shared" else dist.get_rank()
        train(run, range(BATCHES - 1), worker)
        buffers.by_op.clear()
        train(run, range(BATCHES - 1, BATCHES), worker)
        run.close()
    return buffers.by_op


@dataclass(kw_only=True)
class Watched(DeviceMemory):
    """The planned device, which notes its buffers when an op begins."""

    by_op: list[float] = field(default_factory=list)

    def forward(self, op: Op) -> None:
        self._note()
        super().forward(op)

    def backward(self, op: Op) -> None:
        self._note()
        super().backward(op)

    def _note(self) -> None:
        self.by_op.append(sum(self.machine.held[kind] for kind in ("parameters", "gradients", "transfers")))


def planned(states: StatePlacement, count: int, rule: str) -> list[list[int]]:
    stages = Stages(
        stages=tuple(
            PlannedStage(
                forward=(NOTHING,), backward=(NOTHING,), forward_s=0.0, backward_s=0.0, update_s=0.0, frozen_bytes=0,
                message_bytes=ByteLayout(trainable(stage).values()).num_bytes, update=OptimizerCost(phase=NOTHING),
            )
            for stage in make_stages(count)
        ),
        activation_bytes=2 * HIDDEN_BYTES + MASK_BYTES,
        activation_gradient_bytes=2 * HIDDEN_BYTES,
    )  # fmt: skip
    schedule = Schedule(Rule.named(rule, count), states)
    devices = [
        Watched(
            machine=Simulator(cluster(), device_type="cpu"), schedule=schedule, stages=stages,
            number=number, pass_after=0,
        )
        for number in range(schedule.num_devices)
    ]  # fmt: skip
    for batch in range(BATCHES):
        received = messages_by_target(schedule, batch)
        for device in devices:
            device.by_op.clear()
            device.step(batch, received.get(device.number, ()))
    return cast("list[list[int]]", [device.by_op for device in devices])


@pytest.mark.parametrize(
    ("states", "count", "ranks"),
    [
        ("replicated", 2, 2),
        ("replicated", 3, 3),
        ("sharded", 2, 2),
        ("sharded", 3, 3),
        ("shared", 2, 3),
        ("shared", 3, 6),
    ],
)
@pytest.mark.parametrize("rule", ["lag2", "v2", "v1"])
def test_planned_buffers_are_those_alive(states: StatePlacement, count: int, ranks: int, rule: str) -> None:
    assert planned(states, count, rule) == run_ranks(job_alive, ranks, states, count, rule)
