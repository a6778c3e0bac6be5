"""Ranks in library use that lose another rank: none of them waits longer than the groups' timeout allows.

Four ranks train, save or agree. At a random instant one is killed (SIGKILL), stopped for good (SIGSTOP) or loops in
code of its own. All others must end by themselves, within the timeout of the groups and the seconds of grace that
`laconic.comm.failure` gives. After a SIGKILL each of them must name the lost rank.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support import launch
from tests.support.record import Row

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


NUM_RANKS = 4
TIMEOUTS_S = {"kill": 60.0, "stop": 6.0, "loop": 6.0}
"""The timeout of the groups. After a kill the others must not need it."""
GRACE_S = 2.0
_SLACK_S = 40.0  # for four processes to run on a busy machine; less than the timeout that a kill must not need
_START_S = 90.0
KINDS = ("kill", "stop", "loop")
_KILLS, _QUICK_KILLS = 210, 7
_AT_ONCE, _MOST_STARTS = 3, 5


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
    exit_codes: tuple[int | None, ...]
    """Of all ranks, in order; None for a rank that did not end."""
    wall_s: float
    """The seconds until the last rank ended."""
    printed: str


def lose(strategy: str, kind: str, rank: int, delay_s: float, cause_s: float | None = None) -> Loss:
    """Start ranks, lose one `delay_s` seconds after all have taken steps, and wait for the others.

    A rank whose transfer fails waits `cause_s` seconds for the name of the lost rank; by default as long as in a job.
    """
    port = launch.free_port()
    with tempfile.TemporaryDirectory(prefix="laconic-waits-") as folder:
        processes: list[Any] = []
        loops = rank if kind == "loop" else -1
        try:
            for each in range(NUM_RANKS):
                environment = launch.torchrun_environment(each, NUM_RANKS, NUM_RANKS, port)
                job = (strategy, folder, environment, TIMEOUTS_S[kind], GRACE_S, loops, cause_s)
                processes.append(launch.started(live, *job))
            _wait_for_steps(processes, Path(folder))
            time.sleep(delay_s)
            begun = time.monotonic()
            if kind != "loop":
                os.kill(processes[rank].pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            others = [each for each in range(NUM_RANKS) if each != rank or kind == "loop"]
            deadline = begun + (0 if kind == "kill" else TIMEOUTS_S[kind]) + GRACE_S + _SLACK_S
            for each in others:
                processes[each].join(max(0.0, deadline - time.monotonic()))
            wall_s = time.monotonic() - begun
            exit_codes = tuple(process.exitcode for process in processes)
            hanging = tuple(each for each in others if processes[each].exitcode is None)
            texts = {each: Path(folder, f"err-{each}").read_text() for each in others}
            silent = tuple(each for each in others if kind == "kill" and f"rank {rank} is gone" not in texts[each])
        finally:
            for process in processes:
                process.kill()
                process.join()
    printed = "\n".join(f"--- rank {each}\n{text[-20_000:]}" for each, text in texts.items())
    return Loss(
        strategy=strategy, kind=kind, rank=rank, hanging=hanging, silent=silent, exit_codes=exit_codes, wall_s=wall_s,
        printed=printed,
    )  # fmt: skip


def _wait_for_steps(processes: list[Any], folder: Path) -> None:
    """Wait until all ranks have taken their first steps."""
    deadline = time.monotonic() + _START_S
    while not all((folder / f"rank-{each}").exists() for each in range(NUM_RANKS)):
        if time.monotonic() > deadline or any(process.exitcode for process in processes):
            texts = [path.read_text() for path in sorted(folder.glob("err-*"))]
            raise RuntimeError("the ranks did not start:\n" + "\n".join(texts))
        time.sleep(0.02)


def lose_one(chosen: tuple[str, str, int, float], cause_s: float | None = None) -> Loss:
    """Lose a rank, see `lose`; start again if another program has taken the port meanwhile."""
    for _ in range(_MOST_STARTS):
        try:
            return lose(*chosen, cause_s)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
    raise RuntimeError(f"no port stayed free in {_MOST_STARTS} starts")


@campaign_row("waits")
def row(bench: Bench) -> Row:
    """Lose ranks of all strategies in all ways."""
    dice, chosen = random.Random(17), []
    for number in range(_QUICK_KILLS if bench.quick else _KILLS):
        strategy = list(STRATEGIES)[number % len(STRATEGIES)]
        kind = KINDS[number // len(STRATEGIES) % len(KINDS)]
        chosen.append((strategy, kind, dice.randrange(NUM_RANKS), dice.random()))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        losses = list(pool.map(lose_one, chosen))
    for loss in losses:
        if loss.hanging or loss.silent:
            print(loss, loss.printed, flush=True)
    longest = max(loss.wall_s for loss in losses)
    return faults_row(
        claim="ranks in library use that lose another rank (SIGKILL, SIGSTOP, an endless loop), all strategies",
        tried=len(losses),
        at_least=_KILLS,
        harms={
            "hang beyond the timeout": sum(bool(loss.hanging) for loss in losses),
            "do not name the rank that was killed": sum(bool(loss.silent) for loss in losses),
        },
        note=f"Four ranks; the groups' timeout is {TIMEOUTS_S['stop']:g} s, but 60 s where ranks are killed: there the "
        f"others must not need it; grace {GRACE_S:g} s. The longest took {longest:.1f} s.",
    )
