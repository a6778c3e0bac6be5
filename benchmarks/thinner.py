"""How many bytes, seconds and how much loss crossings in four bits cost and save: in the lab, on real engines.

    python -m benchmarks.thinner                           all rows, recorded
    python -m benchmarks.thinner --rows bytes,seconds      some rows, recorded too
    python -m benchmarks.thinner --quick                   all rows on a tiny job, printed only

Rows are measured on 2 nodes x 2 ranks; jobs/thinner.toml is the training job. FSDP2 has a true ring reduce-scatter, as
in benchmarks.wire. ZeRO++ is its algorithm on laconic's engine (strategies/known/engine.py): weights cross in every
forward and gradients in every micro-batch, as published. DeepSpeed has kept weights until the step since 0.13.2.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.wire.bench import Bench as WireBench
from benchmarks.wire.bench import Key, Setup, opened, seconds_of, wire_bytes
from laconic.compare.case import STRATEGIES
from laconic.compare.table import render
from laconic.config import Config, load
from laconic.lab import format_rate
from tests.support.launch import launch
from tests.support.measure import Benchmark
from tests.support.record import Row, ratio_row

THINNER = Setup(job_file="thinner")
ACCUMULATED = Setup(job_file="thinner", accumulation=4)
HALF = Setup(job_file="thinner", is_half=True)
FAST_BITS_PER_S, SLOW_BITS_PER_S = 200e6, 50e6
_JOBS = Path(__file__).parent / "jobs"
_TIMEOUT_S = 3600.0
NODES, LOCAL = 2, 2


class Bench(WireBench):
    """`benchmarks.wire.bench.Bench` on this job."""

    home = THINNER

    def _steps(self, key: Key) -> int:
        """The number of steps of a case: few where a step takes long."""
        if self.quick:
            return 5
        if key.setup == HALF:
            return 30 if key.rate_bits_per_s is None else 20  # the first differences are the longest
        return 8 if key.rate_bits_per_s == SLOW_BITS_PER_S else 12


def _table(bench: Bench) -> str:
    return render(list(bench.results.values()))


BENCHMARK = Benchmark(
    measures=("laconic.codec", "laconic.comm", "laconic.shard"),
    name="thinner",
    prepare=lambda options: opened(Bench(options.out, quick=options.quick), THINNER),
    details=_table,
)


def _bytes(bench: Bench, strategy: str, setup: Setup = THINNER) -> float:
    return wire_bytes(bench.result(strategy, setup=setup))


@BENCHMARK.row("bytes")
def wire_bytes_row(bench: Bench) -> Row:
    """Bytes at the interface against FSDP2, exact crossings and ZeRO++, and for each parameter."""
    coded = bench.result("4bit", setup=THINNER)
    per_parameter = wire_bytes(coded) / coded.num_parameters
    across = (coded.num_nodes - 1) / coded.num_nodes
    ratios = {name: wire_bytes(coded) / _bytes(bench, name) for name in ("fsdp2", "host", "zero++")}
    return Row(
        claim="wire bytes, full training, 4bit: B a parameter, against FSDP2's ring / laconic exact / ZeRO++",
        measured=f"{per_parameter / across:.3f} (N-1)/N B; " + " / ".join(f"{each:.4f}x" for each in ratios.values()),
        note=(
            f"at the interface, headers and control included, per node and step: {_sizes(bench, THINNER)}. N = 2; "
            f"counted by the engine: {(coded.counted_bytes or 0) / 1e6:.3f} MB."
        ),
    )


@BENCHMARK.row("accumulated")
def accumulated(bench: Bench) -> Row:
    """Bytes of a step with four micro-batches, against ZeRO++, which crosses in each of them."""
    ratio = _bytes(bench, "4bit", ACCUMULATED) / _bytes(bench, "zero++", ACCUMULATED)
    return ratio_row(
        claim="wire bytes with 4 micro-batches a step, 4bit against ZeRO++",
        ratio=ratio,
        note=f"per node and step: {_sizes(bench, ACCUMULATED, ('zero++', '4bit'))}.",
    )


@BENCHMARK.row("seconds")
def seconds(bench: Bench) -> Row:
    """Seconds a step against FSDP2's ring at two rates."""
    ratios, notes, runs = [], [], {}
    for rate in (FAST_BITS_PER_S, SLOW_BITS_PER_S):
        times = bench.times(("fsdp2", "4bit"), "full", rate, THINNER)
        ratios.append(times["4bit"] / times["fsdp2"])
        runs |= {f"{name} at {format_rate(rate)}": seconds for name, seconds in times.runs.items()}
        notes.append(f"{format_rate(rate)}: {seconds_of(times)}")
    return Row(
        claim="seconds a step at 200 / 50 Mbit/s, 10.8 M parameters, 4bit against FSDP2's ring",
        measured=" / ".join(f"{ratio:.3f}x" for ratio in ratios),
        note=f"medians of {bench.repeats} alternating runs. " + "; ".join(notes) + ".",
        runs=runs,
    )


