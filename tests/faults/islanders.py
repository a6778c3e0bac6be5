"""Islands that come and go, each a job of its own on this machine, and the faults that may happen to them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic import LocalSteps, Membership
from tests.faults.victims import at_call
from tests.support import launch
from tests.support.sharded_net import full_parameters, shard

EVERY = 3
_WIDTH, _LAYERS = 11, 3
_WAIT_S = 90.0
STUCK_S = 30.0
CHECKPOINT = "checkpoint.pt"
"""The state that island 0 leaves as it ends, and that later islands begin with."""
STRIKE = "strike"
"""Tells a rank to send itself a signal, at a call of laconic's functions after its next step begins."""


def make_model() -> nn.Module:
    """A small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss(model: nn.Module, number: int, step: int, rank: int = 0) -> Tensor:
    """The loss of a step of island `number`, on rows that depend on the arguments."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    inputs, targets = (torch.randn(4, _WIDTH, generator=generator) for _ in range(2))
    return (model(inputs) - targets).square().mean()


@dataclass(frozen=True, kw_only=True)
class Life:
    """The life of an island."""

    policy: Membership
    options: dict[str, Any] = field(default_factory=dict)
    """Options of LocalSteps."""
    last: int
    """The round after which it ends."""
    step_s: float = 0.0
    """The least seconds of a step."""
    tokens: int = 1
    dies_at: int = 0
    """The step in which it is killed."""
    comes_after: int = 0
    """The round of the first island after which it comes, where islands take turns."""
    resumes: bool = False
    """True if it comes when the others have left, where islands take turns."""
    is_stuck_at: int = 0
    """The step in which it does nothing, for `STUCK_S`."""
    fails_at: int = 0
    """The step in which its loss is NaN."""


class Round(NamedTuple):
    """A round as an island saw it."""

    number: int
    step: int
    num_islands: int
    digest: str
    """Of the outer parameters after the round."""
    exposed_s: float
    """The seconds that training waited for the mean."""


