"""The actions of the ranks in the tests of asynchronous saves."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from laconic import checkpoint
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.checkpoint import zoo


def _made() -> tuple[zoo.Zoo, torch.optim.Optimizer]:
    model = zoo.shard(zoo.make_zoo(seed=0))
    optimizer = zoo.Hoarder(model.parameters())
    zoo.train(model, optimizer)
    return model, optimizer


def save_while_training(folder: str) -> dict[str, Any]:
    """Save the same state with and without the background, twice. Training goes on while the background saves wait."""
    model, optimizer = _made()
    extra = {"rank": dist.get_rank(), "tensor": torch.ones(2), "rng": checkpoint.rng_state()}
    arguments: dict[str, Any] = {"model": model, "optimizer": optimizer, "extra": extra}
    seen: dict[str, Any] = {"under_way": []}
    go_on = threading.Event()
    with checkpoint.AsyncSaver(f"{folder}/async") as saver:
        assert saver.wait() is None
        for step in (2, 4):
            checkpoint.save_checkpoint(f"{folder}/sync", step, **arguments)
            go_on.clear()
            store.on_crash_point = lambda point: point != CrashPoint.BEGUN or go_on.wait(60) or None
            saver.save(step, **arguments)
            model.seen.fill_(-1)
            extra["tensor"].mul_(2)
            optimizer.param_groups[0]["lr"] *= 0.5
            zoo.train(model, optimizer)  # training has collectives too, while the save's collectives wait
            seen["under_way"].append((os.path.exists(f"{folder}/async/step-{step}"), not go_on.is_set()))
            go_on.set()
            seen[f"folder of {step}"] = str(saver.wait())
            store.on_crash_point = None
            dist.barrier()
    return seen


def one_at_a_time(folder: str) -> list[str]:
    """Begin two saves without a wait between them. Returns the crash points in the order in which this rank passes."""
    model, optimizer = _made()
    passed: list[str] = []
    store.on_crash_point = lambda point: passed.append(f"{threading.current_thread().name}: {point}")
    with checkpoint.AsyncSaver(folder) as saver:
        for step in (1, 2):
            saver.save(step, model=model, optimizer=optimizer, extra={})
    return passed


def fail_in_the_background(folder: str) -> list[str]:
    """Return the outcome of each call: a save, a save that rank 1 cannot encode, a call that raises its error, ..."""
    model, optimizer = _made()
    saver = checkpoint.AsyncSaver(folder)
    bad = {"thing": object() if dist.get_rank() == 1 else 1}
    outcomes = []
    for step, extra in ((1, {}), (2, bad), (3, {}), (4, {})):
        try:
            saver.save(step, model=model, optimizer=optimizer, extra=extra)
            outcomes.append("begun")
        except checkpoint.CheckpointError as error:
            outcomes.append(str(error))
    saver.wait()
    with checkpoint.AsyncSaver(folder) as other:
        other.save(5, model=model, optimizer=optimizer, extra=bad)
        try:
            other.wait()
        except checkpoint.CheckpointError as error:
            outcomes.append(str(error))
    return outcomes


def die_while_training(folder: str, point: CrashPoint) -> None:
    """Kill one rank in the background of the second save, at `point`, while training goes on."""
    model, optimizer = _made()
    saver = checkpoint.AsyncSaver(folder)
    saver.save(2, model=model, optimizer=optimizer, extra={})
    saver.wait()
    dist.barrier()
    rank = 1 if point == CrashPoint.WRITTEN else 0

    def kill(passed: CrashPoint) -> None:
        if passed == point and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    store.on_crash_point = kill
    saver.save(4, model=model, optimizer=optimizer, extra={})
    while True:
        zoo.train(model, optimizer)


def load_newest(folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the newest checkpoint's step and state."""
    model = zoo.shard(zoo.make_zoo(seed=1))
    optimizer = zoo.Hoarder(model.parameters())
    loaded = checkpoint.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert loaded is not None
    return loaded["step"], zoo.whole(model, optimizer)
