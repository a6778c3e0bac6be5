"""Impossible settings are refused before training, and the failure of one worker ends all workers."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import laconic
from laconic import rehearse
from laconic.cyclic.placement import VersionError
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import StatePlacement
from tests.cyclic.toys import OPTIMIZERS, WIDTH, make_batch, make_stages
from tests.support.launch import free_port, on_ranks, run_ranks, started

loss_fn, sgd = nn.functional.cross_entropy, OPTIMIZERS["sgd"]


LINEAR = nn.Linear(3, 3)
SHARED = torch.optim.SGD(LINEAR.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("stages", "options", "words"),
    [
        ([], {}, "there are no stages"),
        ([LINEAR, nn.ReLU()], {}, "stage 1 has no trainable parameter"),
        ([nn.Sequential(LINEAR), nn.Sequential(LINEAR)], {}, r"0\.weight in stage 0 and 0\.weight in stage 1 .*untie"),
        ([LINEAR], {"optimizer_fn": torch.optim.LBFGS}, "LBFGS evaluates the whole model"),
        ([LINEAR, nn.Linear(3, 3)], {"optimizer_fn": lambda p: SHARED}, "make a new optimizer"),
        ([LINEAR], {"stagger": 1.5}, r"stagger=1\.5"),
        ([LINEAR], {"cache": "device"}, "cache='device', expected one of none, host"),
        ([LINEAR], {"cache": "host"}, 'has nothing to keep with states="single".*use states="sharded", or leave cache'),
        ([LINEAR, nn.Linear(3, 3, device="meta")], {}, r"several devices, (cpu, meta|meta, cpu)"),
    ],
)
def test_bad_stages_and_optimizers(stages: list[nn.Module], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CyclicDataParallel(stages, loss_fn, **{"optimizer_fn": sgd, **options})


def test_bad_batches_and_settings() -> None:
    run = CyclicDataParallel(make_stages(3), loss_fn, sgd)
    unequal = [*make_batch(3, 0)[:2], make_batch(3, 0, rows=5)[2]]
    without_loss = CyclicDataParallel(make_stages(1), lambda output, target: torch.zeros(()), sgd)
    odd = CyclicDataParallel([Odd(), nn.Linear(3, 3)], loss_fn, sgd)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: run.step(make_batch(3, 0)[:2]), r"needs the micro-batches of all 3 workers here.*got 2"),
        (lambda: run.step(unequal), r"worker 2 has a batch of shapes.*equal size"),
        (lambda: run.set_hyperparameters(rate=1), r"no hyper-parameter 'rate'; it has .*lr, .*momentum"),
        (lambda: without_loss.step(make_batch(1, 0)), "scalar tensor that depends on the parameters"),
        (lambda: odd.step(make_batch(2, 0)), "output of stage 0 must be a tensor or a tuple of tensors, got dict"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 3)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}


class Meddler(nn.Linear):
    """Changes its bias in place after its forward, which autograd does not notice."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        with torch.no_grad():
            self.bias.add_(1)
        return y


def test_a_change_between_forward_and_backward_and_an_early_update_are_noticed() -> None:
    run = CyclicDataParallel([Meddler(), nn.Linear(3, 3)], loss_fn, sgd)
    with pytest.raises(VersionError, match=r"stage 0 were changed in place .* worker 0, batch 0"):
        run.step(make_batch(2, 0))
    run = CyclicDataParallel(make_stages(3), loss_fn, sgd)
    run._placement.version[0] += 1
    with pytest.raises(VersionError, match="stage 0 has version 1, but worker 0 needs 0"):
        run.step(make_batch(3, 0))


