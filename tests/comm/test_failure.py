"""The first failure of a job, which every rank shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.comm.failure import failing_together, first_failure, record_failure
from laconic.config import to_toml
from laconic.errors import JobError
from tests.ranks import free_port, run_ranks
from tests.train.jobs import job


def job_record() -> tuple[str, str, str]:
    before = first_failure()
    dist.barrier()
    if dist.get_rank() == 1:
        assert record_failure(RuntimeError("the disk is on fire")) == ""
    dist.barrier()
    answer = record_failure(ValueError("me, too")) if dist.get_rank() != 1 else ""
    dist.barrier()
    return before, first_failure(), answer


def test_the_first_failure_is_the_one_that_every_other_rank_learns() -> None:
    results = run_ranks(job_record, 3)
    assert [before for before, _, _ in results] == [""] * 3
    assert results[1][1:] == ("", ""), "its own failure is no failure of another rank"
    for rank in (0, 2):
        _, first, answer = results[rank]
        assert first == answer
        assert first.startswith("rank 1 failed first:\n")
        assert "RuntimeError: the disk is on fire" in first
        assert "me, too" not in first


class DeadStore:
    """A store whose host has died."""

    def __getattr__(self, name: str) -> object:
        raise dist.DistNetworkError("connection reset")


def job_dead_store() -> None:
    assert record_failure(RuntimeError("no"), DeadStore()) == ""  # type: ignore[arg-type]
    assert first_failure(DeadStore()) == ""  # type: ignore[arg-type]


def test_a_dead_store_hides_no_error() -> None:
    run_ranks(job_dead_store, 1)


def job_fail(kind: str) -> str:
    """Rank 1 fails; rank 0 then fails because of it."""
    try:
        with failing_together(2):
            if dist.get_rank() == 1:
                raise {"error": RuntimeError, "job": JobError}[kind]("the disk is on fire")
            while not first_failure():
                time.sleep(0.01)
            raise JobError("no corpus") if kind == "job" else RuntimeError("connection closed by peer")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_fails_later_shows_the_first_failure() -> None:
    later, first = run_ranks(job_fail, 2, "error")
    assert first == "RuntimeError: the disk is on fire"
    assert later.startswith("PeerFailedError: rank 1 failed first:")
    assert "RuntimeError: the disk is on fire" in later


def test_job_errors_stay_as_they_are() -> None:
    assert run_ranks(job_fail, 2, "job") == ["JobError: no corpus", "JobError: the disk is on fire"]


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


HANGS = """
import sys, time
import torch.distributed as dist
from laconic.comm import failure

failure._WATCH_INTERVAL_S = failure._GRACE_S = 0.1
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
with failure.failing_together(2):
    if dist.get_rank() == 1:
        raise RuntimeError("the disk is on fire")
    time.sleep(600)
"""


def test_a_rank_that_hangs_ends_with_the_first_failure() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    codes, outputs = run_all([["-c", HANGS, address, str(rank)] for rank in range(2)])
    assert codes == [1, 1]
    assert "rank 0 is stuck because rank 1 failed first:" in outputs[0]
    assert "RuntimeError: the disk is on fire" in outputs[0]


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
