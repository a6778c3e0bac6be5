"""Programs of the cyclic schedule: one worker of three."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic import CyclicDataParallel, LocalSteps, init_mesh
from laconic.cyclic.links import ActivationMeta
from laconic.rehearse import Machine, rehearsal
from tests.rehearse.engine import WIDTH

_NUM_STAGES, _BATCH = 3, 4
Batches = Callable[[int], Any]
"""A function from a seed to what `CyclicDataParallel.step` takes."""


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def trained(run: CyclicDataParallel, batch: Batches, mesh: Any) -> None:
    """Train, drain, and train again."""
    for steps in (3, 1):
        for seed in range(steps):
            loss = run.step(batch(seed))
            if loss is not None:
                loss.item()
        run.drain()


def looked_at(run: CyclicDataParallel, batch: Batches, mesh: Any) -> None:
    """Look at one version of all weights, and at the state, between steps."""
    for seed in range(3):
        run.step(batch(seed))
        with run.consistent_parameters():
            sum(p.sum() for stage in run.stages for p in stage.parameters()).item()
        run.state_dict()
    run.drain()


def synced(run: CyclicDataParallel, batch: Batches, mesh: Any) -> None:
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
    train: Callable[[CyclicDataParallel, Batches, Any], None] = trained

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


_CLIPPED = {"rule": "clip", "max_grad_norm": 0.1, "grad_scaler": torch.amp.GradScaler("cpu")}

CYCLIC: dict[str, Cyclic] = {
    "cyclic": Cyclic(),
    "cyclic, looked at": Cyclic(train=looked_at),
    "cyclic, clipping": Cyclic(options=_CLIPPED),
    "cyclic, sharded": Cyclic(options={"states": "sharded"}),
    "cyclic, shared": Cyclic(options={"states": "shared"}, num_devices=6, rank=5),
    "cyclic, at once": Cyclic(options={"rule": "dp"}),
    "cyclic, islands": Cyclic(islands=2, train=synced),
    "cyclic, Gloo": Cyclic(device="cpu"),
    "cyclic, Gloo, sharded": Cyclic(device="cpu", options={"states": "sharded"}),
}
