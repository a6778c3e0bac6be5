"""Ranks that stay alive between cases, so that a case costs milliseconds."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic.comm.speed import AS_IN_A_RACK
from laconic.shard import choosing
from tests.shard.random_trees.case import Axes, Case
from tests.shard.random_trees.compare import differences
from tests.shard.random_trees.play import play_oracle, play_rank
from tests.support.launch import launch

_CASE_S = 60.0
_LATER_S = 1.0
"""How long ranks may take after one has failed."""
_FOREVER_S = 1e6
_LIBRARY = str(Path(laconic.__file__).parent)
_REFUSALS = (ValueError, RuntimeError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Failure:
    """An exception on a rank."""

    is_refusal: bool
    """True if laconic raised it with words of its own."""
    summary: str
    """The exception and, if it is foreign, where it was raised."""
    text: str
    """The whole traceback."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Classify an exception that is being handled."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        is_ours = frame.filename.startswith(_LIBRARY) and line.startswith("raise ")
        is_refusal = is_ours and isinstance(error, _REFUSALS)
        message = " ".join(str(error).split())[:300]
        summary = f"{type(error).__name__}: {message}"
        if not is_refusal:
            ours = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(_LIBRARY)]
            places = [f"{Path(each.filename).name}:{each.name}" for each in (*ours[-1:], frame)]
            summary += f" at {' > '.join(dict.fromkeys(places))}"
        return cls(is_refusal, summary, "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Outcome:
    """The result of a case: "equal", "differs", "refused", "foreign", or "invalid" if torch itself cannot run it."""

    kind: str
    details: tuple[str, ...] = ()
    text: str = ""

    @property
    def signature(self) -> str:
        """The class of the failure: the first detail without what is particular to the case."""
        detail = self.details[0] if self.details else ""
        detail = re.sub(r"^(output|x)\s?\d+", r"\1", detail)
        detail = re.sub(r"^[\w.]+\.grad \(", "p.grad (", detail)
        detail = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "#", detail)
        return f"{self.kind}: {detail}"


class Pool:
    """Long-lived ranks of one world."""

    def __init__(self, world: int) -> None:
        """Start nothing yet; the first case starts the ranks."""
        self.world = world
        self._thread: threading.Thread | None = None
        self._connections: list[Connection] = []
        self._end = ""
        """Why the ranks ended."""
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def check(self, case: Case) -> Outcome:
        """Play a case on the ranks and on the oracle, and compare."""
        self._start()
        message = pickle.dumps(case)
        for connection in self._connections:
            connection.send_bytes(message)
        torch.set_num_threads(1)
        problem = None
        try:
            with warnings.catch_warnings(action="ignore"):
                wanted = play_oracle(case)
        except Exception as error:
            problem = Failure.of(error)
        found = self._receive()
        failures = [answer for answer in found if isinstance(answer, Failure)]
        if failures or len(found) < self.world:
            self.stop()
        if problem is not None:
            return Outcome("invalid", (problem.summary,), problem.text)
        if failures:
            foreign = [failure for failure in failures if not failure.is_refusal]
            first = min(foreign or failures, key=lambda failure: "peer" in failure.summary)
            return Outcome("foreign" if foreign else "refused", (first.summary,), first.text)
        if len(found) < self.world:
            stacks = self._stacks()
            return Outcome("foreign", (f"{self._end} at {_last_place(stacks)}",), stacks)
        details = tuple(differences(case, [pickle.loads(answer) for answer in found], wanted))
        return Outcome("differs" if details else "equal", details)

    def stop(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
            connection.close()
        if self._thread is not None:
            self._thread.join()
        self._connections, self._thread = [], None

    def _start(self) -> None:
        if self._thread is not None:
            return
        pairs = [multiprocessing.Pipe() for _ in range(self.world)]
        self._connections = [ours for ours, _ in pairs]
        theirs = [each for _, each in pairs]
        self._thread = threading.Thread(target=self._launch, args=(theirs,), daemon=True)
        self._thread.start()

    def _launch(self, connections: list[Connection]) -> None:
        try:
            launch(_serve, connections, self._folder.name, num_ranks=self.world, timeout_s=_FOREVER_S)
        except RuntimeError as error:
            self._end = str(error)

    def _receive(self) -> list[Any]:
        """Receive the ranks' answers: traces or failures, less those of ranks that hang or were killed."""
        answers: dict[int, Any] = {}
        has_failed = False
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        assert self._thread is not None
        while waiting:
            is_alive = self._thread.is_alive()
            ready = wait(list(waiting), timeout=_LATER_S)
            if not ready and (has_failed or not is_alive):
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                has_failed = has_failed or not isinstance(answers.get(rank), bytes)
        return [answers[rank] for rank in sorted(answers)]

    def _stacks(self) -> str:
        files = sorted(Path(self._folder.name).glob("rank*"))
        texts = [file.read_text().partition("Extension modules")[0].strip() for file in files]
        return "\n\n".join(texts)


def _last_place(stacks: str) -> str:
    """The innermost functions of laconic in the stack of the first rank that hangs or has crashed."""
    found = re.findall(rf'File "{re.escape(_LIBRARY)}/(\S+)", line \d+,? in (\w+)', stacks.partition("\n\n")[0])
    return " > ".join(f"{file}:{function}" for file, function in found[-3:]) or "an unknown place"


def _serve(connections: list[Connection], folder: str) -> None:
    """Play the cases that come, until an empty message or the end of the parent."""
    rank = dist.get_rank()
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    connection = connections[rank]
    mesh = _meshes()
    choosing.measure_gathers = lambda cluster, level: AS_IN_A_RACK[level]  # a case has one choice
    warnings.simplefilter("ignore")
    stacks = Path(folder) / f"rank{rank}"
    crash = open(stacks, "w")  # noqa: SIM115  # open as long as the rank lives
    faulthandler.enable(crash)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            os._exit(0)
        case = pickle.loads(message)
        watchdog = threading.Timer(_CASE_S, _give_up, (threading.get_ident(), stacks))
        watchdog.daemon = True
        watchdog.start()
        try:
            answer: Any = pickle.dumps(play_rank(case, rank, mesh(case.axes)))
        except BaseException as error:
            answer = Failure.of(error)
        watchdog.cancel()
        connection.send_bytes(pickle.dumps(answer))


def _give_up(thread: int, stacks: Path) -> None:
    """Write where the thread hangs, and end the rank."""
    stacks.write_text("".join(traceback.format_stack(sys._current_frames()[thread])))
    time.sleep(_LATER_S)  # the first rank that ends takes the others with it
    os._exit(1)


def _meshes() -> Callable[[Axes], DeviceMesh | None]:
    made: dict[Axes, DeviceMesh] = {}

    def mesh(axes: Axes) -> DeviceMesh | None:
        if axes is None:
            return None
        if axes not in made:
            names = ("island", "node", "local")[-len(axes) :] if len(axes) > 1 else ("dp",)
            made[axes] = init_device_mesh("cpu", axes, mesh_dim_names=names)
        return made[axes]

    return mesh
