"""Rows about the losses that crossings in few bits reach, on real engines of 2 nodes x 2 ranks.

[Note: Paired runs]
Runs from scratch scatter by a per cent, more than a codec changes. So runs are paired: all go on from one checkpoint
of an exact run, on the same rows, with one learning rate that falls to its end, and differ in the wire alone. The noise
floor is an exact run on 1 node x 4 ranks: it adds the same gradients in another order. Larger perturbations scatter:
training is chaotic, so runs that a codec perturbs end some 0.1 % apart, above and below, and only means over seeds say
something.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.thinner.bench import BENCHMARK, Bench
from laconic.config import Config, load
from tests.support.launch import launch
from tests.support.record import Row

_JOBS = Path(__file__).parents[1] / "jobs"
_TIMEOUT_S = 3600.0
NODES = 2
TOKENS_PER_STEP = 1024
EIGHT_BIT_GRADIENTS = {"weights": "int4", "gradients": "int8"}
WIRES: dict[str, dict[str, Any]] = {
    "exact": {},
    "4bit": {"wire": "4bit"},
    "ZeRO++": {"strategy": "zero++"},
    "int3 / int4": {"wire": {"weights": "int3", "gradients": "int4"}},
    "int4 / int2": {"wire": {"weights": "int4", "gradients": "int2", "feedback": True}},
}
"""The keys of [shard], by the name of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """The lengths of paired runs, and their job."""

    job: str
    first_steps: int
    more_steps: int
    seeds: int
    eval_batches: int = 16
    num_local: int = 2
    """The ranks of a node. A step has the same tokens with any."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of their folder."""
        return f"{self.job}-{self.optimizer.get('name', 'adamw')}"


