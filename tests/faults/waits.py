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
from tests.faults.bench import Bench, Found, campaign
from tests.faults.victims import GRACE_S, Instant, Place, Victim, tell
from tests.support.sharded_net import shard

Step = Callable[[], Any]
_WIDTH = 33


def _trained(islands: int = 1, local: int = 1, **policies: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    mesh = laconic.init_mesh("cpu", islands=islands, local=local)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))
    shard(model, list(model), mesh=mesh, **policies)
    return model, torch.optim.AdamW(model.parameters()), mesh


def _stepping(model: nn.Module, step: Step) -> Step:
    def run() -> None:
        model(torch.randn(2, _WIDTH)).square().mean().backward()
        step()
        model.zero_grad()

    return run


def _replicas(islands: int) -> Step:
    model, optimizer, _ = _trained(islands)
    return _stepping(model, optimizer.step)


def _auto(_: Path) -> Step:
    model, optimizer, _ = _trained(local=2, cache="auto")
    return _stepping(model, optimizer.step)


def _islands(_: Path) -> Step:
    model, optimizer, mesh = _trained(islands=2)
    return _stepping(model, laconic.LocalSteps(model, optimizer, mesh=mesh, every=4, fragments=2).step)


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


STRATEGIES: dict[str, Callable[[Path], Step]] = {
    "sharded": lambda _: _replicas(1), "replicas": lambda _: _replicas(2), "auto": _auto, "islands": _islands,
    "cyclic": _cyclic, "checkpoints": _checkpoints, "background": _background,
    "agreement": lambda _: lambda: RankGroup().gather(["x" * 100, dist.get_rank()]),
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


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The behaviour of the other ranks after one rank was lost."""

    kind: str
    hanging: tuple[int, ...]
    """The ranks that had not ended by themselves."""
    silent: tuple[int, ...]
    """The ranks that a kill ended without the name of the lost rank."""
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
        if kind == "kill":
            victim.send(signal.SIGKILL, [rank])
        left = victim.wait((0 if kind == "kill" else TIMEOUTS_S[kind]) + GRACE_S + _SLACK_S, others)
        printed = tuple(victim.text(each)[-20_000:] for each in range(NUM_RANKS))
    silent = (each for each in others if kind == "kill" and f"rank {rank} is gone" not in printed[each])
    return Loss(kind=kind, hanging=tuple(left), silent=tuple(silent), printed=printed)


@campaign(
    "waits",
    "ranks in library use that lose another rank (SIGKILL, SIGSTOP, an endless loop), all strategies",
    harms=("hang beyond the timeout", "do not name the rank that was killed"),
)
def losses(bench: Bench) -> Found:
    """Lose ranks of all strategies in all ways, each at 37 calls after the one before."""
    num, ways = 7 if bench.quick else 210, list(product(STRATEGIES, TIMEOUTS_S))
    cases = [(*ways[number % len(ways)], number % NUM_RANKS, 1 + 37 * number) for number in range(num)]
    found = []
    with ThreadPoolExecutor(3) as pool:
        for case, loss in zip(cases, pool.map(lose, *zip(*cases, strict=True)), strict=True):
            printed = "\n---\n".join(loss.printed)
            found += [f"hang beyond the timeout: {case}\n{printed}"] if loss.hanging else []
            found += [f"do not name the rank that was killed: {case}\n{printed}"] if loss.silent else []
    return num, found, f"Four ranks, whose groups have a timeout of {TIMEOUTS_S}; grace {GRACE_S:g} s."
