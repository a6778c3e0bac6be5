"""The work of a rank until it is killed, in library use: the victims of the campaign `waits`.

Each strategy is a function that makes its objects and returns a function that takes one step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic import checkpoint
from laconic.comm import failure
from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import make_mesh
from laconic.cyclic import CyclicDataParallel

Step = Callable[[], Any]
_WIDTH = 33


def _trained(islands: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    mesh = laconic.init_mesh("cpu", islands=islands, local=1)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
    for layer in model:
        laconic.fully_shard(layer, mesh=mesh)
    laconic.fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters()), mesh


def _stepping(model: nn.Module, step: Step) -> Step:
    def run() -> None:
        model(torch.randn(2, _WIDTH)).square().mean().backward()
        step()
        model.zero_grad()

    return run


def _sharded(_: Path) -> Step:
    model, optimizer, _ = _trained()
    return _stepping(model, optimizer.step)


def _replicas(_: Path) -> Step:
    model, optimizer, _ = _trained(islands=2)
    return _stepping(model, optimizer.step)


def _islands(_: Path) -> Step:
    model, optimizer, mesh = _trained(islands=2)
    local = laconic.LocalSteps(model, optimizer, mesh=mesh, every=4, fragments=2)
    return _stepping(model, local.step)


def _cyclic(_: Path) -> Step:
    torch.manual_seed(0)
    mesh = make_mesh("cpu", (dist.get_world_size(),))
    stages = [nn.Linear(_WIDTH, _WIDTH) for _ in range(dist.get_world_size())]
    run = CyclicDataParallel(stages, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.01), mesh, rule="v2")
    return lambda: run.step((torch.randn(2, _WIDTH), torch.randn(2, _WIDTH)))


def _checkpoints(folder: Path) -> Step:
    model, optimizer, _ = _trained()
    steps = iter(range(1, 10**9))
    return lambda: checkpoint.save_checkpoint(folder, next(steps), model=model, optimizer=optimizer, extra={})


def _background(folder: Path) -> Step:
    model, optimizer, _ = _trained()
    saver, steps = checkpoint.AsyncSaver(folder), iter(range(1, 10**9))
    return _stepping(model, lambda: saver.save(next(steps), model=model, optimizer=optimizer, extra={}))


def _agreement(_: Path) -> Step:
    return lambda: RankGroup().gather(["x" * 100, dist.get_rank()])


STRATEGIES: dict[str, Callable[[Path], Step]] = {
    "sharded": _sharded, "replicas": _replicas, "islands": _islands, "cyclic": _cyclic,
    "checkpoints": _checkpoints, "background": _background, "agreement": _agreement,
}  # fmt: skip


def live(
    strategy: str,
    folder: str,
    environment: dict[str, str],
    timeout_s: float,
    grace_s: float,
    loops: int,
    cause_s: float | None,
) -> None:
    """Take steps until something ends this process. Rank `loops` ends in an endless loop of its own after some steps.

    The file `rank-R` in `folder` appears when rank R has taken its first steps and has found its neighbour: a rank that
    dies before is known to nobody, see [Note: Failing together]. `err-R` has what it prints.
    """
    os.environ.update(environment)
    rank = int(environment["RANK"])
    for number in (1, 2):
        os.dup2(os.open(f"{folder}/err-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    failure._GRACE_S = grace_s
    if cause_s is not None:
        failure._CAUSE_S = cause_s
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        failure.watch_peers()
        step = STRATEGIES[strategy](Path(folder) / "checkpoints")
        is_ready = False
        for number in range(10**9):
            step()
            if not is_ready and number >= 2 and failure._peers is not None and failure._peers.ring.is_joined:
                is_ready = True
                Path(folder, f"rank-{rank}").touch()
            while is_ready and rank == loops:
                pass
    except BaseException as error:  # what the interpreter would do
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)
