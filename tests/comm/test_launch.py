"""One rank's failure, under torchrun on two logical nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo, pick_device
from laconic.config.job import JobError, to_toml
from tests.ranks import free_port, run_ranks
from tests.train.jobs import job

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


def test_one_ranks_exception_ends_all_and_is_the_one_shown(tmp_path: Path) -> None:
    script, config = tmp_path / "crash.py", tmp_path / "job.toml"
    script.write_text(CRASH)
    config.write_text(to_toml(job(tmp_path)))
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *common,
                "--node-rank",
                str(node),
                str(script),
                str(config),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for node in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=90)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert all(agent.returncode != 0 for agent in agents)
    assert all("RuntimeError: the disk is on fire" in output for output in outputs)
    assert "step 1/4" in outputs[0]
    assert "step 4/4" not in outputs[0]


def agreed(failing: list[int], asked: list[int]) -> object:
    rank = dist.get_rank()

    def action() -> int:
        if rank in failing:
            raise ValueError(f"no {rank}")
        return 10 * rank

    try:
        return RankGroup().agree(action, only=rank in asked)
    except JobError as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing", "asked", "expected"),
    [
        ([], [0, 1, 2], [0, 10, 20]),
        ([], [1], [None, 10, None]),
        ([1], [0, 1, 2], ["no 1 (on rank 1)"] * 3),
        ([0], [0], ["no 0"] * 3),
        ([0, 1, 2], [0, 1, 2], ["no 0"] * 3),
    ],
)
def test_agree(failing: list[int], asked: list[int], expected: list[object]) -> None:
    assert run_ranks(agreed, 3, failing, asked) == expected


def test_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert RankInfo.from_environment() == RankInfo(rank=0, world_size=1, local_rank=0, num_local=1, num_nodes=1)
    for name, value in {"RANK": 5, "WORLD_SIZE": 6, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    ranks = RankInfo.from_environment()
    assert (ranks.num_nodes, ranks.is_main, ranks.is_first_on_node) == (3, False, False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(JobError, match="6 ranks do not make nodes of 4"):
        RankInfo.from_environment()


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ranks = RankInfo(rank=0, world_size=1, local_rank=0, num_local=1, num_nodes=1)
    assert pick_device("auto", ranks).type == "cpu"
    with pytest.raises(JobError, match="finds no GPU"):
        pick_device("cuda", ranks)


LEAVES = """
import atexit, sys
from laconic.comm.launch import Leaving

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
leaving = Leaving()
atexit.register(print, "handlers ran")
print("no newline", end=" ")
if sys.argv[1] == "raise":
    raise RuntimeError("no")
leaving.code = int(sys.argv[1])
sys.exit(leaving.code)
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("0", 0, "no newline handlers ran"),
        ("2", 2, "no newline handlers ran"),
        ("raise", 1, "no newline handlers ran\ntorn down"),
    ],
)
def test_leaving_runs_what_is_registered_and_tears_nothing_down(ending: str, code: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES, ending], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (code, said)
