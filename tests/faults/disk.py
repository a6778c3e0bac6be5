"""Folders that cannot be written: full, read-only or forbidden, before a run or in the middle of one.

Each situation runs `laconic train` on two ranks, threads of a process, or `laconic export`. The process has mounts of
its own, as root or in a user namespace. Both ranks must end with exit code 2 and one line, and must lose nothing:
once the fault is gone, `--train.resume auto` ends with the losses of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from laconic import rehearse
from laconic.config import Config, to_toml
from laconic.lab import linux
from tests.faults.bench import Bench, Found, campaign
from tests.support import jobs
from tests.support.launch import launch

Fault = Callable[[Path], AbstractContextManager[None]]
STEPS, SAVE_EVERY = 4, 2
HARMS = ("silent", "tracebacks or several lines", "losses of data", "restarts blocked")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PRIVATE, _REMOUNT, _READ_ONLY, _DETACH, _DAC_OVERRIDE, _CAPABILITY_VERSION = 1 << 18, 32, 1, 2, 1 << 1, 0x20080522


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One fault of one folder."""

    fault: Fault
    folder: str
    """The folder that gets the fault, below that of the situation."""
    at_step: int = 0
    """The step before which the fault begins; 0: before the command."""
    resumes: bool = False
    """Whether a run of two steps comes before the command, which then resumes it."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    exports: bool = False
    """Whether the command is `laconic export`, of a run that has ended."""


# -- faults ------------------------------------------------------------------------------------------------------------


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


@contextlib.contextmanager
def _mounted(folder: Path, *mounts: tuple[bytes, int, bytes]) -> Iterator[None]:
    """Mount something there: kind, flags and options (man 2 mount)."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, flags, options in mounts:
        _call("mount", os.fsencode(folder), os.fsencode(folder), kind, ctypes.c_ulong(flags), options)
    try:
        yield
    finally:
        _call("umount2", os.fsencode(folder), _DETACH)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """A disk without room: `folder` must be a small mount."""
    filler = folder / ".filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 9, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    try:
        yield
    finally:
        filler.unlink()


def read_only(folder: Path) -> AbstractContextManager[None]:
    """A file system that is mounted read-only."""
    return _mounted(folder, (b"none", linux.MS_BIND, b""), (b"none", linux.MS_BIND | _REMOUNT | _READ_ONLY, b""))


@contextlib.contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """A folder that this user may read but not write; root, too, who gives up that capability."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)


def _give_up_roots_permission() -> None:
    """Refuse root in this thread what other users may not write."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capget", header, sets)
    sets[0] &= ~_DAC_OVERRIDE  # of those in effect
    _call("capset", header, sets)


_LONG = {"steps": 30, "save_every": 12}  # a few lines still fit into the last page of a file on a full disk
_PLAIN = {"tensorboard": False, "jsonl": False}
_ALWAYS: dict[str, dict[str, Any]] = {
    "output folder": {"folder": "out"},
    "tokens": {"folder": "tokens"},
    "resume": {"folder": "out", "resumes": True},
    "export": {"folder": "exported", "exports": True},
}
_ON_FULL: dict[str, dict[str, Any]] = {
    "metrics": {"at_step": 13, "settings": {"log": {"tensorboard": False}, "train": _LONG}},
    "TensorBoard": {"at_step": 13, "settings": {"log": {"jsonl": False}, "train": _LONG}},
    "checkpoint": {"at_step": 3, "settings": {"log": _PLAIN}},
    "checkpoint in the background": {"at_step": 3, "settings": {"log": _PLAIN, "train": {"async_save": True}}},
    "summary": {"at_step": 4, "settings": {"log": _PLAIN, "train": {"save_every": -1}}},
}
SITUATIONS: dict[str, Situation] = {
    **{
        f"{fault.__name__}: {name}": Situation(fault=fault, **options)
        for fault in (full, read_only, forbidden)
        for name, options in _ALWAYS.items()
    },
    **{f"full: {name}": Situation(fault=full, folder="out", **options) for name, options in _ON_FULL.items()},
    "read_only: checkpoint": Situation(fault=read_only, folder="out/checkpoints", at_step=3),
    "forbidden: checkpoint": Situation(fault=forbidden, folder="out/checkpoints", at_step=3),
    "forbidden: TensorBoard": Situation(fault=forbidden, folder="out/tensorboard", resumes=True),
}
SAMPLE = ("full: checkpoint", "read_only: tokens", "forbidden: output folder")


# -- the campaign ------------------------------------------------------------------------------------------------------


@campaign(
    "disk",
    "full, read-only, forbidden folders: one line and exit code 2 on each rank, nothing lost, and the run goes on",
    harms=HARMS,
)
def folders(bench: Bench) -> Found:
    """Try all situations, each in a process of its own."""
    names, found = SAMPLE if bench.quick else tuple(SITUATIONS), list[str]()
    for name in names:
        folder = bench.out / "disk" / name.replace(": ", "-")
        found += launch(try_all, [name], folder, num_ranks=1, timeout_s=600, backend=None)[0]
    return len(names), found, ", ".join(names)


