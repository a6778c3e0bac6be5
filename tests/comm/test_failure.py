"""The first failure of a job, which every rank shows."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from laconic.comm import failure
from laconic.comm.entries import encode
from laconic.comm.failure import failing_together, first_failure, record_failure, watch_peers, watch_peers_early
from laconic.comm.launch import RankInfo, process_group, start_process_group
from laconic.comm.ring import PeerMessage, PeerRing
from laconic.config import to_toml
from laconic.errors import JobError
from laconic.rehearse import ranks
from tests.support.jobs import job
from tests.support.launch import free_port, on_ranks, started, torchrun_environment


def test_who_waits_for_news_goes_on_when_a_neighbour_is_gone_and_keeps_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is new is passed on, once. A fork closes the connections of its rank, and watches nobody."""
    peers, ring = object.__new__(failure._Peers), object.__new__(PeerRing)  # of rank 0, without thread and sockets
    peers.__dict__.update(ring=ring, _rank=0, _is_over=False)
    listener, neighbour = mock.Mock(), mock.Mock()
    ring.__dict__.update(
        first=None, has_heard=threading.Event(), has_news=asyncio.Event(), _neighbours=[neighbour], _listener=listener,
        _connections=set(),
    )  # fmt: skip
    monkeypatch.setattr(failure, "_peers", peers)
    failed = PeerMessage(rank=1, text="rank 1 failed first: ...", has_failed=True)
    gone = PeerMessage(rank=2, text="rank 2 is gone", has_failed=False)
    for message in (gone, failed, failed, replace(gone, rank=1)):
        ring.learn(message)
    assert first_failure(patience_s=3600.0) == "rank 2 is gone"
    told = [encode(replace(gone, has_failed=has_failed)).encode() + b"\n" for has_failed in (False, True)]
    assert neighbour.write.call_args_list == [mock.call(each) for each in told]
    for _ in range(2):
        failure._forget()
        assert failure._peers is None
        listener.close.assert_called_once_with()


@pytest.mark.machine
@pytest.mark.parametrize(
    ("own", "other", "seen"),
    [
        (RuntimeError, RuntimeError, "PeerFailedError: rank 1 failed first:.*RuntimeError: the disk is on fire"),
        (JobError, JobError, "JobError: no corpus"),
        (RuntimeError, JobError, "JobError: the disk is on fire$"),  # with its message alone
    ],
)
@on_ranks(2)
def test_a_rank_that_fails_later_shows_the_first_failure_and_job_errors_stay(
    own: type[Exception], other: type[Exception], seen: str
) -> None:
    """Rank 1 fails; rank 0 then fails because of it, or by itself."""
    try:
        with failing_together(2):
            if dist.get_rank() == 1:
                raise other("the disk is on fire")
            while not first_failure():
                time.sleep(0.01)
            raise own("no corpus")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    words = f"{other.__name__}: the disk is on fire$" if dist.get_rank() == 1 else seen
    assert re.match(words, found, re.DOTALL), found


# -- ranks that end the process ----------------------------------------------------------------------------------------


