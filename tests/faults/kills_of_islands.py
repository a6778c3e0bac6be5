"""Kills of islands at random instants of a run: none of the other ranks is left for longer than ten seconds.

Two islands of one rank train, sync and save. One of the two is killed at a random instant, from the start of its
process to the end of the run; three of four starts go on from the state that kills have left. In a quarter of the
starts the other rank is late: it comes to the rendezvous when this one has died. The other rank must end
by itself. The ranks meet in a store that the campaign hosts, as torchrun's agent would ([Note: No agent] in
victims.py), or in one that rank 0 hosts, as without torchrun. All timeouts are those of the trainer: ten minutes
for a collective.

[Note: Before the rendezvous]
A rank that dies before it has reached the store is as unknown to the others as one that has not been started. Only its
launcher can know. There the campaign does as a launcher does, torchrun's or a scheduler's: it sends SIGTERM to the
others. The same holds if rank 0, which hosts the store, dies before the other rank has reached the store.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch.distributed as dist

from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.runs import STRATEGIES, Run, Strategy
from tests.faults.victims import Place, Victim
from tests.support.record import Row

PROMISE_S = 10.0
KILLS, _QUICK_KILLS = 400, 8
_AT_ONCE = 3  # starts: a rank that waits for a lost one leaves the processors to others
_EACH_RUN = 4  # kills
_LATE = 0.25  # of the kills: the other rank comes to the rendezvous when this one has died
_STORE_S = 2.0  # for the store to answer
_LIMIT_S = 25.0  # until a rank that is left has its stacks printed
_LONGEST_S = 60.0  # of a run
_TRAIN = {"timeout_s": 600.0}  # the trainer's own; other campaigns set a shorter one
_SYNC = STRATEGIES["islands"].sections["sync"]
KINDS: Mapping[str, Strategy] = {
    "whole": Strategy(sections={"sync": _SYNC, "train": _TRAIN}, place=Place(num_ranks=2, num_local=1)),
    "streamed": Strategy(
        sections={"sync": {**_SYNC, "every": 4, "fragments": 2, "overlap": 1}, "train": _TRAIN},
        place=Place(num_ranks=2, num_local=1),
    ),
}
"""The two ways in which islands sync: all at once, and fragment by fragment behind training."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, and the end of the other rank."""

    number: int
    kind: str
    rank: int
    rank_0_hosts: bool
    is_late: bool
    """Whether the other rank stood still until the kill."""
    after_s: float
    """The seconds from the start to the kill."""
    met: bool
    """Whether the ranks could know of each other: [Note: Before the rendezvous]."""
    ended_s: float
    """The seconds from the kill to the end of the other rank; the limit if it did not end."""
    log: str


