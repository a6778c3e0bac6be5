"""The rehearsed buffers of every device of the cyclic schedule against those of a real run, op by op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from laconic.config import OptimizerConfig, ScheduleConfig
from laconic.cyclic.links import ByteLayout, Links
from laconic.cyclic.placement import PlacedStages
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import StatePlacement
from laconic.cyclic.stage import trainable
from laconic.cyclic.worker import Worker
from laconic.plan.cyclic import DevicePlayer, SharedWires, play_all, rehearse
from laconic.plan.cyclic_stages import PlannedBlock, PlannedStage
from laconic.plan.machine import Simulator
from laconic.plan.phantom import PhaseBegin
from laconic.plan.phase import LayerInput, Phase
from tests.cyclic.toys import OPTIMIZERS, WIDTH, make_stages, train
from tests.plan.traces import cluster, spec
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

BATCHES = 4
ROWS = 4
HIDDEN_BYTES, MASK_BYTES = ROWS * WIDTH * 4, ROWS * WIDTH
NOTHING = Phase(work=(), peak_bytes=0, end_bytes=0)
NO_CLIPPING = OptimizerConfig(max_grad_norm=0.0)


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
        empty, receive, update = ByteLayout.empty, Links._receive, PlacedStages.update
        content, compute = Worker._content, Worker._compute

        def receiving(links: Links, *args: Any) -> Any:
            transfer = receive(links, *args)
            self.add(transfer.buffers[0])
            return transfer

        def updating(placement: PlacedStages, stage: int, *args: Any) -> None:
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
            mock.patch.object(PlacedStages, "update", updating),
            mock.patch.object(Worker, "_content", sending),
            mock.patch.object(Worker, "_compute", computing),
        ):
            yield


def job_alive(states: StatePlacement, count: int, rule: str) -> list[int]:
    """The bytes of the buffers that are alive when each op of the last batch begins."""
    mesh, buffers = init_device_mesh("cpu", (dist.get_world_size(),)), Buffers()
    optimizer, loss = OPTIMIZERS["sgd"], nn.functional.cross_entropy
    with buffers.watched():
        run = CyclicDataParallel(make_stages(count), loss, optimizer, mesh, rule=rule, states=states, stagger=0)
        worker = None if states == "shared" else dist.get_rank()
        train(run, range(BATCHES - 1), worker)
        buffers.by_op.clear()
        train(run, range(BATCHES - 1, BATCHES), worker)
        run.close()
    return buffers.by_op


class Watched(DevicePlayer):
    """A device that notes its buffers when an op begins."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.by_op: list[float] = []

    def _mark(self, label: object) -> None:
        if label == ("step", BATCHES - 1):
            self.by_op.clear()
        if isinstance(label, PhaseBegin):
            self.by_op.append(sum(self.machine.held[kind] for kind in ("parameters", "gradients", "transfers")))
        super()._mark(label)


def block(stage: nn.Module) -> PlannedBlock:
    own = trainable(stage)
    specs = tuple(spec(name, *each.shape) for name, each in own.items())
    return PlannedBlock(name="a stage", parameters=specs, forward=NOTHING, backward=NOTHING)


def planned(states: StatePlacement, count: int, ranks: int, rule: Any) -> list[list[float]]:
    hidden = LayerInput(nbytes=HIDDEN_BYTES, requires_grad=True)
    carried = (hidden, LayerInput(nbytes=MASK_BYTES, requires_grad=False), hidden)
    made = make_stages(count)
    stages = [PlannedStage(blocks=(block(stage),), passes_on=() if stage is made[-1] else carried) for stage in made]
    schedule = ScheduleConfig(kind="cyclic", rule=rule, states=states, stagger=0.0)
    network = SharedWires(Simulator(cluster(ranks, 1), device_type="cpu"))
    devices = [
        Watched(network, rehearse(network.machine, stages, schedule, NO_CLIPPING, number, BATCHES), number)
        for number in range(ranks)
    ]
    play_all(devices)
    return [device.by_op for device in devices]


@pytest.mark.parametrize(
    ("states", "count", "ranks", "rule"),
    [("replicated", 3, 3, "lag2"), ("sharded", 3, 3, "v2"), ("shared", 2, 3, "v1")],
)
def test_planned_buffers_are_those_alive(states: StatePlacement, count: int, ranks: int, rule: str) -> None:
    assert planned(states, count, ranks, rule) == run_ranks(job_alive, ranks, states, count, rule)
