"""Work in forks gives what one process gives, and all strategies are predicted alike in both."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from laconic.plan.forks import map_forked


def run_alone(code: str) -> str:
    """Run code in a process of its own, since pytest's workers have threads, beside which nothing forks."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.machine
def test_several_processes_work_and_order_stays_and_errors_come_back() -> None:
    code = """
import os, time
from laconic.plan.forks import map_forked
os.sched_getaffinity = lambda pid: {0, 1}

def slow_first(number):
    time.sleep(0.3 if number == 0 else 0.1)
    return number, os.getpid()

found = list(map_forked(slow_first, range(5)))
assert [number for number, _ in found] == [0, 1, 2, 3, 4], found
assert len({pid for _, pid in found} - {os.getpid()}) == 2, found

def fail(number):
    raise ValueError(f"no {number}")

for deed in (fail, lambda number: os.kill(os.getpid(), 9)):
    try:
        list(map_forked(deed, range(3)))
    except (RuntimeError, ValueError) as error:
        print(error)
"""
    error, death = run_alone(code).splitlines()
    assert error == "no 0"
    assert death.startswith("one of 2 processes that worked for this one was killed")


def test_beside_other_threads_one_process_works() -> None:
    is_done = threading.Event()
    thread = threading.Thread(target=is_done.wait)
    thread.start()
    try:
        assert set(map_forked(lambda _: os.getpid(), range(3))) == {os.getpid()}
    finally:
        is_done.set()
        thread.join()


@pytest.mark.machine
def test_all_strategies_are_predicted_as_each_alone() -> None:
    names = ("fsdp2", "host", "ddp")
    job = {
        "model": {"config": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}},
        "data": {"sequence_length": 32},
        "train": {"device": "cuda", "micro_batch_size": 1},
    }  # fmt: skip
    cluster = {"nodes": 2, "ranks_per_node": 2, "device": "H100 SXM", "network": "10 GbE", "host_memory_bytes": "64 GB"}
    code = f"""
import os
from laconic.config import Config, from_dict
from laconic.plan.cluster_file import cluster_from_dict
from laconic.plan.prediction import Predictor

JOB, CLUSTER = {job!r}, {cluster!r}
os.sched_getaffinity = lambda pid: {{0, 1}}
names = {names!r}
job, cluster = from_dict(Config, JOB), cluster_from_dict(CLUSTER)
together = list(Predictor(job, cluster).all(names))
alone = [found for name in names for found in Predictor(job, cluster).all([name])]
assert together == alone, (together, alone)
assert not list(Predictor(job, cluster).all([]))
print(sum(hasattr(found, "seconds") for found in together))
"""
    assert int(run_alone(code)) >= len(names) - 1
