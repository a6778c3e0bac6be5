"""The tests of `make test` stay inside: what would leave the process is an error, and clocks are those of turns."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.tiers import LeftProcessError


@pytest.mark.parametrize(
    "deed",
    [
        socket.socket,
        lambda: subprocess.run(["true"]),
        os.fork,
        lambda: dist.TCPStore("localhost", 0, 1, True),
        lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
        lambda: Path("/proc/net/dev").read_text(),
    ],
    ids=["socket", "process", "fork", "store", "gloo", "counters"],
)
def test_who_leaves_the_process_fails(deed: Callable[[], object]) -> None:
    with pytest.raises(LeftProcessError, match="must not do this"):
        deed()


def test_an_hour_takes_no_time() -> None:
    begun_s, epoch_s = time.monotonic(), time.time()
    time.sleep(3600)
    assert 3600 <= time.monotonic() - begun_s < 3601
    assert 3600 <= time.time() - epoch_s < 3601


def test_threads_take_turns_with_the_test() -> None:
    order = []
    thread = threading.Thread(target=lambda: (time.sleep(5), order.append("thread")))
    thread.start()
    time.sleep(1)
    order.append("test")
    thread.join()
    with ThreadPoolExecutor(2) as threads:
        order += threads.map(lambda seconds: (time.sleep(seconds), str(seconds))[1], [3, 2, 1])
    assert order == ["test", "thread", "3", "2", "1"]


def test_a_thread_that_waits_for_ever_ends_with_the_test() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
