"""Folders that cannot be written: full, read-only or forbidden, before a run or in the middle of one.

Each situation runs `laconic train` on two ranks, threads of a process, or `laconic export`. The process has mounts of
its own, as root or in a user namespace. Both ranks must end with exit code 2 and one line, and must lose nothing:
once the fault is gone, `--train.resume auto` ends with the losses of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from laconic import rehearse
from laconic.config import Config, to_toml
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support import jobs
from tests.support.launch import launch
from tests.support.record import Row

Fault = Callable[[Path], AbstractContextManager[None]]
STEPS, SAVE_EVERY = 4, 2
HARMS = ("silent", "tracebacks or several lines", "losses of data", "restarts blocked")
_MOUNT_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One fault of one folder."""

    name: str
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


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """A disk without room: `folder` must be a mount of `small_disk`."""
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


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A file system that is mounted read-only."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, folder, flags=_BIND)
    _mount(folder, folder, flags=_BIND | _REMOUNT | _READ_ONLY)
    try:
        yield
    finally:
        _unmount(folder)


@contextlib.contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """A folder that this user may read but not write; root, too, once `give_up_roots_permission` has been called."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", folder, kind="tmpfs", options=f"size={_MOUNT_BYTES}")
    try:
        yield
    finally:
        _unmount(folder)


_LONG = {"steps": 30, "save_every": 12}  # a few lines still fit into the last page of a file on a full disk
_PLAIN = {"tensorboard": False, "jsonl": False}
SITUATIONS: Sequence[Situation] = (
    *(
        situation
        for fault in (full, read_only, forbidden)
        for situation in (
            Situation(name=f"{fault.__name__}: output folder", fault=fault, folder="out"),
            Situation(name=f"{fault.__name__}: tokens", fault=fault, folder="tokens"),
            Situation(name=f"{fault.__name__}: resume", fault=fault, folder="out", resumes=True),
            Situation(name=f"{fault.__name__}: export", fault=fault, folder="exported", exports=True),
        )
    ),
    *(
        Situation(name=f"full: {name}", fault=full, folder="out", at_step=13, settings={"log": log, "train": _LONG})
        for name, log in (("metrics", {"tensorboard": False}), ("TensorBoard", {"jsonl": False}))
    ),
    Situation(name="full: checkpoint", fault=full, folder="out", at_step=3, settings={"log": _PLAIN}),
    Situation(
        name="full: checkpoint in the background",
        fault=full,
        folder="out",
        at_step=3,
        settings={"log": _PLAIN, "train": {"async_save": True}},
    ),
    Situation(
        name="full: summary", fault=full, folder="out", at_step=4, settings={"log": _PLAIN, "train": {"save_every": -1}}
    ),
    Situation(name="read-only: checkpoint", fault=read_only, folder="out/checkpoints", at_step=3),
    Situation(name="forbidden: checkpoint", fault=forbidden, folder="out/checkpoints", at_step=3),
    Situation(name="forbidden: TensorBoard", fault=forbidden, folder="out/tensorboard", resumes=True),
)
SAMPLE = ("full: checkpoint", "read_only: tokens", "forbidden: output folder")


# -- the campaign ------------------------------------------------------------------------------------------------------


@campaign_row("disk")
def row(bench: Bench) -> Row:
    """Try all situations, each in a process of its own."""
    chosen = [situation for situation in SITUATIONS if not bench.quick or situation.name in SAMPLE]
    found: list[str] = []
    for number, situation in enumerate(chosen):
        harms = launch(
            try_all, [situation.name], bench.out / f"disk-{number}", num_ranks=1, timeout_s=600, backend=None
        )[0]
        print(situation.name, harms, flush=True)
        found += harms
    return faults_row(
        claim="full, read-only, forbidden folders: one line and exit code 2 on each rank, nothing lost, "
        "and the run goes on",
        tried=len(chosen),
        at_least=16,
        harms={harm: sum(harm in one for one in found) for harm in HARMS},
        note="Output folder, tokens, metrics, TensorBoard, checkpoints, summary and export, before a run or within it; "
        "tmpfs without room, mounts that are read-only, folders without permission.",
    )


def try_all(names: Sequence[str], work: Path) -> list[str]:
    """Try situations in this process, which gets mounts of its own; return the harms, each with its situation."""
    _own_mounts()
    harms = []
    for number, situation in enumerate(one for one in SITUATIONS if one.name in names):
        folder = work / str(number)
        folder.mkdir(parents=True)
        harms += [f"{situation.name}: {harm}" for harm in _try(situation, folder)]
    return harms


def _try(situation: Situation, work: Path) -> Iterator[str]:
    goal = [] if situation.exports else _losses(_train(_job(work, work / "whole", situation))[1])
    job = _job(work, work / "out", situation)
    out, target = Path(job.train.output), work / situation.folder
    export = functools.partial(_export, out, target / "model")
    with ExitStack() as disks:
        if situation.fault is full:
            disks.enter_context(small_disk(target))
        if situation.resumes or situation.exports:
            _train(job if situation.exports else _changed(job, steps=SAVE_EVERY))
        with ExitStack() as faults:
            begun: list[object] = []

            def begin() -> None:
                """Begin the fault, on each rank."""
                if not begun:
                    begun.append(faults.enter_context(situation.fault(target)))
                if situation.fault is forbidden:
                    give_up_roots_permission()

            if situation.exports:
                ends = rehearse.ranks(lambda: (begin(), _captured(export))[1])
            else:
                ends, _ = _train(_changed(job, resume="auto"), situation.at_step, begin)
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
        ends, summary = _train(_changed(job, resume="auto"))
        if any(code for code, _ in ends):
            yield f"restarts blocked: {ends}"
        elif (losses := _losses(summary)) != goal[-len(losses) :]:
            yield f"losses of data: {losses} instead of {goal}"


def _lost(out: Path) -> Iterator[str]:
    """Damage of what the run wrote before the fault."""
    from laconic.checkpoint import open_checkpoint
    from laconic.train.loggers import read_metrics

    complete = [path for path in (out / "checkpoints").glob("step-*") if not path.suffix]
    if complete and open_checkpoint(out / "checkpoints").step < SAVE_EVERY:
        yield "losses of data: the checkpoint"
    if (out / "metrics.jsonl").exists() and any(read_metrics(out / "metrics.jsonl")[1:]):
        yield "losses of data: metrics"


def _job(work: Path, output: Path, situation: Situation) -> Config:
    cache = work / ("tokens" if output.name == "out" else "other-tokens")
    sections: dict[str, dict[str, Any]] = {
        "data": {"eval_fraction": 0.0, "cache": str(cache)},
        "log": {"tensorboard": True},
    }
    sections["train"] = {"steps": STEPS, "output": str(output), "save_every": SAVE_EVERY, "log_every": 1}
    for section, values in situation.settings.items():
        sections[section] = {**sections.get(section, {}), **values}
    return jobs.job(work, **sections)


def _changed(job: Config, **train: Any) -> Config:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **train))


_End = tuple[int, list[str]]
"""The exit code of a rank, and its lines on stderr."""


def _train(job: Config, at_step: int = 0, begin: Callable[[], None] = lambda: None) -> tuple[list[_End], Any]:
    """Run `laconic train` with a fault that begins before step `at_step`; return how ranks ended, and the summary."""
    from laconic.train.cli import main
    from laconic.train.loop import Trainer

    path, take_step = Path(job.train.output).with_suffix(".toml"), Trainer._step
    path.write_text(to_toml(job))

    def step(self: Trainer, number: int) -> Any:
        if number + 1 == at_step:
            begin()
        return take_step(self, number)

    def body() -> _End:
        if not at_step:
            begin()
        return _captured(lambda: main([str(path)]))

    with mock.patch.object(Trainer, "_step", step):
        ends = rehearse.ranks(body, nodes=2)
    summary = Path(job.train.output) / "summary.json"
    return ends, json.loads(summary.read_text()) if ends[0][0] == 0 else None


def _export(run: Path, out: Path) -> int:
    from laconic.hf.export_cli import main

    return main([str(run), str(out)])


def _captured(command: Callable[[], int]) -> tuple[int, list[str]]:
    """The exit code of a command, and the lines that it writes to stderr."""
    import traceback

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command()
        except BaseException:  # what the user would see
            traceback.print_exc()
            code = 1
    return code, [line for line in errors.getvalue().splitlines() if line.strip()]


def _losses(summary: dict[str, Any]) -> list[float]:
    return summary["losses"]


# -- the kernel --------------------------------------------------------------------------------------------------------

_BIND, _REMOUNT, _READ_ONLY, _PRIVATE, _RECURSIVE = 4096, 32, 1, 1 << 18, 16384
_NEW_MOUNTS, _NEW_USER, _DETACH = 0x20000, 0x10000000, 2
_CAP_DAC_OVERRIDE = 1 << 1
_CAPABILITY_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    """The first 32 capabilities of this thread, and the others."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("effective", "permitted", "inheritable", "effective_2", "permitted_2", "inheritable_2")
    )


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _own_mounts() -> None:
    """Give this process mounts of its own, and the right to mount."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_MOUNTS | (0 if user == 0 else _NEW_USER))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("none", Path("/"), flags=_PRIVATE | _RECURSIVE)


def _mount(source: Path | str, target: Path, *, kind: str = "none", flags: int = 0, options: str = "") -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _unmount(target: Path) -> None:
    _call("umount2", os.fsencode(target), _DETACH)


def give_up_roots_permission() -> None:
    """Refuse root in this thread what other users may not write."""
    found = _Capabilities()
    _call("capget", ctypes.byref(_Header(_CAPABILITY_VERSION, 0)), ctypes.byref(found))
    found.effective &= ~_CAP_DAC_OVERRIDE
    _call("capset", ctypes.byref(_Header(_CAPABILITY_VERSION, 0)), ctypes.byref(found))