@BENCHMARK.row("against-hsdp")
def against_hsdp(bench: Bench) -> Row:
    """Seconds a step at the slow rate against HSDP and ZeRO++'s algorithm."""
    times = bench.times(("hsdp", "zero++", "4bit"), "full", SLOW_BITS_PER_S, THINNER)
    by_hsdp, by_zero = times["4bit"] / times["hsdp"], times["4bit"] / times["zero++"]
    return Row(
        claim="seconds a step at 50 Mbit/s, 4bit against HSDP / ZeRO++'s algorithm",
        measured=f"{by_hsdp:.3f}x / {by_zero:.3f}x",
        note=f"medians of {bench.repeats} alternating runs: {seconds_of(times)}.",
        runs=times.runs,
    )


@BENCHMARK.row("unshaped")
def unshaped(bench: Bench) -> Row:
    """Seconds a step on an unshaped wire against exact crossings: what coding costs."""
    times = bench.times(("host", "4bit"), setup=THINNER)
    return ratio_row(
        claim="seconds a step on an unshaped wire, 4bit against exact (CPU)",
        ratio=times["4bit"] / times["host"],
        note=f"medians of {bench.repeats} alternating runs: {seconds_of(times)}.",
        runs=times.runs,
    )


@BENCHMARK.row("memory")
def memory(bench: Bench) -> Row:
    """The device's peak and the host's bytes against exact crossings."""
    exact, coded = (bench.result(name, setup=THINNER) for name in ("host", "4bit"))
    peaks = [run.allocated_peak_bytes or 0 for run in (coded, exact)]
    engine = [run.engine_peak_bytes or 0 for run in (coded, exact)]
    ratio = peaks[0] / peaks[1]
    return Row(
        claim="device peak against exact / host bytes against exact",
        measured=f"{ratio:.3f}x / {coded.host_bytes_per_node / exact.host_bytes_per_node:.4f}x",
        note=(
            f"torch's allocator: {peaks[0] / 1e6:.2f} against {peaks[1] / 1e6:.2f} MB on the fullest rank; the "
            f"engine's own buffers {engine[0] / 1e6:.2f} against {engine[1] / 1e6:.2f} MB."
        ),
    )


@BENCHMARK.row("lossless-bytes", section="lossless")
def lossless_bytes(bench: Bench) -> Row:
    """Bytes at the interface of lossless crossings, for each parameter."""
    names = ("host", "lossless", "4bit", "lossless-4bit")
    runs = {name: bench.result(name, setup=HALF) for name in names}
    size = runs["host"].num_parameters * (NODES - 1) / NODES
    each = {name: wire_bytes(run) / size for name, run in runs.items()}
    counted = [runs["lossless"].traffic_bytes[f"node/{purpose}"] for purpose in ("weights", "gradients")]
    bits, gradient_bits = (8 * each["lossless"] * nbytes / sum(counted) for nbytes in counted)
    return Row(
        claim="wire bytes in bf16: bits a weight / a gradient; B a parameter and step, `lossless` / `lossless-4bit`",
        measured=(
            f"{bits:.2f} / {gradient_bits:.2f} bits; {each['lossless']:.3f} / {each['lossless-4bit']:.3f} (N-1)/N B"
        ),
        note=(
            "at the interface, headers, margins and control included, per node and step, the mean of 29 steps in which "
            f"the rate rises to 3e-4 and falls: {_sizes(bench, HALF, names)}. No prediction by the last difference. "
            "Weights and gradients share these bytes as they share those that the engine counts."
        ),
    )