def live(life: Life, rank: int, size: int, folder: Path, queue: Any) -> None:
    """Be one rank of an island, in a process of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        queue.put((rank, _train(life, folder)))
    except Exception as error:
        queue.put((rank, f"{type(error).__name__}: {error}"))
        raise


def live_by_turns(lives: Sequence[Life], folder: Path) -> dict[str, Any]:
    """Be one rank of the island that has the number of this job: [Note: Turns] in laconic/rehearse/turns.py."""
    job = int(os.environ["LACONIC_JOB"])
    life, folders = lives[job], [folder / f"island-{number}" for number in range(len(lives))]
    folders[job].mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    _wait(lambda: len(rounds_in(folders[0])) >= life.comes_after, f"round {life.comes_after}")
    if life.resumes:
        before = [each / "left" for each, its in zip(folders, lives, strict=True) if not its.resumes]
        _wait(lambda: all(left.exists() for left in before), "the end of the others")
    return _train(life, folders[job])


def _train(life: Life, folder: Path) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, model = laconic.init_mesh("cpu", islands=1, nodes=1, local=size), make_model()
    if size > 1:
        shard(model, list(model.children()), mesh=mesh)
    options = {"every": EVERY, "codec": "fp32", "membership": life.policy, **life.options}
    local = LocalSteps(model, adamw(model), mesh=mesh, run_id="trust", **options)
    checkpoint = folder.parent / CHECKPOINT
    if checkpoint.exists():
        local.load_state_dict(torch.load(checkpoint))
    begun, number = local.enter(), local.number
    (folder / "entered").write_text(str(local.slot))
    with (folder / f"rounds-{rank}.jsonl").open("w", buffering=1) as lines:
        while local.rounds < life.last:
            step, order = local.steps + 1, folder / STRIKE
            if rank == 0 and order.exists():
                call, number_ = map(int, order.read_text().split())
                order.unlink()
                at_call(call, functools.partial(os.kill, os.getpid(), number_))
            if step == life.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == life.is_stuck_at:
                time.sleep(STUCK_S)
            value = loss(model, number, step, rank)
            (value * float("nan") if step == life.fails_at else value).backward()
            local.step(tokens=life.tokens)
            local.zero_grad()
            for report in local.reports:
                flat = torch.cat([fragment.flat for fragment in local.fragments])
                digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
                seen = Round(local.rounds, report.step, report.num_islands, digest, report.exposed_s)
                lines.write(json.dumps(seen) + "\n")
            time.sleep(life.step_s)
    slot = local.slot
    local.leave()
    with local.outer_parameters():
        whole = full_parameters(model) if size > 1 else dict(model.named_parameters())
        outer = {name: value.tolist() for name, value in whole.items()}
    if size == 1 and number == 0:
        torch.save(local.state_dict(), checkpoint)
    (folder / "left").touch()
    return {"number": number, "slot": slot, "begun": begun, "outer": outer}


def rounds_in(folder: Path) -> list[Round]:
    """The rounds so far on rank 0 of the island with this folder."""
    path = folder / "rounds-0.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Round(*json.loads(line)) for line in lines]


class Island:
    """One island's processes."""

    def __init__(self, life: Life, folder: Path, size: int = 1) -> None:
        """Start `size` ranks, which leave their files in `folder`."""
        folder.mkdir()
        self.folder, self.size, self._queue = folder, size, launch.context.Queue()
        self.processes = [launch.started(live, life, rank, size, folder, self._queue) for rank in range(size)]

    def result(self) -> Any:
        """The result of rank 0, or the message of its error. Waits for all ranks."""
        return dict(self._queue.get(timeout=_WAIT_S) for _ in range(self.size))[0]

    def rounds(self) -> list[Round]:
        """The rounds so far, on rank 0."""
        return rounds_in(self.folder)

    def wait_for_round(self, number: int) -> None:
        """Wait until a round has been applied."""
        _wait(lambda: any(each.number >= number for each in self.rounds()), f"round {number} in {self.folder}")

    def wait_for(self, name: str) -> None:
        """Wait for a file of the island, such as "entered"."""
        _wait((self.folder / name).exists, f"{self.folder / name}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks."""
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def strike(self, number: signal.Signals, call: int) -> None:
        """Let rank 0 send itself a signal at a call of laconic's functions, and the others at once after it."""
        written = self.folder / "order"
        written.write_text(f"{call} {number}")
        written.rename(self.folder / STRIKE)
        _wait(lambda: not (self.folder / STRIKE).exists(), "the next step")
        if number == signal.SIGKILL:
            self.processes[0].join()
        for process in self.processes[1:]:
            os.kill(process.pid, number)

    def kill(self) -> None:
        """End all ranks at once."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()


def _wait(condition: Callable[[], bool], awaited: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{awaited} did not come within {_WAIT_S:g} s")
        time.sleep(0.02)


@contextmanager
def meeting(folder: Path) -> Iterator[tuple[str, Callable[..., Island]]]:
    """Yield the address of a rendezvous, and a function that starts an island. All ends with the block."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[Island] = []

    def start(size: int = 1, **life: Any) -> Island:
        started.append(Island(Life(**life), folder / f"island-{len(started)}", size))
        return started[-1]

    try:
        yield f"127.0.0.1:{store.port}", start
    finally:
        for island in started:
            island.kill()


def equal_rounds(rounds_of_islands: Iterable[list[Round]]) -> tuple[dict[int, int], list[int]]:
    """Compare the outer parameters of islands after each round, to the bit.

    Returns the number of members in each round, and the rounds in which islands differ.
    """
    found: dict[int, set[tuple[int, str]]] = {}
    for each in itertools.chain.from_iterable(rounds_of_islands):
        found.setdefault(each.number, set()).add((each.num_islands, each.digest))
    return {number: min(same)[0] for number, same in found.items()}, [n for n, same in found.items() if len(same) > 1]
