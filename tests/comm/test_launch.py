"""The place of this process among the ranks, and its exit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from laconic.comm.launch import RankInfo, initialized_accelerator, node_of_rank, pick_device
from laconic.errors import JobError


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


def test_the_node_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [node_of_rank(rank) for rank in range(3)] == [0, 0, 0], "one machine"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [node_of_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_an_accelerator_is_chosen_by_the_local_rank_and_a_missing_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    found: list[torch.device | None] = [None]
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: found[0])
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("torch.accelerator.set_device_index", chosen.append)
    ranks = RankInfo(rank=3, world_size=6, local_rank=3, num_local=6, num_nodes=1)
    assert pick_device("auto", ranks).type == "cpu"
    with pytest.raises(JobError, match=r"'cuda', but torch finds no accelerator here; set train.device to 'cpu'"):
        pick_device("cuda", ranks)
    found[0] = torch.device("xpu")
    assert [pick_device(name, ranks) for name in ("auto", "xpu")] == [torch.device("xpu", 1)] * 2
    assert chosen == [1, 1]
    assert pick_device("cpu", ranks).type == "cpu"
    with pytest.raises(JobError, match="'cuda', but torch finds the accelerator 'xpu' here"):
        pick_device("cuda", ranks)


def test_an_accelerator_counts_once_this_process_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: None)
    assert initialized_accelerator() is None
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 1)
    for is_initialized, expected in ((False, None), (True, torch.device("xpu", 1))):
        monkeypatch.setattr("torch.xpu.is_initialized", lambda value=is_initialized: value)
        assert initialized_accelerator() == expected
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr("torch.mps.is_available", lambda: False)
    assert initialized_accelerator() is None, "torch.mps cannot say whether it is initialised"


EXITS = """
import atexit, sys
from laconic.comm.launch import ExitWithoutTeardown

class Global:
    def __del__(self):
        print("torn down")

kept = Global()
exiting = ExitWithoutTeardown()
atexit.register(print, "handlers ran")
print("no newline", end=" ")
if sys.argv[1] == "raise":
    raise RuntimeError("no")
exiting.code = int(sys.argv[1])
sys.exit(exiting.code)
"""


@pytest.mark.machine
@pytest.mark.parametrize(
    ("ending", "code", "output"),
    [
        ("0", 0, "no newline handlers ran"),
        ("2", 2, "no newline handlers ran"),
        ("raise", 1, "no newline handlers ran\ntorn down"),
    ],
)
def test_the_exit_runs_its_handlers_and_no_teardown(ending: str, code: int, output: str) -> None:
    ended = subprocess.run([sys.executable, "-c", EXITS, ending], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (code, output)