@BENCHMARK.row("paired")
def paired(bench: Bench) -> Row:
    """The eval loss of four bits against exact crossings and against ZeRO++."""
    runs = Runs(job="thinner_losses", first_steps=240, more_steps=120, seeds=3, eval_batches=64)
    names = ("exact", "4bit", "ZeRO++")
    losses = paired_losses(bench, runs, names)
    floor = excess(losses["floor"], losses["exact"])
    coded, zero = (excess(losses[name], losses["exact"]) for name in ("4bit", "ZeRO++"))
    mean, zero_mean = statistics.mean(coded), statistics.mean(zero)
    apart = [one - other for one, other in zip(coded, zero, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    return Row(
        claim="eval loss, paired continuation, 10.8 M parameters, 4bit against exact / against ZeRO++",
        required="<= 0.1 % / not above",
        measured=f"{mean:+.3%} / {mean - zero_mean:+.3%} +- {error:.3%}",
        is_met=max(coded) <= 0.001 and mean <= zero_mean,
        note=(
            f"by seed: 4bit {percents(coded)}; ZeRO++ {percents(zero)}; the noise floor (exact, sums in another order) "
            f"{percents(floor)}. {losses['exact'][0]:.4f} with exact crossings; {runs.first_steps} exact steps, then "
            f"{runs.more_steps} of each kind, 1,024 tokens a step, 2 nodes x 2 ranks; {runs.eval_batches * 1024:,} "
            "held-out tokens."
        ),
    )


@BENCHMARK.row("stretch")
def stretch(bench: Bench) -> Row:
    """The eval losses of three and two bits: experimental."""
    runs = Runs(job="thinner_losses", first_steps=240, more_steps=120, seeds=2)
    names = ("int3 / int4", "int4 / int2")
    losses = paired_losses(bench, runs, ("exact", *names), has_floor=False)
    each = "; ".join(f"{name}: {percents(excess(losses[name], losses['exact']))}" for name in names)
    return Row(
        claim="eval loss, paired: int3 weights / int4 gradients; int4 weights / int2 gradients with feedback",
        required="measured, experimental",
        measured=each,
        is_met=True,
        note=f"by seed, against exact crossings, as in the row above; {runs.eval_batches * 1024:,} held-out tokens.",
    )


@BENCHMARK.row("optimizers")
def optimizers(bench: Bench) -> Row:
    """AdamW8bit, Muon and Shampoo with weights in four bits and gradients in eight."""
    found = {}
    for name, settings in (
        ("adamw8bit", {}), ("muon", {"adjust_lr_fn": "match_rms_adamw"}), ("shampoo", {"block_size": 128}),
    ):  # fmt: skip
        runs = Runs(
            job="optimizers",
            first_steps=150,
            more_steps=100,
            seeds=2,
            num_local=1,
            optimizer={"name": name, **settings},
        )
        losses = paired_losses(bench, runs, ("exact", "8-bit gradients", "4bit"), has_floor=False)
        found[name] = [excess(losses[wire], losses["exact"]) for wire in ("8-bit gradients", "4bit")]
    means = {name: statistics.mean(eight) for name, (eight, _) in found.items()}
    return Row(
        claim="eval loss, paired, AdamW8bit / Muon / Shampoo, int4 weights and int8 gradients against exact",
        required="<= 0.2 %",
        measured=" / ".join(f"{mean:+.3%}" for mean in means.values()),
        is_met=all(mean <= 0.002 for mean in means.values()),
        note="by seed: " + "; ".join(
            f"{name} {percents(eight)}, with int4 gradients {percents(four)}" for name, (eight, four) in found.items()
        ) + ". 1.7 M parameters, 150 exact steps, then 100 of each kind, 1,024 tokens a step, 2 nodes x 1 rank.",
    )  # fmt: skip


@BENCHMARK.row("scratch")
def scratch(bench: Bench) -> Row:
    """Runs from scratch, which scatter by seed."""
    steps, seeds = (20, 2) if bench.quick else (400, 5)
    losses: dict[str, list[float]] = {"exact": [], "4bit": []}
    for seed in range(seeds):
        for name, found in losses.items():
            folder = f"scratch-{name}-{seed}"
            config = job_of(bench, "optimizers", seed, name, steps=steps, folder=folder, eval_batches=64, num_local=1)
            found.append(train(config, num_ranks=NODES, num_local=1)[-1])
    differences = excess(losses["4bit"], losses["exact"])
    mean, error = statistics.mean(differences), statistics.stdev(differences) / seeds**0.5
    return Row(
        claim=f"eval loss from scratch, {seeds} seeds, 4bit against exact",
        required="<= 0.3 %, or within a standard error that is below 0.3 %",
        measured=f"{mean:+.3%} +- {error:.3%}",
        is_met=mean <= 0.003 or (mean <= error < 0.003),
        note=f"by seed {percents(differences)}; 1.7 M parameters, {steps} steps of 1,024 tokens, 2 nodes x 1 rank.",
    )


def paired_losses(
    bench: Bench, runs: Runs, names: tuple[str, ...], *, has_floor: bool = True
) -> dict[str, list[float]]:
    """The eval loss of each run at its end, by name and seed: [Note: Paired runs]."""
    first, more, seeds = (6, 4, 2) if bench.quick else (runs.first_steps, runs.more_steps, runs.seeds)
    losses: dict[str, list[float]] = {name: [] for name in (*names, *(["floor"] if has_floor else []))}
    for seed in range(seeds):
        base = f"{runs.name}-{seed}"
        common = {
            "optimizer": runs.optimizer, "seed": seed, "eval_batches": runs.eval_batches, "num_local": runs.num_local,
        }  # fmt: skip
        ranks = {"num_ranks": NODES * runs.num_local, "num_local": runs.num_local}
        begun = job_of(bench, runs.job, wire="exact", steps=first, folder=base, is_first=True, **common)
        if not (Path(begun.train.output) / "checkpoints" / f"step-{first}").exists():
            train(begun, **ranks)
        for name, found in losses.items():
            folder = f"{base}-{name.replace(' / ', '-')}-{runs.eval_batches}"
            config = job_of(
                bench, runs.job, wire="exact" if name == "floor" else name, steps=first + more, decay_steps=more,
                folder=folder, resume=f"{begun.train.output}/checkpoints/step-{first}",
                **common,
            )  # fmt: skip
            on_one_node = {"num_local": NODES * runs.num_local} if name == "floor" else {}
            found.append(finished(config, **{**ranks, **on_one_node}))
    return losses


def finished(config: Config, *, num_ranks: int, num_local: int) -> float:
    """The eval loss at the end of a run, which runs if it has not yet."""
    known = Path(config.train.output) / "eval.json"
    if not known.exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(train(config, num_ranks=num_ranks, num_local=num_local)[-1]))
    return float(json.loads(known.read_text()))


def job_of(
    bench: Bench, job: str, seed: int, wire: str, *, steps: int, folder: str, optimizer: dict[str, Any] | None = None,
    eval_batches: int = 16, num_local: int = 2, decay_steps: int = 1, resume: str = "never", is_first: bool = False,
) -> Config:  # fmt: skip
    """The training job of one run on nodes of `num_local` ranks."""
    base = load(_JOBS / f"{job}.toml")
    rows = TOKENS_PER_STEP // (NODES * num_local * base.data.sequence_length)
    keys = {"wire": EIGHT_BIT_GRADIENTS} if wire == "8-bit gradients" else WIRES[wire]
    decays = {"lr_schedule": "wsd", "decay_steps": decay_steps} if resume != "never" or is_first else {}
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, init_seed=seed),
        data=dataclasses.replace(base.data, cache=str(bench.out / "tokens"), seed=seed),
        shard=base.shard.with_keys(**keys),
        optimizer=dataclasses.replace(base.optimizer, **(optimizer or {}), **decays),
        train=dataclasses.replace(
            base.train, steps=steps, micro_batch_size=rows, eval_every=steps, eval_batches=eval_batches, resume=resume,
            save_every=0 if is_first else -1, output=str(bench.out / folder),
        ),
        log=dataclasses.replace(base.log, progress=False),
    )  # fmt: skip


def train(config: Config, *, num_ranks: int, num_local: int) -> list[float]:
    """Train with the trainer. Returns the eval losses."""
    launch(_train_rank, config, num_ranks=num_ranks, num_local=num_local, backend=None, timeout_s=_TIMEOUT_S)
    lines = (Path(config.train.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line]


def _train_rank(config: Config) -> None:
    """Run one rank of `laconic train`."""
    from laconic.train.loop import run

    run(config)


def excess(losses: list[float], exact: list[float]) -> list[float]:
    """By how much the losses exceed those of exact runs, as a share."""
    return [loss / reference - 1 for loss, reference in zip(losses, exact, strict=True)]


def percents(values: list[float]) -> str:
    """The values in per cent."""
    return ", ".join(f"{value:+.3%}" for value in values)