@on_ranks(3)
def test_mesh_must_fit() -> None:
    mesh = init_device_mesh("cpu", (3,))
    with pytest.raises(ValueError, match=r'4 stages with states="replicated" need 4 ranks, but the mesh has 3'):
        CyclicDataParallel(make_stages(4), loss_fn, sgd, mesh)
    with pytest.raises(ValueError, match=r'3 stages with states="shared" need 6 ranks, but the mesh has 3'):
        CyclicDataParallel(make_stages(3), loss_fn, sgd, mesh, states="shared")
    with pytest.raises(ValueError, match="mesh of one axis"):
        CyclicDataParallel(make_stages(3), loss_fn, sgd, init_device_mesh("cpu", (1, 3), mesh_dim_names=("a", "b")))
    stages, rank = [nn.Linear(6, 6) for _ in range(3)], dist.get_rank()
    parallelize_module(stages[1], mesh, ColwiseParallel())
    others = sorted({0, 1, 2} - {rank})
    is_cut = rf"is a DTensor over ranks \[{others[0]}, {others[1]}\] too, .*each worker runs all of a stage"
    with pytest.raises(ValueError, match=is_cut):
        CyclicDataParallel(stages, loss_fn, sgd, mesh)
    laconic.fully_shard(stages[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"weight of stage 0 is sharded by fully_shard.*leave fully_shard out"):
        CyclicDataParallel(stages, loss_fn, sgd, mesh)


@on_ranks(6)
def test_a_dtensor_that_a_shared_stage_hands_on() -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("worker", "tp"))
    stages = [nn.Linear(6, 4), nn.Linear(4, 3)]
    parallelize_module(stages[0], mesh["tp"], ColwiseParallel(use_local_output=False))
    run = CyclicDataParallel(stages, loss_fn, sgd, mesh["worker"], states="shared")
    batch: Any = [(torch.randn(2, 6), torch.zeros(2, dtype=torch.int64))] * 2
    if mesh.get_local_rank("worker") == 0:  # it runs the first stage in the first time step
        with pytest.raises(ValueError, match=r"a stage hands on a DTensor.*let its last layer gather it"):
            run.step(batch)


def job_unequal(rule: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    run = CyclicDataParallel(make_stages(3), loss_fn, sgd, mesh, rule=rule)
    run.step(make_batch(3, 0)[dist.get_rank()])
    run.step(make_batch(3, 1, rows=5 if dist.get_rank() == 1 else 4)[dist.get_rank()])
    run.drain()


@pytest.mark.parametrize("rule", ["v2", "dp"])
def test_unequal_batches_are_noticed(rule: str) -> None:
    with pytest.raises(RuntimeError, match=r"worker [12] has a batch of [45], but worker [01] one of [45]"):
        run_ranks(job_unequal, 3, rule)


class Fails(nn.Module):
    """Fails on one rank, in its third batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.batch = nn.Linear(WIDTH, WIDTH), how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.batch += 1
        if dist.get_rank() == 1 and self.batch == 3:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FloatingPointError("stage on fire")
        return self.linear(x)


@pytest.mark.parametrize("states", ["replicated", "sharded"])
def test_a_killed_worker_ends_all(states: StatePlacement) -> None:
    seen = dict[int, str]()

    def live() -> None:
        dist.init_process_group("gloo")
        run = CyclicDataParallel(
            [Fails("killed") for _ in range(3)], loss_fn, sgd, init_device_mesh("cpu", (3,)), states=states
        )
        try:
            for _ in range(6):
                run.step((torch.randn(2, WIDTH), torch.zeros(2, dtype=torch.int64)))
        except RuntimeError as error:
            seen[dist.get_rank()] = str(error)
            os._exit(1)

    with contextlib.redirect_stderr(io.StringIO()):
        rehearse.ranks(live, local=3, goes_on=True)
    assert seen.keys() == {0, 2}
    assert all("cannot be exchanged: a worker has ended" in text for text in seen.values())


def _live_or_die(states: str, rank: int, port: int, folder: str) -> None:
    """One process of three. Survivors write the error that they saw to `folder`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (3,))
    run = CyclicDataParallel([Fails("raises") for _ in range(3)], loss_fn, sgd, mesh, states=states)  # type: ignore[arg-type]
    batch: Any = (torch.randn(2, WIDTH), torch.zeros(2, dtype=torch.int64))
    try:
        for _ in range(6):
            run.step(batch)
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
        time.sleep(1)  # rank 0 hosts the store, from which the others read the traceback
    os._exit(1)


@pytest.mark.machine
@pytest.mark.parametrize("states", ["replicated", "sharded"])
def test_a_failing_worker_is_named_to_all(states: str, tmp_path: Path) -> None:
    port = free_port()
    ranks = [started(_live_or_die, states, rank, port, str(tmp_path)) for rank in range(3)]
    try:
        for process in ranks:
            process.join(30)
            assert process.exitcode is not None, "a worker goes on without its peer"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    seen = {rank: (tmp_path / str(rank)).read_text() for rank in (0, 2)}
    for text in seen.values():
        assert "cannot be exchanged: a worker has ended" in text
        assert "rank 1 failed first" in text
        assert "stage on fire" in text
