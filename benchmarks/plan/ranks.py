"""The ranks' side: run jobs one after the other in the same processes, as `laconic train` would run each.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.plan.ranks JOBS.json ANSWERS.json [pinned]

Rank 0 writes the summaries of all jobs. The first job that fails ends the run. `pinned`: the ranks of a node share one
processor, so that every node computes as fast as any other, however many nodes there are.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.comm.launch import ExitWithoutTeardown
from laconic.config import Config, from_dict
from laconic.errors import JobError
from laconic.lab.worker import NODE_VARIABLE
from laconic.train import loop


def train_all(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train jobs, given as `to_dict` writes them. Returns the summary of each, or {"error": message}. Collective."""
    return [_train(from_dict(Config, job)) for job in jobs]


def _train(config: Config) -> dict[str, Any]:
    gc.collect()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return loop.run(config)
    except JobError as error:  # every rank raises it
        return {"error": str(error)}


def main() -> None:
    """Run the jobs of a file."""
    jobs, answers = (Path(argument) for argument in sys.argv[1:3])
    if sys.argv[3:] == ["pinned"]:
        os.sched_setaffinity(0, {int(os.environ[NODE_VARIABLE])})
    dist.init_process_group("gloo")
    found = train_all(json.loads(jobs.read_text()))
    if dist.get_rank() == 0:
        answers.write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    process_exit = ExitWithoutTeardown()
    main()
    process_exit.code = 0