def _is_connected(pid: int, port: int) -> bool:
    """Whether a process of this machine has an open connection to a port of this machine."""
    wanted = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[2].rpartition(":")[2], 16) == port and fields[3] == "01":
                wanted.add(f"socket:[{fields[9]}]")
    try:
        return any(os.readlink(each) in wanted for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # a file that the process has just closed
        return _is_connected(pid, port) if Path(f"/proc/{pid}/fd").exists() else False


def _has_told(store: dist.Store | None, port: int, rank: int) -> bool:
    """Whether a rank has told the store where it is. Without `store` rank 0 hosts it and is alive."""
    try:
        store = store or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        return store.check([f"laconic/ring/{rank}"])
    except RuntimeError:  # nobody hosts it yet
        return False


def strike(number: int, kind: str, folder: Path, span_s: float, seed: int) -> Kill | None:
    """Start or go on with the run in `folder`, kill a rank, wait for the other. None if the run had ended before."""
    chance = random.Random(seed)
    rank, rank_0_hosts, after_s = chance.randrange(2), chance.random() < 0.5, chance.uniform(0, span_s)
    is_late = chance.random() < _LATE  # the other rank, which begins when this one has died
    if not folder.exists():
        Run(KINDS[kind], folder)
    log = folder / f"log-{number}.txt"
    arguments = [str(folder / "job.toml"), "--train.resume", "auto"]
    begun_s = time.monotonic()
    victim = Victim.start(arguments, KINDS[kind].place, log, grace_s=None, rank_0_hosts=rank_0_hosts)
    host_dies, other = rank_0_hosts and rank == 0, 1 - rank
    if is_late:
        after_s = chance.uniform(0, span_s / 2)
        victim.send(signal.SIGSTOP, [other])
    time.sleep(max(0.0, begun_s + after_s - time.monotonic()))
    if host_dies:
        victim.send(signal.SIGSTOP, [other])  # so that it does not connect between this look and the kill
        met = _is_connected(victim.processes[other].pid, victim.port)
    struck_s = time.monotonic()
    victim.send(signal.SIGKILL, [rank])
    victim.send(signal.SIGCONT, [other])
    if not host_dies:
        met = other not in victim.alive() or _has_told(victim.store, victim.port, rank)
    if not met:  # [Note: Before the rendezvous]
        victim.send(signal.SIGTERM, [other])
    victim.wait(_LIMIT_S)
    ended_s = time.monotonic() - struck_s
    if not victim.killed:
        return None
    return Kill(
        number=number, kind=kind, rank=rank, rank_0_hosts=rank_0_hosts, is_late=is_late, after_s=after_s, met=met,
        ended_s=ended_s, log=str(log),
    )  # fmt: skip


def _span_s(folder: Path, kind: str) -> float:
    """The seconds of a run that nobody disturbs."""
    run, begun_s = Run(KINDS[kind], folder), time.monotonic()
    victim = Victim.start(run.arguments, KINDS[kind].place, folder / "log.txt")
    if victim.wait(_LONGEST_S) or any(victim.exit_codes):
        raise RuntimeError(f"an undisturbed run failed; log: {victim.log}")
    return time.monotonic() - begun_s


def _series(folder: Path, numbers: range, seed: int) -> list[Kill]:
    """Make one kill after the other; four in turn go on from each other."""
    kills: list[Kill] = []
    spans = {}
    for kind in KINDS:
        _span_s(folder / f"first-{kind}", kind)  # the very first start waits for the fork server
        spans[kind] = _span_s(folder / f"undisturbed-{kind}", kind)
    with (folder / "kills.jsonl").open("a") as lines:
        for number in numbers:
            kind = list(KINDS)[number // _EACH_RUN % len(KINDS)]
            place = folder / f"run-{number // _EACH_RUN}"
            kill = strike(number, kind, place, spans[kind], seed + number)
            if kill is None:  # the machine is quicker now than it was for the undisturbed run
                spans[kind] *= 0.95
                shutil.rmtree(place)
                continue
            kills.append(kill)
            lines.write(json.dumps(asdict(kill)) + "\n")
            lines.flush()
    return kills


def campaign(folder: Path, num: int, seed: int = 0) -> list[Kill]:
    """Make at least `num` kills, and leave a line for each in `kills.jsonl` of the folders in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    workers = min(_AT_ONCE, -(-num // _EACH_RUN))
    each = -(-num // workers)
    tasks = []
    for worker in range(workers):
        place = folder / f"worker-{worker}"
        place.mkdir(parents=True)
        tasks.append((place, range(worker * each, (worker + 1) * each), seed))
    kills: list[Kill] = []
    # Processes, not threads: see kills.py
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for part in pool.map(_series, *zip(*tasks, strict=True)):
            kills += part
    return kills


@campaign_row("kills-of-islands", section="mend")
def row(bench: Bench) -> Row:
    """Kill ranks of islands at random instants."""
    kills = campaign(bench.out / "island-kills", _QUICK_KILLS if bench.quick else KILLS)
    late = [kill for kill in kills if kill.ended_s > PROMISE_S]
    for kill in late:
        print(kill, file=sys.stderr, flush=True)
    met = [kill for kill in kills if kill.met]
    ends = sorted(kill.ended_s for kill in met)
    by_host = sum(kill.rank_0_hosts for kill in kills)
    return faults_row(
        claim="kills of islands at random instants",
        tried=len(kills),
        at_least=300,
        harms={f"ranks left for more than {PROMISE_S:g} s": len(late)},
        note=(
            "Two islands of one rank, one killed at an instant drawn from the whole run, start and end included; in a "
            "quarter of the starts the other one is late and comes after the kill. "
            f"{by_host} starts met in a store of rank 0, the others in one of the launcher. The other rank ended "
            f"{ends[len(ends) // 2]:.1f} s after the kill (median), {ends[-1]:.1f} s at the latest. "
            f"{len(kills) - len(met)} kills came before the ranks could know of each other; there the launcher ends "
            "the other rank."
        ),
    )
