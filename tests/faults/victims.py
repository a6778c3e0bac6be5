"""Ranks that a campaign attacks at a named instant, and small training runs under every strategy.

[Note: No agent]
torchrun's agent ends the other ranks when one has died. That would hide a rank that hangs. So a campaign starts ranks
itself: forks of a fork server ([Note: Fork server] in launch.py), which meet in a store that the campaign hosts, as
they would meet in the agent's. A run whose rank was killed must come to its end by itself.

[Note: Instants of a process]
An instant is a rank's n-th call of a function of laconic on its main thread. There the rank stops itself (SIGSTOP), or
loops for ever, and the campaign does what it likes to the ranks. So a campaign goes through every k-th instant of a
run, and an instant can be tried again.

[Note: Before the rendezvous]
A rank that dies before it has reached the store is as unknown to the others as one that has not been started. Only its
launcher can know, and ends them. The same holds if rank 0, which hosts the store, dies before the others have reached
it. Where ranks have no short timeout, calls count from then on: `Instant.begins`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.checkpoint import commit, open_checkpoint, storage
from laconic.config import Config, to_toml
from tests.support.jobs import SMALL_LLAMA, job
from tests.support.launch import free_port, started, torchrun_environment

GRACE_S = 2.0
"""Of laconic.comm.failure, as campaigns set it."""
_STACKS_S = 1.0  # for a rank that hangs to write its stacks
_CALLS, _STRUCK = "calls", "struck"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The number of ranks of a run, and of each of its nodes."""

    num_ranks: int
    num_local: int

    def node(self, rank: int) -> list[int]:
        """The ranks on the node of `rank`."""
        first = rank - rank % self.num_local
        return list(range(first, first + self.num_local))


@dataclass(frozen=True, kw_only=True)
class Instant:
    """A call of a function of laconic, at which a rank stops: [Note: Instants of a process]."""

    rank: int
    call: int
    loops: bool = False
    """Whether it loops instead."""
    begins: Literal["at once", "published", "joined", "told"] = "at once"
    """Since when calls count: when the rank has published where it is, has found its neighbours, or calls `tell`."""


_told: list[bool] = []


def tell() -> None:
    """Let the calls of this rank count from now on."""
    _told.append(True)


def at_call(number: int, strike: Callable[[], object], begins: Callable[[], bool] = lambda: True) -> Callable[[], int]:
    """Call `strike` at this thread's n-th call of a function of laconic. Returns what tells how many there were."""
    count, passed = itertools.count(1), [0]

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/laconic/" in frame.f_code.co_filename and (passed[0] or begins()):
            passed[0] = next(count)
            if passed[0] == number:
                sys.setprofile(None)
                strike()

    sys.setprofile(look)
    return lambda: passed[0]


@dataclass(kw_only=True)
class Victim:
    """One start of several ranks: its processes, by rank."""

    processes: list[Any]
    log: Path
    """The folder into whose files `rank-R` ranks print."""
    killed: set[int] = field(default_factory=set)
    """The ranks that the campaign has killed."""
    store: dist.TCPStore | None = None

    @staticmethod
    def start(
        function: Callable[..., int],
        arguments: Sequence[Any],
        place: Place,
        log: Path,
        *,
        instant: Instant | None = None,
        grace_s: float | None = GRACE_S,
        rank_0_hosts: bool = False,
    ) -> Victim:
        """Call `function(*arguments)` on every rank; its result is the exit code.

        Args:
            function: at the top level of a module; `arguments` can be pickled.
            arguments: of the function.
            place: the number of ranks.
            log: a new folder.
            instant: at which a rank stops.
            grace_s: the grace of `laconic.comm.failure`; None: its own.
            rank_0_hosts: rank 0 hosts the store in which ranks meet, as without torchrun; else the campaign does.
        """
        log.mkdir()
        port = free_port()
        store = None if rank_0_hosts else dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        processes = []
        for rank in range(place.num_ranks):
            environment = torchrun_environment(rank, place.num_ranks, place.num_local, port)
            # Else a rank is a client of the store that the campaign hosts, as it would be of the agent's.
            environment["TORCHELASTIC_USE_AGENT_STORE"] = str(not rank_0_hosts)
            processes.append(started(_be_rank, function, tuple(arguments), environment, str(log), instant, grace_s))
        return Victim(processes=processes, log=log, store=store)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        """Send a signal to those of `ranks` that are alive."""
        for rank in ranks:
            if self.processes[rank].exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.processes[rank].pid, number)
                    if number == signal.SIGKILL:
                        self.killed.add(rank)

    def reaches_instant(self, limit_s: float = 90.0) -> bool:
        """Wait for the instant. False if a rank has ended before."""
        deadline_s = time.monotonic() + limit_s
        while not (self.log / _STRUCK).exists():
            if len(self.alive()) < len(self.processes) or time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        return True

    def wait(self, limit_s: float, ranks: Sequence[int] | None = None) -> list[int]:
        """Wait until all ranks, or `ranks`, have ended, for `limit_s` seconds at most.

        Ends the rest, and returns those that were waited for; their stacks stand in the log.
        """
        awaited = [rank for rank in range(len(self.processes)) if ranks is None or rank in ranks]
        deadline_s = time.monotonic() + limit_s
        for rank in awaited:
            self.processes[rank].join(max(0.0, deadline_s - time.monotonic()))
        left = [rank for rank in self.alive() if rank in awaited]
        if left:
            self.send(signal.SIGUSR1, left)
            time.sleep(_STACKS_S)
        for process in self.processes:
            process.kill()
            process.join()
        self.store = None
        return left

    def text(self, rank: int) -> str:
        """What a rank has printed."""
        path = self.log / f"rank-{rank}"
        return path.read_text() if path.exists() else ""

    @property
    def exit_codes(self) -> list[int]:
        """The exit code of every rank, after `wait`."""
        return [process.exitcode for process in self.processes]


