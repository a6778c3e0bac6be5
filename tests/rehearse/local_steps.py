"""Programs of islands that train on their own, and sync in a background thread: `LocalSteps`."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from laconic import LocalSteps
from tests.rehearse.engine import Program, loss_of, training
from tests.rehearse.saves import saver

Wrap = Callable[[Any, torch.optim.Optimizer, Any], LocalSteps]


def local(**options: Any) -> Wrap:
    """Wrap the optimizer."""
    return lambda model, optimizer, mesh: LocalSteps(model, optimizer, mesh=mesh, **options)


def recovering(**options: Any) -> Wrap:
    """Wrap the optimizer, and keep the states of the last syncs in a folder, which goes with the wrapper."""

    def wrap(model: Any, optimizer: torch.optim.Optimizer, mesh: Any) -> LocalSteps:
        folder = tempfile.TemporaryDirectory()
        steps = local(recovery=folder.name, run_id="run", **options)(model, optimizer, mesh)
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


def saved(model: Any, steps: Any) -> None:
    """Save in the background, also while a fragment is in flight."""
    with saver() as made:
        for step in range(2):
            training(steps=2)(model, steps)
            made.save(step, model=model, optimizer=steps.optimizer, local_steps=steps, extra={})
        training(steps=1)(model, steps)


_STREAMED = {"every": 4, "fragments": 2, "overlap": 1, "error_feedback": 0.9, "mixing": 0.3}
_ISLANDS: dict[str, Any] = {"islands": 2, "nodes": 1, "local": 2}

LOCAL_STEPS: dict[str, Program] = {
    "LocalSteps": Program(**_ISLANDS, wrap=local(every=2), train=synced),
    "LocalSteps, overlap, offload": Program(
        **_ISLANDS, options={"offload_policy": CPUOffloadPolicy()}, wrap=local(**_STREAMED), train=synced
    ),
    "LocalSteps, saves": Program(options={"cache": "host"}, wrap=local(**_STREAMED), train=saved),
    "LocalSteps, recovery": Program(**_ISLANDS, wrap=recovering(**_STREAMED), train=synced),
}
