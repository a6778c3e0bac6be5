"""The ranks' side: run jobs one after the other in the same processes, as `laconic train` would run each.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.plan.ranks JOBS.json ANSWERS.json

Rank 0 writes the summaries of all jobs. The first job that fails ends the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.comm.launch import ExitWithoutTeardown
from laconic.config import Config, from_dict
from laconic.errors import JobError
from laconic.train import loop
from laconic.train.records import StepRecord

_M_MMAP_THRESHOLD, _M_PERTURB = -3, -6
"""Parameters of the C library's `mallopt`."""


def train_all(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train jobs, given as `to_dict` writes them. Returns the summary of each, or {"error": message}. Collective."""
    return [_train(from_dict(Config, job)) for job in jobs]


def train_all_watched(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Do the same with processes that show how much memory tensors take. Their steps take up to twice as long."""
    _show_tensors()
    return train_all(jobs)


def _train(config: Config) -> dict[str, Any]:
    gc.collect()
    loop.Trainer = _Watched  # type: ignore[misc]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return loop.run(config)
    except JobError as error:  # every rank raises it
        return {"error": str(error)}


class _Watched(loop.Trainer):
    """A trainer whose last step begins with the memory of its process as the peak."""

    def _take_step(self, step: int) -> StepRecord:
        if step + 1 == self.config.train.steps:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel forgets the peak so far
        return super()._take_step(step)


def _show_tensors() -> None:
    """Let the process have the pages of a tensor from its allocation on, and give them back as soon as it is freed.

    The C library fills new memory with a pattern: a buffer for a message that has not come would have no pages. The
    kernel clears every page of every tensor anew. Neither is part of a step elsewhere.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    library.mallopt(_M_PERTURB, 0x55)


def memory_bytes(key: str) -> int:
    """A figure of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}")


def main() -> None:
    """Run the jobs of a file."""
    jobs, answers = (Path(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    found = train_all(json.loads(jobs.read_text()))
    if dist.get_rank() == 0:
        answers.write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    process_exit = ExitWithoutTeardown()
    main()
    process_exit.code = 0
