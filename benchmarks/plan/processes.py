"""Jobs on fresh processes with a memory limit, started as torchrun starts them.

    python -m benchmarks.plan.processes JOB.json LIMIT_BYTES     on each rank

As under torchrun, OMP_NUM_THREADS is 1. A fork of the benchmark, as `tests.support.launch` makes, would have the
benchmark's memory, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.plan.jobs import Case
from benchmarks.plan.ranks import train_all
from laconic.config import to_dict
from tests.support.launch import free_port, torchrun_environment

_THREAD_STACK_BYTES, _STACK_BYTES = 1 << 19, 8 << 20
_M_MMAP_THRESHOLD = -3
"""A parameter of the C library's `mallopt`."""
_TIMEOUT_S = 600.0  # bf16 is slow on a processor without units for it


def runs_within(limit_bytes: int, case: Case, nodes: int, local: int) -> bool:
    """Train a case on ranks that have no private memory beyond a limit: RLIMIT_DATA. Returns whether all trained."""
    shutil.rmtree(case.config.train.output, ignore_errors=True)
    job = Path(case.config.train.output).with_suffix(".json")
    job.parent.mkdir(parents=True, exist_ok=True)
    job.write_text(json.dumps(to_dict(case.config)))
    port, size = free_port(), nodes * local
    command = [sys.executable, "-m", "benchmarks.plan.processes", str(job), str(limit_bytes)]
    logs = [job.with_suffix(f".{rank}.log") for rank in range(size)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, **torchrun_environment(rank, size, local, port), "OMP_NUM_THREADS": "1"}
        with log.open("w") as stream:
            own = {"env": environment, "stdout": stream, "preexec_fn": _let_stacks_be_small}
            ranks.append(subprocess.Popen(command, stderr=subprocess.STDOUT, **own))
    try:
        return _wait(ranks, logs)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _let_stacks_be_small() -> None:
    """Give new threads small stacks: RLIMIT_DATA counts 8 MiB for each, of which a thread uses a few pages.

    Each process group of Gloo has threads, so a strategy with several groups would pay for memory that nobody has.
    """
    resource.setrlimit(resource.RLIMIT_STACK, (_THREAD_STACK_BYTES, resource.RLIM_INFINITY))


def _wait(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> bool:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            lines = logs[rank].read_text(errors="replace").strip().splitlines() or ["no message"]
            print(f"  rank {rank} ended with {codes[rank]}: {lines[-1][:130]}", flush=True)
            return False
        if all(code == 0 for code in codes):
            return True
        time.sleep(0.05)
    raise TimeoutError(f"ranks neither failed nor ended within {_TIMEOUT_S:g} s; see {logs[0]}")


def main() -> int:
    """Train the job of a file under a limit. Returns the exit code."""
    job, limit_bytes = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    # memory of a tensor is the process's from its allocation on, and the system's again as soon as it is freed
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    dist.init_process_group("gloo")
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.RLIM_INFINITY))  # of this thread, the first
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    try:
        (summary,) = train_all([json.loads(job.read_text())])
        if "error" in summary:
            raise RuntimeError(summary["error"])
        dist.barrier()
    except (RuntimeError, MemoryError, OSError):
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a rank whose neighbour has gone would wait for it in the teardown of its process group