def try_all(names: Sequence[str], work: Path) -> list[str]:
    """Try situations in this process, which gets mounts of its own; return the harms, each with its situation."""
    user, group = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWNS | (0 if user == 0 else linux.CLONE_NEWUSER))
    if user != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    linux.mount("none", "/", flags=_PRIVATE | linux.MS_REC)
    harms = []
    for number, name in enumerate(names):
        (work / str(number)).mkdir(parents=True)
        harms += [f"{harm}; {name}" for harm in _try(SITUATIONS[name], work / str(number))]
    return harms


def _try(situation: Situation, work: Path) -> Iterator[str]:
    goal = [] if situation.exports else _train(_job(work, "whole", situation))[1]
    job, target = _job(work, "out", situation), work / situation.folder
    resumed, out = _changed(job, resume="auto"), Path(job.train.output)

    def export() -> int:
        from laconic.models.export_cli import main

        return main([str(out), str(target / "model")])

    with ExitStack() as disks:
        if situation.fault is full:
            disks.enter_context(_mounted(target, (b"tmpfs", 0, b"size=64m")))
        if situation.resumes or situation.exports:
            _train(job if situation.exports else _changed(job, steps=SAVE_EVERY))
        with ExitStack() as faults:
            begun: list[object] = []

            def begin() -> None:
                """Begin the fault, on each rank."""
                if not begun:
                    begun.append(faults.enter_context(situation.fault(target)))
                if situation.fault is forbidden:
                    _give_up_roots_permission()

            if situation.exports:
                ends = rehearse.ranks(lambda: (begin(), _captured(export))[1])
            else:
                ends, _ = _train(resumed, situation.at_step, begin)
        for rank, (code, lines) in enumerate(ends):
            if code == 0:
                yield f"silent {lines} on rank {rank}"
            elif code != 2 or len(lines) != 1:
                yield f"tracebacks or several lines: exit code {code}, {lines} on rank {rank}"
        yield from _lost(out)
        if situation.exports:
            if (target / "model").exists() or _captured(export)[0] != 0:
                yield "restarts blocked"
            return
        ends, losses = _train(resumed)
        if any(code for code, _ in ends):
            yield f"restarts blocked: {ends}"
        elif losses != goal[-len(losses) :]:
            yield f"losses of data: {losses} instead of {goal}"


def _lost(out: Path) -> Iterator[str]:
    """Damage of what the run wrote before the fault."""
    from laconic.checkpoint import open_checkpoint

    complete = [path for path in (out / "checkpoints").glob("step-*") if not path.suffix]
    if complete and open_checkpoint(out / "checkpoints").step < SAVE_EVERY:
        yield "losses of data: the checkpoint"
    if (metrics := out / "metrics.jsonl").exists():
        steps = [row["step"] for row in map(json.loads, metrics.read_bytes().splitlines()) if "loss" in row]
        if steps != [*range(1, len(steps) + 1)]:
            yield "losses of data: metrics"


def _job(work: Path, output: str, situation: Situation) -> Config:
    cache, train = "tokens" if output == "out" else "other-tokens", situation.settings.get("train", {})
    plain = {"steps": STEPS, "output": str(work / output), "save_every": SAVE_EVERY, "log_every": 1}
    return jobs.job(
        work,
        data={"eval_fraction": 0.0, "cache": str(work / cache)},
        log={"tensorboard": True, **situation.settings.get("log", {})},
        train={**plain, **train},
    )


def _changed(job: Config, **train: Any) -> Config:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **train))


End = tuple[int, list[str]]
"""The exit code of a rank, and its lines on stderr."""


def _train(job: Config, at_step: int = 0, begin: Callable[[], None] = lambda: None) -> tuple[list[End], list[float]]:
    """Run `laconic train` with a fault that begins before step `at_step`; return how ranks ended, and the losses."""
    from laconic.train.cli import main
    from laconic.train.loop import Trainer

    path, take_step = Path(job.train.output).with_suffix(".toml"), Trainer._step
    path.write_text(to_toml(job))

    def step(self: Trainer, number: int) -> Any:
        if number + 1 == at_step:
            begin()
        return take_step(self, number)

    def body() -> End:
        if not at_step:
            begin()
        return _captured(lambda: main([str(path)]))

    with mock.patch.object(Trainer, "_step", step):
        ends = rehearse.ranks(body, nodes=2)
    summary = Path(job.train.output) / "summary.json"
    return ends, json.loads(summary.read_text())["losses"] if ends[0][0] == 0 else []


def _captured(command: Callable[[], int]) -> End:
    """The exit code of a command, and the lines that it writes to stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command()
        except BaseException:  # what the user would see
            traceback.print_exc()
            code = 1
    return code, [line for line in errors.getvalue().splitlines() if line.strip()]
