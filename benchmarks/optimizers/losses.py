"""Rows about the losses of whole training runs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.optimizers.bench import BENCHMARK, LAST_STEPS, LOCAL, NODES, TIMEOUT_S, Bench
from benchmarks.optimizers.states import NUM_STEPS, measure_adamw8bit
from laconic.config import Config, load
from tests.support.launch import launch
from tests.support.record import Row

_JOB = Path(__file__).parents[1] / "jobs" / "optimizers.toml"
SETTINGS: dict[str, dict[str, Any]] = {"muon": {"adjust_lr_fn": "match_rms_adamw"}, "shampoo": {"block_size": 128}}
"""The settings of the trainer's optimizers in addition to those in the job file. The learning rate is the job's."""
RANKS_TOLERANCE = 1e-3
"""The largest allowed relative difference, at any step, between the loss on 4 ranks and on 1. Sums in another order
differ in the last bit of fp32. Muon and AdamW8bit round to fewer bits, and all optimizers divide by small numbers."""


@BENCHMARK.row("adamw8bit-loss")
def adamw8bit_loss(bench: Bench) -> Row:
    steps = bench.loss_steps
    pairs = []
    for seed in range(bench.loss_seeds):
        runs = (train(bench, name, ranks=1, steps=steps, seed=seed) for name in ("adamw8bit", "adamw"))
        pairs.append(tuple(statistics.mean(losses[-LAST_STEPS:]) for losses in runs))
    adamw8bit, adamw = (statistics.mean(losses) for losses in zip(*pairs, strict=True))
    difference = adamw8bit / adamw - 1
    return Row(
        claim=f"loss after {steps} steps of the trainer, AdamW8bit against AdamW",
        required="within 0.5 %",
        measured=f"{difference:+.3%}",
        is_met=abs(difference) <= 0.005,
        note=(
            f"mean of the last {LAST_STEPS} steps and of {bench.loss_seeds} seeds, on identical batches: "
            f"{adamw8bit:.4f} against {adamw:.4f}; by seed {', '.join(f'{a / b - 1:+.2%}' for a, b in pairs)}. "
            f"{_JOB.name}, 8 rows of 128 bytes a step."
        ),
    )


@BENCHMARK.row("ranks")
def ranks(bench: Bench) -> Row:
    worst, each = 0.0, []
    for name in ("muon", "shampoo", "adamw8bit"):
        many, one = (train(bench, name, ranks=ranks, steps=bench.rank_steps) for ranks in (NODES * LOCAL, 1))
        difference = max(abs(a / b - 1) for a, b in zip(many, one, strict=True))
        worst = max(worst, difference)
        each.append(f"{name} {difference:.1e}, {one[0]:.3f} to {one[-1]:.3f}")
    is_equal = bool(bench.on_ranks(measure_adamw8bit, NUM_STEPS)["is_equal"])
    return Row(
        claim=f"loss of each of {bench.rank_steps} steps on 4 ranks against 1 rank: Muon, Shampoo, AdamW8bit / "
        "AdamW8bit given equal gradients",
        required=f"within {RANKS_TOLERANCE:.1%} / equal bits",
        measured=f"within {worst:.1e} / {'equal' if is_equal else 'different'} bits",
        is_met=worst <= RANKS_TOLERANCE and is_equal,
        note=f"{'; '.join(each)}. The gradients differ in the order of their sums. {_JOB.name}, 8 rows a step.",
    )


def train(bench: Bench, optimizer: str, *, ranks: int, steps: int, rows: int = 8, seed: int = 0) -> list[float]:
    """Train with the trainer, `rows` per step over all ranks, and return the loss of every step."""
    base = load(_JOB)
    output = bench.out / f"{optimizer}-{ranks}-{steps}-{seed}"
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, init_seed=seed),
        data=dataclasses.replace(base.data, cache=str(bench.out / "tokens"), seed=seed),
        log=dataclasses.replace(base.log, progress=False),
        optimizer=dataclasses.replace(base.optimizer, name=optimizer, **SETTINGS.get(optimizer, {})),
        train=dataclasses.replace(base.train, steps=steps, micro_batch_size=rows // ranks, output=str(output)),
    )
    launch(_train_rank, config, num_ranks=ranks, num_local=min(ranks, LOCAL), backend=None, timeout_s=TIMEOUT_S)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line and "step" in line}
    assert sorted(losses) == list(range(1, steps + 1))
    return [losses[step] for step in range(1, steps + 1)]


def _train_rank(config: Config) -> dict[str, Any]:
    """Run one rank of `laconic train`."""
    from laconic.train.loop import run

    return run(config)
