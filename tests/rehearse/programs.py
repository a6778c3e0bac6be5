"""All programs that the race checker watches: `python -m tests.rehearse.programs` runs each once.

Beside those of the engine: saves and syncs of islands in a background thread, and one worker of the cyclic schedule.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import CPUOffloadPolicy

from laconic import CyclicDataParallel, LocalSteps, init_mesh
from laconic.checkpoint import AsyncSaver, asynchronous
from laconic.checkpoint.asynchronous import SnapshotPlanner
from laconic.cyclic.links import ActivationMeta
from laconic.rehearse import Machine, rehearsal
from tests.rehearse.engine import ENGINE, WIDTH, Program, adapt, loss_of, program, training

# -- checkpoints that a thread writes: AsyncSaver ----------------------------------------------------------------------


@contextmanager
def saver() -> Iterator[AsyncSaver]:
    """A saver whose group has this rank alone, as the others are not there; its plan lacks what they would write."""
    own = dist.new_group([dist.get_rank()], backend="fake")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(asynchronous, "new_host_group", return_value=own),
        mock.patch.object(SnapshotPlanner, "create_global_plan", lambda self, plans: (plans, Metadata({}))),
        AsyncSaver(folder) as made,
    ):
        yield made


def saved(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save after each step; each save waits for the one before."""
    with saver() as made:
        for step in range(3):
            training(steps=1)(model, optimizer)
            made.save(step, model=model, optimizer=optimizer, extra={"loss": torch.ones(1)})
        training(steps=1)(model, optimizer)


_OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}

SAVES: dict[str, Program] = {
    "saves": program(cache="host", train=saved),
    "saves, LoRA": program(cache="host", prepare=adapt, train=saved),
    "saves, offload": program(**_OFFLOAD, train=saved),
}

# -- islands that sync in a thread: LocalSteps -------------------------------------------------------------------------


def local(*, recovers: bool = False, **options: Any) -> Callable[..., LocalSteps]:
    """Wrap the optimizer; if it `recovers`, keep the states of the last syncs in a folder, which goes with it."""

    def wrap(model: Any, optimizer: torch.optim.Optimizer, mesh: Any) -> LocalSteps:
        if not recovers:
            return LocalSteps(model, optimizer, mesh=mesh, **options)
        folder = tempfile.TemporaryDirectory()
        steps = LocalSteps(model, optimizer, mesh=mesh, recovery=folder.name, run_id="run", **options)
        weakref.finalize(steps, folder.cleanup)
        return steps

    return wrap


def synced(model: Any, steps: Any) -> None:
    """Train over several syncs, look at the outer parameters in between, and apply what is under way at the end."""
    training(steps=3)(model, steps)
    with torch.no_grad(), steps.outer_parameters():
        loss_of(model, 99).item()
    training(steps=3)(model, steps)
    steps.finish()


def saved_in_flight(model: Any, steps: Any) -> None:
    """Save in the background, also while a fragment is in flight."""
    with saver() as made:
        for step in range(2):
            training(steps=2)(model, steps)
            made.save(step, model=model, optimizer=steps.optimizer, local_steps=steps, extra={})
        training(steps=1)(model, steps)


_STREAMED = {"every": 4, "fragments": 2, "overlap": 1, "error_feedback": 0.9, "mixing": 0.3}
_ISLANDS: dict[str, Any] = {"islands": 2, "nodes": 1, "local": 2, "train": synced}

LOCAL_STEPS: dict[str, Program] = {
    "LocalSteps": program(**_ISLANDS, wrap=local(every=2)),
    "LocalSteps, overlap, offload": program(**_ISLANDS, **_OFFLOAD, wrap=local(**_STREAMED)),
    "LocalSteps, saves": program(cache="host", wrap=local(**_STREAMED), train=saved_in_flight),
    "LocalSteps, recovery": program(**_ISLANDS, wrap=local(recovers=True, **_STREAMED)),
}

# -- the cyclic schedule: one worker of three --------------------------------------------------------------------------