def _be_rank(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    log: str,
    instant: Instant | None,
    grace_s: float | None,
) -> NoReturn:
    from laconic.comm import failure

    os.setsid()
    rank, num_calls, code = int(environment["RANK"]), None, 1
    output = os.open(f"{log}/rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if grace_s is not None:
        failure._GRACE_S = grace_s
    os.environ.update(environment)
    torch.set_num_threads(1)

    def strike() -> None:
        Path(log, _STRUCK).touch()
        if instant.loops:  # type: ignore[union-attr]
            while True:
                pass
        os.kill(os.getpid(), signal.SIGSTOP)

    begins = {
        "at once": lambda: True,
        "published": lambda: failure._peers is not None,
        "joined": lambda: failure._peers is not None and failure._peers.ring.is_joined,
        "told": lambda: bool(_told),
    }
    try:
        if instant is not None and instant.rank == rank:
            num_calls = at_call(instant.call, strike, begins[instant.begins])
        code = function(*arguments)
    except BaseException as error:  # of any kind: what the interpreter would do
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.setprofile(None)
        if num_calls is not None:
            Path(log, _CALLS).write_text(str(num_calls()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- runs --------------------------------------------------------------------------------------------------------------

STEPS, SAVE_EVERY = 12, 2
PEER_TIMEOUT_S = 10.0
"""The time that a rank may wait for its peers, as the runs configure it."""
LIMIT_S = PEER_TIMEOUT_S + 25
"""The time after a fault in which all ranks must have ended, and a third of that in which a run must be complete.

A rank may have just been started when another is killed, and its imports take 10 s on a busy machine.
"""
_CYCLIC: dict[str, dict[str, Any]] = {
    "optimizer": {"max_grad_norm": 0.0},
    "schedule": {"kind": "cyclic", "cut_by": "parameters"},
}
ISLANDS = {"mode": "local", "every": 2, "recovery": "$FOLDER/recovery"}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way of training, as sections of the job."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    place: Place = field(default_factory=lambda: Place(num_ranks=4, num_local=2))
    is_exact: bool = True
    """Whether a run that was killed must end equal to the bit. Islands go on from the last sync or from an average."""


TWO_NODES, THREE_RANKS = Place(num_ranks=2, num_local=1), Place(num_ranks=3, num_local=3)
STRATEGIES: dict[str, Strategy] = {
    "cache none": Strategy(sections={"shard": {"cache": "none"}}),
    "cache host": Strategy(sections={"shard": {"cache": "host"}}),
    "cache device, saves in the background": Strategy(
        sections={"shard": {"cache": "device"}, "train": {"async_save": True}}
    ),
    "4bit": Strategy(sections={"shard": {"wire": "4bit"}, "train": {"accumulation": 2}}),
    "LoRA": Strategy(sections={"lora": {"enabled": True, "rank": 2, "dropout": 0.1}}),
    "Muon": Strategy(sections={"optimizer": {"name": "muon"}}, place=Place(num_ranks=3, num_local=1)),
    "islands": Strategy(sections={"sync": ISLANDS}, is_exact=False),
    "islands, streamed": Strategy(
        sections={"sync": {**ISLANDS, "every": 4, "fragments": 2, "overlap": 1}}, is_exact=False
    ),
    "islands, slices": Strategy(sections={"sync": {**ISLANDS, "slices": 2}}, is_exact=False, place=TWO_NODES),
    "cyclic": Strategy(sections=_CYCLIC, place=THREE_RANKS),
    "cyclic, sharded": Strategy(
        sections={**_CYCLIC, "schedule": {**_CYCLIC["schedule"], "states": "sharded"}}, place=THREE_RANKS
    ),
    "FSDP2": Strategy(sections={"shard": {"strategy": "fsdp2"}}, place=TWO_NODES),
    "DDP": Strategy(sections={"shard": {"strategy": "ddp"}}, place=TWO_NODES),
}
"""All strategies of the trainer, and the two of PyTorch that it offers beside them."""


@dataclass(kw_only=True)
class EndState:
    """The state of a run after its last step."""

    tensors: dict[str, Tensor]
    losses: dict[int, float]
    """The training loss of every step in metrics.jsonl. Islands that go on from a sync may lack the step before it."""
    eval_loss: float


class Run:
    """One run in a folder of its own, started as often as needed."""

    def __init__(self, strategy: Strategy, folder: Path, **train: Any) -> None:
        """Write the job into a new folder; `train` is laid over its section of that name."""
        self.strategy, self.folder = strategy, folder
        folder.mkdir()
        self._checkpoints = folder / "out" / "checkpoints"
        self.config = _config(strategy, folder, train)
        (folder / "job.toml").write_text(to_toml(self.config))
        self.arguments = [str(folder / "job.toml"), "--train.resume", "auto"]
        """The arguments of `laconic train`."""
        self._starts = 0

    def start(self, **options: Any) -> Victim:
        """Start the run on this machine; `options` are those of `Victim.start`."""
        from laconic.train import cli

        self._starts += 1
        log = self.folder / f"log-{self._starts}"
        return Victim.start(cli.main, [self.arguments], self.strategy.place, log, **options)

    def finish(self) -> str:
        """Let the run go on to its end; return the problem if it does not get there, else an empty text."""
        victim = self.start()
        left = victim.wait(3 * LIMIT_S)
        if left:
            return f"ranks {left} hang; log: {victim.log}"
        return f"exit codes {victim.exit_codes}; log: {victim.log}" if any(victim.exit_codes) else ""

    def count_calls(self, **since: Any) -> int:
        """Let the run go to its end; return the number of rank 0's calls, `since` an instant's `begins`."""
        victim = self.start(instant=Instant(rank=0, call=-1, **since))
        assert victim.wait(3 * LIMIT_S) == [], f"an undisturbed run hangs; log: {victim.log}"
        assert not any(victim.exit_codes), f"an undisturbed run failed; log: {victim.log}"
        return int((victim.log / _CALLS).read_text())

    def newest_step(self) -> int:
        """The step of the newest checkpoint, all of whose files are intact; 0 without one. Raises: ValueError."""
        if not self._checkpoints.is_dir() or not any(commit.candidates(self._checkpoints)):
            return 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a damaged checkpoint is one too many, even if another is intact
            try:
                return open_checkpoint(self._checkpoints).step
            except UserWarning as warning:
                raise ValueError(str(warning)) from None

    def end_state(self) -> EndState:
        """Read the state of the run, which has come to its end."""
        folder = self._checkpoints / f"step-{self.config.train.steps}"
        tensors = storage.entries_of(metadata := storage.read_metadata(folder))
        lines = [json.loads(line) for line in (self.folder / "out" / "metrics.jsonl").read_text().splitlines()]
        return EndState(
            tensors=storage.read_values(folder, metadata, tensors),
            losses={line["step"]: line["loss"] for line in lines if "loss" in line},
            eval_loss=[line["eval_loss"] for line in lines if "eval_loss" in line][-1],
        )


def _config(strategy: Strategy, folder: Path, train: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": "llama", **SMALL_LLAMA, "num_hidden_layers": 4}},
        "train": {
            "steps": STEPS, "micro_batch_size": 1, "save_every": SAVE_EVERY, "eval_every": STEPS, "log_every": 1,
            "timeout_s": PEER_TIMEOUT_S,
        },
    }  # fmt: skip
    for section, values in (*strategy.sections.items(), ("train", train)):
        filled = {k: v.replace("$FOLDER", str(folder)) if isinstance(v, str) else v for k, v in values.items()}
        sections[section] = {**sections.get(section, {}), **filled}
    return job(folder, **sections)


def difference(found: EndState, expected: EndState) -> str:
    """Describe how two end states differ; an empty text if they are equal to the bit."""
    steps = [step for step, loss in expected.losses.items() if found.losses.get(step) != loss]
    if found.tensors.keys() != expected.tensors.keys():
        return "other tensors"
    names = [name for name, tensor in expected.tensors.items() if not torch.equal(found.tensors[name], tensor)]
    if not steps and not names:
        return ""
    return f"losses of steps {steps}; {len(names)} of {len(expected.tensors)} tensors, such as {names[:2]}"
