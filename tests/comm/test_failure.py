"""The first failure of a job, which every rank shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from laconic.comm import failure
from laconic.comm.failure import failing_together, first_failure, record_failure, watch_peers, watch_peers_early
from laconic.comm.launch import start_process_group
from laconic.comm.ring import PeerRing
from laconic.config import to_toml
from laconic.errors import JobError
from tests.support.jobs import job
from tests.support.launch import free_port, run_ranks, started, torchrun_environment


def job_record() -> tuple[str, str, str]:
    watch_peers()
    before = first_failure()
    dist.barrier()
    if dist.get_rank() == 1:
        assert record_failure(ValueError("the disk is on fire")) == ""
    answer = first_failure(patience_s=30.0)
    later = record_failure(ValueError("me, too"))
    dist.barrier()
    return before, answer, later


@pytest.mark.machine
def test_the_first_failure_is_the_one_that_every_other_rank_learns() -> None:
    results = run_ranks(job_record, 5)
    assert [before for before, _, _ in results] == [""] * 5
    assert results[1][1:] == ("", ""), "its own failure is no failure of another rank"
    for rank in (0, 2, 3, 4):
        _, first, answer = results[rank]
        assert first == answer
        assert first.startswith("rank 1 failed first:\n")
        assert "ValueError: the disk is on fire" in first
        assert "me, too" not in first


def job_fail(kind: str) -> str:
    """Rank 1 fails; rank 0 then fails because of it."""
    try:
        with failing_together(2):
            if dist.get_rank() == 1:
                raise (RuntimeError if kind == "error" else JobError)("the disk is on fire")
            while not first_failure():
                time.sleep(0.01)
            raise JobError("no corpus") if kind == "both" else RuntimeError("connection closed by peer")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.machine
def test_a_rank_that_fails_later_shows_the_first_failure() -> None:
    later, first = run_ranks(job_fail, 2, "error")
    assert first == "RuntimeError: the disk is on fire"
    assert later.startswith("PeerFailedError: rank 1 failed first:")
    assert "RuntimeError: the disk is on fire" in later


@pytest.mark.machine
def test_job_errors_stay_as_they_are() -> None:
    assert run_ranks(job_fail, 2, "both") == ["JobError: no corpus", "JobError: the disk is on fire"]


@pytest.mark.machine
def test_a_job_error_of_one_rank_ends_the_others_with_its_message_alone() -> None:
    assert run_ranks(job_fail, 2, "job") == ["JobError: the disk is on fire"] * 2


def meet(rank: int, port: int, folder: str) -> None:
    """Rank 1 dies when its neighbour has found it, and has no process group yet."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(torchrun_environment(rank, 2, 2, port))
    failure._GRACE_S = 0.1
    if rank == 0:
        start_process_group("gloo", timedelta(seconds=80))
    watch_peers_early(next(rendezvous("env://"))[0], rank, 2)
    while not failure._peers.ring.has_neighbours:
        time.sleep(0.01)
    time.sleep(0.3)  # until the neighbour knows, too
    os._exit(9)


def wait_in_vain(rank: int, port: int, folder: str) -> None:
    """No neighbour is known."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    failure._GRACE_S, os.environ["RANK"] = 0.1, str(rank)
    with failure.ending_after(0.1, "the process group of all ranks"):
        time.sleep(80)


@pytest.mark.machine
def test_ranks_end_if_another_one_dies_before_all_have_met(tmp_path: Path) -> None:
    port = free_port()
    jobs = [(meet, 0), (meet, 1), (wait_in_vain, 2)]
    processes = [started(job, rank, port, str(tmp_path)) for job, rank in jobs]
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [1, 9, 1]
    assert "rank 0 is stuck because rank 1 is gone" in (tmp_path / "0").read_text()
    assert re.search(r"rank 2 has waited [\d.]+ s for the process group of all ranks", (tmp_path / "2").read_text())


def die_unfound(rank: int, port: int, folder: str) -> None:
    """Rank 1 dies when it has said where it is, before its neighbour has come."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(torchrun_environment(rank, 2, 2, port))
    failure._GRACE_S = 0.1
    store = next(rendezvous("env://"))[0]
    if rank == 1:
        PeerRing(store, rank, 2, 60.0)
        os._exit(9)
    store.wait(["laconic/ring/1"])
    time.sleep(0.3)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process hosts the store already
    start_process_group("gloo", timedelta(seconds=80))