_NUM_STAGES, _BATCH = 3, 4
_Batches = Callable[[int], Any]
"""A function from a seed to what `CyclicDataParallel.step` takes."""


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def trained(run: CyclicDataParallel, batch: _Batches, mesh: Any) -> None:
    """Train, drain, and train again."""
    for steps in (3, 1):
        for seed in range(steps):
            loss = run.step(batch(seed))
            if loss is not None:
                loss.item()
        run.drain()


def looked_at(run: CyclicDataParallel, batch: _Batches, mesh: Any) -> None:
    """Look at one version of all weights, and at the state, between steps."""
    for seed in range(3):
        run.step(batch(seed))
        with run.consistent_parameters():
            sum(p.sum() for stage in run.stages for p in stage.parameters()).item()
        run.state_dict()
    run.drain()


def synced_runs(run: CyclicDataParallel, batch: _Batches, mesh: Any) -> None:
    """Sync the islands, each of which is a cyclic run."""
    steps = LocalSteps(nn.ModuleList(run.stages), run.optimizer, mesh=mesh, every=2, overlap=1)
    for seed in range(4):
        run.step(batch(seed))
        steps.step()
    steps.finish()


@dataclass(frozen=True, kw_only=True)
class Cyclic:
    """A run of the cyclic schedule, on one of its devices."""

    device: str = "cuda"
    """With "cpu", messages go through threads of Gloo."""
    rank: int = 1
    num_devices: int = _NUM_STAGES
    islands: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `CyclicDataParallel`."""
    train: Callable[[CyclicDataParallel, _Batches, Any], None] = trained

    def record(self, *, has_values: bool = True) -> Machine:
        """Run the program on a machine, which has its tape."""
        torch.manual_seed(0)
        backend = "nccl" if self.device == "cuda" else "gloo"
        shape = {"nodes": self.num_devices, "local": 1, "islands": self.islands}
        with rehearsal(**shape, rank=self.rank, backend=backend, has_values=has_values) as machine:
            machine.letters.append(self._header())
            mesh = init_mesh("cuda", **shape)
            stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(self.device) for _ in range(_NUM_STAGES)]
            make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
            run = CyclicDataParallel(stages, _loss, make, mesh["node"], **self.options)
            with machine.recording():
                self.train(run, self._batch, mesh)
            if has_values:
                machine.keep_last_contents()
            del run, stages
            gc.collect()
        return machine

    def _header(self) -> Tensor:
        """What another worker sends before its first activations."""
        activations = torch.empty(_BATCH, WIDTH, requires_grad=True)
        return ActivationMeta.of([activations]).header(torch.device(self.device))

    def _batch(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = (torch.randn(_BATCH, WIDTH, generator=generator).to(self.device) for _ in range(2))
        return [(inputs, targets)] * _NUM_STAGES if self.num_devices > _NUM_STAGES else (inputs, targets)


_CLIPPED = {"rule": "clip", "max_grad_norm": 0.1}

CYCLIC: dict[str, Cyclic] = {
    "cyclic": Cyclic(),
    "cyclic, looked at": Cyclic(train=looked_at),
    "cyclic, clipping": Cyclic(options=_CLIPPED),
    "cyclic, sharded": Cyclic(options={"states": "sharded"}),
    "cyclic, shared": Cyclic(options={"states": "shared"}, num_devices=6, rank=5),
    "cyclic, at once": Cyclic(options={"rule": "dp"}),
    "cyclic, islands": Cyclic(islands=2, train=synced_runs),
    "cyclic, Gloo": Cyclic(device="cpu"),
    "cyclic, Gloo, sharded": Cyclic(device="cpu", options={"states": "sharded"}),
}


class Watched(Protocol):
    """A program that runs on a machine of its own."""

    def record(self, *, has_values: bool = True) -> Machine:
        """Run the program on a machine, which has its tape."""
        ...


PROGRAMS: dict[str, Watched] = {**ENGINE, **SAVES, **LOCAL_STEPS, **CYCLIC}

if __name__ == "__main__":
    torch.set_num_threads(1)  # the operations are tiny
    warnings.simplefilter("ignore")  # of settings that are odd on purpose
    for each in PROGRAMS.values():
        each.record()
