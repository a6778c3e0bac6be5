"""Ranks in library use that lose another rank: none of them waits longer than the groups' timeout allows.

Four ranks train, save or agree. At a named instant ([Note: Instants of a process] in victims.py) one is killed
(SIGKILL), stopped for good (SIGSTOP) or loops in code of its own. All others must end by themselves, within the timeout
of the groups and the seconds of grace that `laconic.comm.failure` gives. After a SIGKILL each of them must name the
lost rank. The suite goes through every k-th turn of the same ranks in one process.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
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
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.victims import GRACE_S, Instant, Place, Victim, tell
from tests.support.record import Row

Step = Callable[[], Any]
_WIDTH = 33


def _trained(islands: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    mesh = laconic.init_mesh("cpu", islands=islands, local=1)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))
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


def live(strategy: str, folder: Path, timeout_s: float, cause_s: float | None, num_steps: int = 10**9) -> int:
    """Take steps. A rank whose transfer fails waits `cause_s` seconds for the name of the lost rank."""
    if cause_s is not None:
        failure._CAUSE_S = cause_s
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    failure.watch_peers()
    while failure._peers is not None and not failure._peers.ring.is_joined:  # a rank that dies before is unknown
        time.sleep(0.01)
    dist.barrier()
    tell()
    step = STRATEGIES[strategy](folder)
    for _ in range(num_steps):
        step()
    return 0


NUM_RANKS = 4
TIMEOUTS_S = {"kill": 60.0, "stop": 6.0, "loop": 6.0}
"""The timeout of the groups. After a kill the others must not need it."""
_SLACK_S = 40.0  # for four processes to run on a busy machine; less than the timeout that a kill must not need
_LOSSES, _QUICK_LOSSES = 210, 7
_CALLS_EACH = 37  # between two instants
_AT_ONCE = 3


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The behaviour of the other ranks after one rank was lost."""

    strategy: str
    kind: str
    rank: int
    hanging: tuple[int, ...]
    """The ranks that had not ended by themselves."""
    silent: tuple[int, ...]
    """The ranks that a kill ended without the name of the lost rank."""
    wall_s: float
    """The seconds until the last rank ended."""
    printed: tuple[str, ...]


def lose(strategy: str, kind: str, rank: int, call: int, cause_s: float | None = None) -> Loss:
    """Start ranks, lose one at a call of laconic's functions, and wait for the others."""
    place = Place(num_ranks=NUM_RANKS, num_local=NUM_RANKS)
    instant = Instant(rank=rank, call=call, loops=kind == "loop", begins="told")
    others = [each for each in range(NUM_RANKS) if each != rank or kind == "loop"]
    with tempfile.TemporaryDirectory(prefix="laconic-waits-") as folder:
        arguments = (strategy, Path(folder) / "checkpoints", TIMEOUTS_S[kind], cause_s)
        victim = Victim.start(live, arguments, place, Path(folder) / "log", instant=instant)
        assert victim.reaches_instant(), [victim.text(each) for each in range(NUM_RANKS)]
        begun = time.monotonic()
        if kind == "kill":
            victim.send(signal.SIGKILL, [rank])
        left = victim.wait((0 if kind == "kill" else TIMEOUTS_S[kind]) + GRACE_S + _SLACK_S, others)
        printed = tuple(victim.text(each)[-20_000:] for each in range(NUM_RANKS))
    silent = [each for each in others if kind == "kill" and f"rank {rank} is gone" not in printed[each]]
    return Loss(
        strategy=strategy, kind=kind, rank=rank, hanging=tuple(left), silent=tuple(silent),
        wall_s=time.monotonic() - begun, printed=printed,
    )  # fmt: skip


@campaign_row("waits")
def row(bench: Bench) -> Row:
    """Lose ranks of all strategies in all ways."""
    ways = list(product(TIMEOUTS_S, STRATEGIES))
    cases = []
    for number in range(_QUICK_LOSSES if bench.quick else _LOSSES):
        kind, strategy = ways[number % len(ways)]
        cases.append((strategy, kind, number % NUM_RANKS, 1 + _CALLS_EACH * number))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        losses = list(pool.map(lose, *zip(*cases, strict=True)))
    for loss in losses:
        if loss.hanging or loss.silent:
            print(loss, *loss.printed, sep="\n---\n", flush=True)
    longest = max(loss.wall_s for loss in losses)
    return faults_row(
        claim="ranks in library use that lose another rank (SIGKILL, SIGSTOP, an endless loop), all strategies",
        tried=len(losses),
        at_least=_QUICK_LOSSES if bench.quick else _LOSSES,
        harms={
            "hang beyond the timeout": sum(bool(loss.hanging) for loss in losses),
            "do not name the rank that was killed": sum(bool(loss.silent) for loss in losses),
        },
        note=f"Four ranks; the groups' timeout is {TIMEOUTS_S['stop']:g} s, but 60 s where ranks are killed: there the "
        f"others must not need it; grace {GRACE_S:g} s. The longest took {longest:.1f} s.",
    )
