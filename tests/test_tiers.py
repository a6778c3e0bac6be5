"""A test of `make test` stays in this process: what it must not do, its clock, and its threads."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import tiers
from tests.support.launch import run_ranks
from tests.support.tiers import LeftProcessError, is_inside


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (socket.socket, "socket.__new__"),
        (lambda: subprocess.run(["true"]), "subprocess.Popen"),
        (lambda: os.system("true"), "os.system"),
        (os.fork, "os.fork"),
        (lambda: dist.TCPStore("localhost", 0, 1, True), "TCPStore"),
        (lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1), "ProcessGroupGloo"),
        (lambda: Path("/proc/net/dev").read_text(), "read /proc/net/dev"),
    ],
    ids=["socket", "process", "shell", "fork", "store", "gloo", "counters"],
)
def test_what_leaves_the_process_is_refused(deed: Callable[[], Any], words: str) -> None:
    with pytest.raises(LeftProcessError, match=rf"must not do this: {words}.*mark it `machine`"):
        deed()


def test_the_clock_goes_on_by_waits() -> None:
    assert is_inside()
    begun, epoch = time.monotonic(), time.time()
    time.sleep(3600)
    assert 3600 <= time.monotonic() - begun < 3601
    assert 3600 <= time.time() - epoch < 3601


def _sleep_by_rank() -> tuple[int, float]:
    tiers.OUTSIDE = ()
    time.sleep(dist.get_rank())
    return threading.get_ident(), time.monotonic()


def test_ranks_are_threads_of_this_process_and_constants_that_they_replace_come_back() -> None:
    before = tiers.OUTSIDE
    threads, clocks = zip(*run_ranks(_sleep_by_rank, 3), strict=True)
    assert len(set(threads)) == 3
    assert [int(each) for each in clocks] == [0, 1, 2]
    assert tiers.OUTSIDE == before == ("machine", "campaign", "cuda")