@BENCHMARK.row("lossless-seconds", section="lossless")
def lossless_seconds(bench: Bench) -> Row:
    """Seconds a step against exact crossings in bf16, and with gradients in four bits, at two rates."""
    by_exact, by_coded, notes, runs = [], [], [], {}
    for rate in (FAST_BITS_PER_S, SLOW_BITS_PER_S):
        times = bench.times(("host", "lossless", "4bit", "lossless-4bit"), "full", rate, HALF)
        runs |= {f"{name} at {format_rate(rate)}": seconds for name, seconds in times.runs.items()}
        by_exact.append(times["lossless"] / times["host"])
        by_coded.append(times["lossless-4bit"] / times["4bit"])
        notes.append(f"{format_rate(rate)}: {seconds_of(times)}")
    return Row(
        claim="seconds a step at 200 / 50 Mbit/s in bf16: `lossless` against exact; `lossless-4bit` against `4bit`",
        measured="; ".join(" / ".join(f"{ratio:.3f}x" for ratio in ratios) for ratios in (by_exact, by_coded)),
        note=(
            f"medians of {bench.repeats} alternating runs. {'; '.join(notes)}. Four ranks share two cores, so each "
            "value that is coded costs what two cost on a node of its own."
        ),
        runs=runs,
    )


@BENCHMARK.row("lossless-unshaped", section="lossless")
def lossless_unshaped(bench: Bench) -> Row:
    """Seconds a step on an unshaped wire against exact crossings: what lossless coding costs."""
    times = bench.times(("host", "lossless"), setup=HALF)
    return ratio_row(
        claim="seconds a step on an unshaped wire, `lossless` against exact in bf16 (CPU)",
        ratio=times["lossless"] / times["host"],
        note=f"medians of {bench.repeats} alternating runs: {seconds_of(times)}. With numba. Two cores code for four "
        "ranks.",
        runs=times.runs,
    )


def _sizes(bench: Bench, setup: Setup, names: tuple[str, ...] = ("fsdp2", "host", "zero++", "4bit")) -> str:
    return ", ".join(f"{STRATEGIES[name].label} {_bytes(bench, name, setup) / 1e6:.3f} MB" for name in names)


_FIRST_STEPS, _MORE_STEPS, _SEEDS, _EVAL_BATCHES = 240, 120, 3, 64
_FLOOR = "floor"
_HALF_KEYS = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
PAIRED: dict[str, dict[str, Any]] = {
    "exact": {}, "4bit": {"wire": "4bit"}, "ZeRO++": {"strategy": "zero++"}, _FLOOR: {},
    "exact in bf16": _HALF_KEYS, "lossless-4bit": {"wire": "lossless-4bit", **_HALF_KEYS},
    "lossless-2bit": {"wire": "lossless-2bit", **_HALF_KEYS},
}  # fmt: skip
"""The keys of [shard], by the name of a run. The floor is exact, and adds up in another order, as on one node."""


