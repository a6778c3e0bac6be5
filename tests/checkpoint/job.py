"""A small training job under any strategy, which the checkpoint tests save, break and resume."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import checkpoint
from laconic.checkpoint import state
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.checkpoint.zoo import optimizer_tensors


class Crash(NamedTuple):
    """Kills one rank (SIGKILL) at a crash point of the writer while it saves a step."""

    point: CrashPoint
    rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of one rank."""

    started_from: int
    losses: list[float]
    digest: str
    """A hash of this rank's parts of parameters and optimizer state."""
    whole: dict[str, Tensor]
    """The gathered parameters."""
    reached: frozenset[CrashPoint] = frozenset()
    """The points that this rank passed in its saves."""


def make_model(hidden: int = 13) -> nn.Module:
    """Build a model with sizes that no number of ranks divides, a bias of one element, and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 1)),
    )


def spread(model: nn.Module, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in [*model, model]:
            fully_shard(unit, mesh=mesh)
        return model
    import laconic

    mesh = laconic.init_mesh("cpu")
    for unit in [*model, model]:
        laconic.fully_shard(unit, mesh=mesh, cache="host")
    return model


def train(
    folder: str,
    strategy: str,
    steps: int,
    save_every: int = 2,
    start_from: str | None = None,
    crash: Crash | None = None,
) -> Outcome:
    """Resume from the newest checkpoint if there is one, train to `steps` and save on the way. Runs on each rank."""
    model = spread(make_model(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    torch.manual_seed(1 + dist.get_rank())
    loaded = checkpoint.load_checkpoint(start_from or folder, model=model, optimizer=optimizer)
    if loaded:
        checkpoint.set_rng_state(loaded["rng"])
    started_from = loaded["step"] if loaded else 0
    losses = []
    reached: set[CrashPoint] = set()
    for step in range(started_from + 1, steps + 1):
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save_every and step % save_every == 0:
            store.on_crash_point = _hook(reached, crash, step)
            extra = {"rng": checkpoint.rng_state()}
            checkpoint.save_checkpoint(folder, step, model=model, optimizer=optimizer, extra=extra)
    return Outcome(
        started_from=started_from,
        losses=losses,
        digest=digest(model, optimizer),
        whole=whole(model),
        reached=frozenset(reached),
    )


def load_only(folder: str, strategy: str) -> tuple[Outcome, dict[str, Tensor]]:
    """Load the newest checkpoint. Returns the parameters, and the gathered optimizer state by name."""
    model = spread(make_model(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaded = checkpoint.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert loaded is not None
    moments = {key: _full(value) for key, value in optimizer_tensors(model, optimizer).items()}
    outcome = Outcome(started_from=loaded["step"], losses=[], digest=digest(model, optimizer), whole=whole(model))
    return outcome, moments


def save_with_bad_extra_on_rank_1(folder: str) -> str:
    """Return the message of the error that this rank raises."""
    extra = {"thing": object() if dist.get_rank() == 1 else 1}
    try:
        checkpoint.save_checkpoint(folder, 1, model=make_model(), optimizer=None, extra=extra)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "no error"


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: _full(parameter).clone() for name, parameter in state.named_parameters(model).items()}


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors: dict[str, Any] = state.model_tensors(model) | optimizer_tensors(model, optimizer)
    hasher = hashlib.sha256()
    for key in sorted(tensors):
        local = tensors[key].to_local() if hasattr(tensors[key], "to_local") else tensors[key]
        hasher.update(f"{key}{list(local.shape)}".encode())
        hasher.update(local.detach().contiguous().reshape(-1).numpy().tobytes())
    return hasher.hexdigest()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _hook(reached: set[CrashPoint], crash: Crash | None, step: int) -> Callable[[CrashPoint], None]:
    def pass_or_die(point: CrashPoint) -> None:
        reached.add(point)
        if crash == Crash(point, dist.get_rank(), step):
            os.kill(os.getpid(), signal.SIGKILL)

    return pass_or_die