def lose_the_host(rank: int, port: int, folder: str) -> None:
    """Rank 0 hosts the store, and dies while rank 1 waits for connections."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(torchrun_environment(rank, 2, 2, port))
    failure._GRACE_S = 0.1
    store = next(rendezvous("env://"))[0]
    if rank == 0:
        store.wait(["waits"])
        os._exit(9)
    with failure.ending_after(80, "connections", store):
        store.set("waits", "")
        time.sleep(80)


def run_both(job: Any, folder: Path) -> tuple[list[int | None], list[str]]:
    """Run a job on two ranks; return their exit codes and what they have printed."""
    port = free_port()
    processes = [started(job, rank, port, str(folder)) for rank in range(2)]
    for process in processes:
        process.join(40)
        process.kill()
    return [process.exitcode for process in processes], [(folder / str(rank)).read_text() for rank in range(2)]


@pytest.mark.machine
def test_a_rank_that_dies_before_its_neighbour_has_come_ends_the_others(tmp_path: Path) -> None:
    codes, printed = run_both(die_unfound, tmp_path)
    assert codes == [1, 9]
    assert "rank 0 is stuck because rank 1 is gone" in printed[0]


@pytest.mark.machine
def test_the_end_of_the_host_ends_ranks_that_wait_for_their_first_connections(tmp_path: Path) -> None:
    codes, printed = run_both(lose_the_host, tmp_path)
    assert codes == [9, 1]
    assert "for connections: the process that hosts the rendezvous is gone" in printed[1]


def job_show_slowly() -> str:
    """Rank 0 fails late, and shows its traceback late; both within the grace, but not together."""
    failure._GRACE_S, shown = 2.0, io.StringIO()
    hook, sys.excepthook = sys.excepthook, lambda *error: (time.sleep(1.5), hook(*error))
    failure._peers = None  # so that the hook of laconic is the outer one, as where a script starts
    watch_peers()
    dist.barrier()
    error = RuntimeError("connection closed by peer")
    if dist.get_rank() == 1:
        record_failure(ValueError("the disk is on fire"))
    else:
        assert first_failure(patience_s=30.0)
        time.sleep(1.0)
        with contextlib.redirect_stderr(shown):
            sys.excepthook(type(error), error, None)
    return shown.getvalue()


@pytest.mark.machine
def test_a_rank_that_fails_by_itself_shows_all_of_its_error() -> None:
    own, _ = run_ranks(job_show_slowly, 2)
    assert "RuntimeError: connection closed by peer" in own
    assert "ValueError: the disk is on fire" in own


def hang(error: type[Exception], rank: int, port: int, folder: str) -> None:
    """Rank 0 hangs when rank 1 has failed."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    failure._GRACE_S = 0.1
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with failing_together(2):
        if rank == 1:
            raise error("the disk is on fire")
        time.sleep(80)


@pytest.mark.machine
def test_a_rank_that_hangs_ends_with_the_first_failure(tmp_path: Path) -> None:
    codes, printed = run_both(partial(hang, RuntimeError), tmp_path)
    assert codes == [1, 1]
    assert "rank 0 is stuck because rank 1 failed first:" in printed[0]
    assert "RuntimeError: the disk is on fire" in printed[0]


@pytest.mark.machine
def test_a_rank_that_hangs_ends_with_one_line_after_a_job_error(tmp_path: Path) -> None:
    codes, printed = run_both(partial(hang, JobError), tmp_path)
    assert codes[0] == 2
    assert printed[0] == "rank 0 is stuck because rank 1 failed first: the disk is on fire\n"


def test_one_rank_alone_needs_no_process_group() -> None:
    with pytest.raises(RuntimeError, match="as it is"), failing_together(1):
        raise RuntimeError("as it is")


def run_all(commands: list[list[str]]) -> tuple[list[int], list[str]]:
    """Run Python with each list of arguments, all at once; return exit codes and outputs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


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
    codes, outputs = run_all([[*agent, str(script), str(config)] for agent in agents])
    assert all(codes)
    for output in outputs:
        assert "RuntimeError: the disk is on fire" in output, output
    assert "step 1/4" in outputs[0]
    assert "step 4/4" not in outputs[0]
