"""Programs that train on while a thread writes their checkpoints: `AsyncSaver`.

The other ranks are not there, so the saver's group has this rank alone, and its plan lacks what they would write.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import CPUOffloadPolicy

from laconic.checkpoint import AsyncSaver, asynchronous
from laconic.checkpoint.asynchronous import SnapshotPlanner
from tests.rehearse.engine import Program, adapt, training


@contextmanager
def saver() -> Iterator[AsyncSaver]:
    """A saver whose group has this rank alone."""
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


SAVES: dict[str, Program] = {
    "saves": Program(options={"cache": "host"}, train=saved),
    "saves, LoRA": Program(options={"cache": "host"}, prepare=adapt, train=saved),
    "saves, offload": Program(options={"offload_policy": CPUOffloadPolicy()}, train=saved),
}