def begin(rank: int, port: int, folder: str) -> None:
    """Print to a file, in torchrun's environment, and wait shortly for those who stop."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(torchrun_environment(rank, 2, 2, port))
    failure._GRACE_S = 0.1


def meet(rank: int, port: int, folder: str) -> None:
    """Rank 1 dies when its neighbour has found it, and has no process group yet."""
    begin(rank, port, folder)
    if rank == 0:
        start_process_group("gloo", timedelta(seconds=80))
    watch_peers_early(next(rendezvous("env://"))[0], rank, 2)
    while not failure._peers.ring._neighbours:
        time.sleep(0.01)
    time.sleep(0.3)  # until the neighbour knows, too
    os._exit(9)


def die_unfound(rank: int, port: int, folder: str) -> None:
    """Rank 1 dies when it has said where it is, before its neighbour has come."""
    begin(rank, port, folder)
    store = next(rendezvous("env://"))[0]
    if rank == 1:
        PeerRing(store, rank, 2, 60.0)
        os._exit(9)
    store.wait(["laconic/ring/1"])
    time.sleep(0.3)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process hosts the store already
    start_process_group("gloo", timedelta(seconds=80))


def lose_the_host(rank: int, port: int, folder: str) -> None:
    """Rank 0 hosts the store, and dies before rank 1 has found it."""
    begin(rank, port, folder)
    if rank == 0:
        next(rendezvous("env://"))[0].wait(["laconic/ring/1"])
        os._exit(9)
    start_process_group("gloo", timedelta(seconds=80))


def wait_in_vain(rank: int, port: int, folder: str) -> None:
    """No neighbour is known."""
    begin(rank, port, folder)
    with failure.ending_after(0.1, "the process group of all ranks"):
        time.sleep(80)


def job_of_a_group(error: type[Exception]) -> bool:
    """Whether the group is there after an error in its block."""
    with contextlib.suppress(error), process_group(RankInfo.from_environment(), torch.device("cpu"), 60):
        assert dist.get_world_size() == 2
        raise error("no")
    return dist.is_initialized()


def test_a_group_ends_after_an_error_of_all_ranks_and_stays_after_that_of_one() -> None:
    """Where peers may be dying, its end could hang."""
    assert ranks(job_of_a_group, JobError, local=2) == [False] * 2
    assert ranks(job_of_a_group, OSError, local=2) == [True] * 2


def job_too_late(seconds: float) -> str:
    with failure.ending_after(10.0, "the others"):
        time.sleep(seconds)
    return "in time"


def test_a_start_that_takes_too_long_ends_the_process() -> None:
    assert ranks(job_too_late, 5.0, goes_on=True) == ["in time"]
    assert ranks(job_too_late, 80.0, goes_on=True) == [None]


def hang(error: type[Exception], rank: int, port: int, folder: str) -> None:
    """Rank 0 hangs when rank 1 has failed."""
    begin(rank, port, folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with failing_together(2):
        if rank == 1:
            raise error("the disk is on fire")
        time.sleep(80)


@pytest.mark.machine
@pytest.mark.parametrize(
    ("job", "codes", "stuck", "words"),
    [
        (meet, [1, 9], 0, "rank 0 is stuck because rank 1 is gone"),
        (die_unfound, [1, 9], 0, "rank 0 is stuck because rank 1 is gone"),
        (lose_the_host, [9, 1], 1, "the host of the rendezvous .rank 0, or the launcher. is gone"),
        (wait_in_vain, [1, 1], 1, r"rank 1 has waited [\d.]+ s for the process group of all ranks"),
        (partial(hang, RuntimeError), [1, 1], 0, "(?s)stuck because rank 1 failed first:.*Error: the disk is on fire"),
        (partial(hang, JobError), [2, None], 0, "^rank 0 is stuck because rank 1 failed first: the disk is on fire\n$"),
    ],
)
def test_a_rank_that_is_stuck_ends_and_says_why(
    tmp_path: Path, job: Callable[..., None], codes: list[int | None], stuck: int, words: str
) -> None:
    port = free_port()
    processes = [started(job, rank, port, str(tmp_path)) for rank in range(2)]
    for process in processes:
        process.join(60)
        process.kill()
    for process, code in zip(processes, codes, strict=True):
        assert code in (process.exitcode, None)
    assert re.search(words, (tmp_path / str(stuck)).read_text())


@pytest.mark.machine
@on_ranks(2)
def test_a_rank_that_fails_by_itself_shows_all_of_its_error() -> None:
    """Rank 0 fails late, and shows its traceback late; both within the grace, but not together."""
    failure._GRACE_S, shown = 2.0, io.StringIO()
    hook, sys.excepthook = sys.excepthook, lambda *error: (time.sleep(1.5), hook(*error))
    failure._peers = None  # so that the hook of laconic is the outer one, as where a script starts
    watch_peers()
    dist.barrier()
    error = RuntimeError("connection closed by peer")
    if dist.get_rank() == 1:
        record_failure(ValueError("the disk is on fire"))
        return
    assert first_failure(patience_s=30.0)
    time.sleep(1.0)
    with contextlib.redirect_stderr(shown):
        sys.excepthook(type(error), error, None)
    assert "RuntimeError: connection closed by peer" in shown.getvalue()
    assert "ValueError: the disk is on fire" in shown.getvalue()


def test_one_rank_alone_needs_no_process_group() -> None:
    with pytest.raises(RuntimeError, match="as it is"), failing_together(1):
        raise RuntimeError("as it is")


CRASH = """
import os, sys
from laconic.train import cli, loop

step = loop.Trainer._step

def breaking(self, number):
    if number == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("the disk is on fire")
    return step(self, number)

loop.Trainer._step = breaking
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.campaign
def test_the_exception_of_one_rank_ends_all_ranks_and_all_show_it(tmp_path: Path) -> None:
    """A training job under torchrun on two logical nodes."""
    script, config = tmp_path / "crash.py", tmp_path / "job.toml"
    script.write_text(CRASH)
    config.write_text(to_toml(job(tmp_path)))
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [["-m", "torch.distributed.run", *common, "--node-rank", str(node)] for node in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    commands = [[sys.executable, *agent, str(script), str(config)] for agent in agents]
    processes = [subprocess.Popen(command, **streams) for command in commands]  # type: ignore[call-overload]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode for process in processes)
    for output in outputs:
        assert "RuntimeError: the disk is on fire" in output, output
    assert "step 1/4" in outputs[0]
    assert "step 4/4" not in outputs[0]