@BENCHMARK.row("paired")
def paired(bench: Bench) -> Row:
    """The eval loss of four bits against exact crossings and against ZeRO++."""
    losses = paired_losses(bench, ("exact", "4bit", "ZeRO++", _FLOOR))
    coded, zero, floor = (excess(losses[name], losses["exact"]) for name in ("4bit", "ZeRO++", _FLOOR))
    mean, zero_mean = statistics.mean(coded), statistics.mean(zero)
    apart = [one - other for one, other in zip(coded, zero, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5
    return Row(
        claim="eval loss, paired continuation, 10.8 M parameters, 4bit against exact / against ZeRO++",
        measured=f"{mean:+.3%} / {mean - zero_mean:+.3%} +- {error:.3%}",
        note=(
            f"by seed: 4bit {percents(coded)}; ZeRO++ {percents(zero)}; the noise floor (exact, sums in another order) "
            f"{percents(floor)}. {losses['exact'][0]:.4f} with exact crossings; {_FIRST_STEPS} exact steps, then "
            f"{_MORE_STEPS} of each kind, 1,024 tokens a step, {NODES} nodes x {LOCAL} ranks; {_EVAL_BATCHES * 1024:,} "
            "held-out tokens."
        ),
    )


@BENCHMARK.row("lossless-paired", section="lossless")
def lossless_paired(bench: Bench) -> Row:
    """The eval loss of lossless weights with gradients in four and two bits."""
    losses = paired_losses(bench, ("exact in bf16", "lossless-4bit", "lossless-2bit"))
    found = {name: excess(losses[name], losses["exact in bf16"]) for name in ("lossless-4bit", "lossless-2bit")}
    means = [statistics.mean(each) for each in found.values()]
    return Row(
        claim="eval loss, paired, in bf16, lossless weights with gradients in int4 / int2 against exact ones",
        measured=" / ".join(f"{mean:+.3%}" for mean in means),
        note=f"by seed: {'; '.join(f'{name} {percents(each)}' for name, each in found.items())}. As the row paired of "
        "section thinner.",
    )


def paired_losses(bench: Bench, names: Sequence[str]) -> dict[str, list[float]]:
    """The eval loss of each run at its end, by name and seed. Runs of a seed go on from one checkpoint."""
    first, more, seeds = (6, 4, 2) if bench.quick else (_FIRST_STEPS, _MORE_STEPS, _SEEDS)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        begun = job_of(bench, "thinner_losses", seed, f"paired-{seed}", steps=first, decay_steps=1, save_every=0)
        if not (Path(begun.train.output) / "checkpoints" / f"step-{first}").exists():
            train(begun)
        for name, found in losses.items():
            config = job_of(
                bench, "thinner_losses", seed, f"paired-{seed}-{name}", steps=first + more, decay_steps=more,
                resume=f"{begun.train.output}/checkpoints/step-{first}",
            )  # fmt: skip
            config = dataclasses.replace(config, shard=config.shard.with_keys(**PAIRED[name]))
            known = Path(config.train.output) / "eval.json"
            if not known.exists():
                losses_of_run = train(config, num_local=NODES * LOCAL if name == _FLOOR else LOCAL)
                known.write_text(json.dumps(losses_of_run["eval_loss"][-1]))
            found.append(float(json.loads(known.read_text())))
    return losses


@BENCHMARK.row("adamw8bit-loss", section="optimizers")
def adamw8bit_loss(bench: Bench) -> Row:
    """The loss under AdamW8bit beside AdamW, on one rank."""
    steps, seeds, last = (20, 1, 20) if bench.quick else (300, 6, 20)
    pairs = []
    for seed in range(seeds):
        runs = []
        for name in ("adamw8bit", "adamw"):
            config = job_of(bench, "optimizers", seed, f"{name}-{seed}", steps=steps)
            optimizer = dataclasses.replace(config.optimizer, name=name)
            runs.append(train(dataclasses.replace(config, optimizer=optimizer), num_ranks=1, num_local=1)["loss"])
        pairs.append([statistics.mean(losses[-last:]) for losses in runs])
    adamw8bit, adamw = (statistics.mean(losses) for losses in zip(*pairs, strict=True))
    difference = adamw8bit / adamw - 1
    return Row(
        claim=f"loss after {steps} steps of the trainer, AdamW8bit against AdamW",
        measured=f"{difference:+.3%}",
        note=(
            f"mean of the last {last} steps and of {seeds} seeds, on identical batches: {adamw8bit:.4f} against "
            f"{adamw:.4f}; by seed {', '.join(f'{a / b - 1:+.2%}' for a, b in pairs)}. 1.7 M parameters, 8 rows of 128 "
            "bytes a step."
        ),
        measures=("laconic.optim", "laconic.ragged", "laconic.shard"),
    )


def job_of(
    bench: Bench, job: str, seed: int, folder: str, *, steps: int, decay_steps: int = 0, resume: str = "never",
    save_every: int = -1,
) -> Config:  # fmt: skip
    """A training job of jobs/, with a seed and a folder of its own, and with so many steps in which the rate falls."""
    base = load(_JOBS / f"{job}.toml")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, init_seed=seed),
        data=dataclasses.replace(base.data, cache=str(bench.out / "tokens"), seed=seed),
        optimizer=dataclasses.replace(base.optimizer, decay_steps=decay_steps) if decay_steps else base.optimizer,
        train=dataclasses.replace(
            base.train, steps=steps, eval_every=steps, eval_batches=_EVAL_BATCHES, resume=resume, save_every=save_every,
            output=str(bench.out / folder),
        ),
    )  # fmt: skip


def train(config: Config, *, num_ranks: int = NODES * LOCAL, num_local: int = LOCAL) -> dict[str, list[float]]:
    """Train with the trainer. Returns the losses of its steps and of its evaluations."""
    shutil.rmtree(config.train.output, ignore_errors=True)  # of a run that was stopped
    launch(_train_rank, config, num_ranks=num_ranks, num_local=num_local, backend=None, timeout_s=_TIMEOUT_S)
    lines = (Path(config.train.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key: [line[key] for line in map(json.loads, lines) if key in line] for key in ("loss", "eval_loss")}


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


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
