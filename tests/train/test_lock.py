"""One run per output folder, and ranks that end with their launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.comm.launch import ending_with_launcher
from laconic.config import Config, JobError
from laconic.train import lock
from laconic.train.cli import main
from tests.support.jobs import job, refusal, train
from tests.support.launch import run_ranks


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    with lock.output_lock(tmp_path / "out"):
        with pytest.raises(JobError, match=f"pid {os.getpid()}\\)"), lock.output_lock(tmp_path / "out"):
            pass
        (tmp_path / "out" / lock.LOCK).write_text("garbage")
        with pytest.raises(JobError, match="in use by another run; wait"), lock.output_lock(tmp_path / "out"):
            pass
    with lock.output_lock(tmp_path / "out"):
        pass


@pytest.mark.machine
def test_a_killed_run_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if a process that it has forked lives on."""
    ready, told = os.pipe()
    if (run := os.fork()) == 0:
        with lock.output_lock(tmp_path):
            if (child := os.fork()) == 0:
                signal.pause()
            os.write(told, str(child).encode())
            signal.pause()
    child = int(os.read(ready, 20))
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_PATIENCE_S", 0.0)
        with pytest.raises(JobError, match=f"in use by another run .*pid {run}"), lock.output_lock(tmp_path):
            pass
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    with lock.output_lock(tmp_path):
        os.kill(child, 0)  # it lives
    os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock.output_lock(tmp_path):
        pass
    assert "cannot be locked ([Errno 38] Function not implemented): make sure" in capsys.readouterr().err


def every_rank(config: Config, other: Config) -> list[str]:
    """Refusals of a locked folder, of metrics that do not fit the disk, and of nodes with other tokens."""
    from laconic.data import arrays
    from laconic.train import loggers

    rank, messages = int(os.environ["RANK"]), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "_PATIENCE_S", 0.0)
        with lock.output_lock(Path(config.train.output)) if rank == 0 else contextlib.nullcontext():
            messages.append(refusal(config))
        with patch.context() as full:
            if rank == 0:
                full.setattr(loggers._Appended, "write", _no_room)
            messages.append(refusal(config))
        if rank == 1:
            read = arrays.read_index
            own = {"num_documents": 2}

            def other_index(path: Path) -> Any:
                index = read(path)
                return replace(index, summary=index.summary | own) if os.environ["RANK"] == "1" else index

            patch.setattr(arrays, "read_index", other_index)
        messages.append(refusal(other))
    train(config)
    return messages


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_all_ranks_get_the_line(tmp_path: Path) -> None:
    job(tmp_path)  # writes the corpus
    config, other = (job(tmp_path, train={"steps": 2, "output": str(tmp_path / name)}) for name in ("out", "other"))
    first, second = run_ranks(every_rank, 2, config, other, local=1)
    assert first == second
    locked, full, unequal = first
    assert "is in use by another run (host" in locked
    assert "cannot write the figures of the run" in full
    assert "[Errno 28] No space left on device" in full
    assert "node 1 has other tokens than node 0" in unequal


@pytest.mark.machine
def test_every_log_gets_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Four ranks on two nodes, which share a terminal; then each has a log of its own."""
    logs = [tmp_path / f"{rank}.log" for rank in range(4)]
    waiting = [_refused(rank, None) for rank in range(4)] + [_refused(rank, log) for rank, log in enumerate(logs)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in waiting] == [2] * 8
    shared, own = capfd.readouterr().err, [log.read_text() for log in logs]
    line = "cannot read the configuration 'nowhere.toml'"
    assert sorted(shared.splitlines()) == [own[0].rstrip(), own[2].rstrip()]
    assert [text.count("\n") for text in own] == [1] * 4
    assert own[0].startswith(f"laconic train: {line}")
    assert own[3].startswith(f"laconic train: rank 3: {line}")


def _refused(rank: int, log: Path | None) -> int:
    """Start a rank that refuses its configuration, and return its pid; its stderr is this process's without `log`."""
    if pid := os.fork():
        return pid
    if log is not None:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    os._exit(main(["nowhere.toml"]))


def test_an_orphan_says_why_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launchers, codes = [7], list[int]()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "getppid", lambda: launchers[-1])
    monkeypatch.setattr(os, "_exit", codes.append)
    with ending_with_launcher():
        time.sleep(3)
        assert not codes
        launchers.append(1)
        time.sleep(1)
    assert set(codes) == {1}
    line = (
        "rank 1 ends, because its launcher (torchrun, process 7) has died; start the job again with --train.resume auto"
    )
    assert set(capsys.readouterr().err.splitlines()) == {line}
