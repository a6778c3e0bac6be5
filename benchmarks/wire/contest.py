"""One cell of the grid, on the ranks of a lab: contestants that take steps in turns, in the same processes.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.wire.contest JOBS.json OUT.json

Each contestant trains a copy of the same model on the same rows. What memory each may take follows from the peers that
run first: a strategy of laconic whose device memory is limited may take what a peer takes, and rests what it does not
need itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic import registry
from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo
from laconic.config import Config, from_dict
from laconic.data.batches import Batch
from laconic.models.build import build_model
from laconic.strategies.memory import measured_peak
from laconic.strategies.stepper import Setup, Stepper

_WARM_STEPS = 3
"""In the first step all rests as at first, in the second it moves to where it was chosen, and the third is warm."""
_AMPLE_BYTES = 10**9
"""Of host memory, which no peer uses."""
SLACK = 1.01
"""Peaks of one strategy differ by less from run to run: a strategy fits in the memory of a peer if it needs no more."""
_TURNS_S, _MOST_TURNS = 20.0, 25
"""Short steps differ more from one to the next, and are taken more often: turns take this long in all, if so many of
them do."""


class Contestant:
    """One strategy, which trains."""

    def __init__(self, config: Config, ranks: RankInfo) -> None:
        """Build the model and shard it. Collective."""
        device = torch.device("cpu")
        model = build_model(config.model, config.lora, device="meta")
        make = registry.load(registry.named(config.shard.strategy).stepper)
        self._stepper: Stepper = make(model, Setup.of(config, ranks, device))
        generator = torch.Generator().manual_seed(ranks.rank)
        vocab_size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        shape = config.train.micro_batch_size, config.data.sequence_length
        self._batches = []
        for _ in range(config.train.accumulation):
            rows = torch.randint(vocab_size, shape, generator=generator)
            self._batches.append(Batch(input_ids=rows, labels=rows.clone()))
        self.times_s: list[float] = []
        self.warm_s = 0.0
        self.peak_bytes = 0
        self.losses: list[float] = []

    def step(self) -> None:
        """Take one step. Collective."""
        self._stepper.begin()
        dist.barrier()
        start_s = time.perf_counter()
        self.losses.append(self._stepper.step(self._batches, is_last=False).loss or math.nan)
        dist.barrier()
        self.times_s.append(time.perf_counter() - start_s)

    def warm_up(self) -> None:
        """Take the first steps, and one whose memory is watched. Collective."""
        for _ in range(_WARM_STEPS):
            self.step()
        with measured_peak() as peak:
            self.step()
        self.warm_s = self.times_s[-1]
        self.times_s.clear()
        held = torch.tensor([float(peak.nbytes or 0) + self._stepper.resting_bytes()])
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        self.peak_bytes = int(held)

    def figures(self) -> dict[str, Any]:
        """The figures that the benchmark reads."""
        return {
            "times_s": self.times_s,
            "peak_bytes": self.peak_bytes,
            "losses": self.losses,
            "rests": sorted({f"{each.weights}" for each in self._stepper.placements().values()}),
        }


def compete(jobs: dict[str, dict[str, Any]], limited: dict[str, dict[str, Any]], fewest_turns: int) -> dict[str, Any]:
    """Let all take steps in turns, `limited` ones once for each memory of a peer. Collective."""
    ranks = RankInfo.from_environment()
    dist.init_process_group("gloo")
    contestants = dict(_warm({name: from_dict(Config, job) for name, job in jobs.items()}, ranks))
    least_bytes = contestants["none"].peak_bytes
    for peer in ("ddp", "hsdp", "fsdp2"):
        if peer not in contestants:
            continue
        budget_bytes = max(0, int(contestants[peer].peak_bytes * SLACK) - least_bytes)
        given = {"device_bytes": budget_bytes, "host_bytes": _AMPLE_BYTES}
        configs = {
            f"{name}:{peer}": from_dict(Config, {**job, "shard": {**job["shard"], **given}})
            for name, job in limited.items()
        }
        contestants |= dict(_warm(configs, ranks))
    names = list(contestants)
    for turn in range(_turns(contestants.values(), fewest_turns)):
        for index in range(len(names)):
            contestants[names[(index + turn) % len(names)]].step()
    return {name: each.figures() for name, each in contestants.items()}


def _turns(contestants: Iterable[Contestant], fewest: int) -> int:
    """The steps that each takes, alike on all ranks; with 1 as the fewest, 1. Collective."""
    turn_s = torch.tensor([sum(each.warm_s for each in contestants)])
    dist.all_reduce(turn_s, op=dist.ReduceOp.MAX)
    return 1 if fewest == 1 else min(_MOST_TURNS, max(fewest, int(_TURNS_S / float(turn_s))))


def _warm(configs: dict[str, Config], ranks: RankInfo) -> Iterable[tuple[str, Contestant]]:
    for name, config in configs.items():
        contestant = Contestant(config, ranks)
        contestant.warm_up()
        yield name, contestant


def main(jobs: Path, out: Path) -> None:
    """Read the jobs, let them compete, and write the figures of rank 0."""
    given = json.loads(jobs.read_text())
    torch.set_num_threads(1)
    figures = compete(given["jobs"], given["limited"], given["fewest_turns"])
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    RankGroup().gather(None)
    sys.stdout.flush()
    os._exit(0)  # threads of many groups need not end one by one


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
