"""A pipeline whose stages are machines beside every way to shard the data alone: in the lab, on real engines.

    python -m benchmarks.pipeline                         all rows, some 40 minutes on 2 cores, recorded
    python -m benchmarks.pipeline --rows bytes,kills      some rows, recorded too
    python -m benchmarks.pipeline --quick                 all rows on a tiny job, printed only

Rows are measured on 2 nodes x 2 ranks; jobs/pipeline.toml is the job. The rows `pipelines` of benchmarks.plan hold the
planner's predictions beside runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.wire.bench import Bench as WireBench
from benchmarks.wire.bench import Job, Key, Setup, opened, seconds_of, wire_bytes
from laconic.compare.case import STRATEGIES, Case, config_of
from laconic.compare.runner import explain_failure
from laconic.compare.table import render
from laconic.config import to_dict
from laconic.lab import Lab, format_rate
from laconic.rehearse import Kill, ranks
from tests.support.jobs import said_after_kill, started
from tests.support.measure import Benchmark, BenchmarkError
from tests.support.pipelines import step_for_ever
from tests.support.record import Row, ratio_row

HOME, HALF = Setup(job_file="pipeline"), Setup(job_file="pipeline", is_half=True)
EAGER = Setup(job_file="pipeline", schedule="Eager1F1B")
FAST_BITS_PER_S, SLOW_BITS_PER_S = 200e6, 50e6
_PEERS = ("host", "4bit", "fsdp2-pipeline", "hsdp")
_BYTES_A_VALUE = 4
_PINNED: Sequence[tuple[Job, int, tuple[str, ...]]] = (
    ("full", 2, ("pipeline", "host", "4bit")),
    ("full", 8, ("pipeline", "host", "4bit")),
    ("lora", 2, ("pipeline", "host", "ddp")),
)
"""Jobs, rows of a rank in a step, and strategies. A pipeline cuts its ranks' rows into micro-batches of one row."""
_PINNED_STEPS, _WARM_STEPS, _PINNED_REPEATS = 10, 3, 3
_TURNS, _KILLS = range(20, 60), 10


class Bench(WireBench):
    """`benchmarks.wire.bench.Bench` on this job."""

    home = HOME

    def _steps(self, key: Key) -> int:
        """The number of steps of a case."""
        return 5 if self.quick or key.setup == HALF else 10


def _table(bench: Bench) -> str:
    return render(list(bench.results.values()))


BENCHMARK = Benchmark(
    measures=("laconic.pipeline", "laconic.strategies", "laconic.shard", "laconic.comm"),
    name="pipeline",
    prepare=lambda options: opened(Bench(options.out, quick=options.quick), HOME),
    details=_table,
)


@BENCHMARK.row("bytes")
def wire_bytes_row(bench: Bench) -> Row:
    """Bytes of a step at the interface against the activations' own."""
    run = bench.result("pipeline", setup=HOME)
    config = bench.comparison(HOME).base
    assert isinstance(config.model.config, dict)
    rows = run.num_nodes * run.num_local * config.train.micro_batch_size * config.train.accumulation
    tokens = rows * config.data.sequence_length
    formula = float(_BYTES_A_VALUE * tokens * config.model.config["hidden_size"])
    at_interface, counted = wire_bytes(run), run.traffic_bytes["node/activations"]
    error = at_interface / formula - 1
    return Row(
        claim="bytes of a step at a node's interface against 2 T h for its one boundary",
        measured=f"{error:+.2%}; as the engine counts them {counted / formula - 1:+.2%}",
        note=f"T = {tokens}, {formula / 1e6:.3f} MB by the formula, {at_interface / 1e6:.3f} MB at the interface, "
        "where headers, acknowledgements and the control of a step count, too; "
        f"{wire_bytes(bench.result('host', setup=HOME)) / 1e6:.3f} MB for exact crossings of weights and gradients.",
    )


@BENCHMARK.row("seconds")
def seconds(bench: Bench) -> Row:
    """Seconds of a step at two rates against all that trains the same model."""
    ratios: dict[str, list[float]] = {name: [] for name in _PEERS}
    notes, runs = [], {}
    for rate in (FAST_BITS_PER_S, SLOW_BITS_PER_S):
        times = bench.times((*_PEERS, "pipeline"), "full", rate, HOME)
        for name, found in ratios.items():
            found.append(times["pipeline"] / times[name])
        runs |= {f"{name} at {format_rate(rate)}": seconds for name, seconds in times.runs.items()}
        notes.append(f"{format_rate(rate)}: {seconds_of(times)}")
    exact = bench.result("host", "full", FAST_BITS_PER_S, setup=HOME).losses
    staged = bench.result("pipeline", "full", FAST_BITS_PER_S, setup=HOME).losses
    gap = max(abs(a / b - 1) for a, b in zip(exact, staged, strict=True))
    return Row(
        claim="seconds of a step at 200 / 50 Mbit/s, full training, `pipeline` against "
        + "; ".join(STRATEGIES[name].label for name in _PEERS),
        measured="; ".join(" / ".join(f"{each:.3f}x" for each in found) for found in ratios.values())
        + f"; losses within {gap:.1e}",
        note=f"medians of {bench.repeats} alternating runs. {'; '.join(notes)}. In fp32. Each rank of a stage keeps "
        "its weights and sums of gradients whole until the step ends, in both pipelines. All ranks share two "
        "processors, so a stage that waits in a bubble lends its processor to the others.",
        runs=runs,
    )


@BENCHMARK.row("eager")
def eager(bench: Bench) -> Row:
    """Seconds of a step where messages travel beside compute, against torch's 1F1B."""
    ratios, notes, runs = [], [], {}
    for rate in (FAST_BITS_PER_S, SLOW_BITS_PER_S):
        found = [
            [bench.result("pipeline", "full", rate, repeat, setup) for setup in (EAGER, HOME)]
            for repeat in range(bench.repeats)
        ]
        ours, plain = ([run.step_s for run in each] for each in zip(*found, strict=True))
        ratios.append(statistics.median(ours) / statistics.median(plain))
        runs |= {f"Eager1F1B at {format_rate(rate)}": ours, f"1F1B at {format_rate(rate)}": plain}
        notes.append(f"{format_rate(rate)}: {statistics.median(ours):.3f} s, {statistics.median(plain):.3f} s")
    return Row(
        claim="seconds of a step at 200 / 50 Mbit/s, full training, `pipeline` with Eager1F1B against 1F1B",
        measured=" / ".join(f"{ratio:.3f}x" for ratio in ratios),
        note=f"medians of {bench.repeats} alternating runs. {'; '.join(notes)}. The same bytes cross.",
        runs=runs,
    )


@BENCHMARK.row("seconds-half")
def seconds_half(bench: Bench) -> Row:
    """Seconds of a step in bf16 against lossless crossings."""
    times = bench.times(("host", "lossless", "pipeline"), "full", SLOW_BITS_PER_S, HALF)
    ratio = times["pipeline"] / times["lossless"]
    return ratio_row(
        claim="seconds of a step at 50 Mbit/s, full training in bf16, `pipeline` against lossless crossings",
        ratio=ratio,
        note=f"medians of {bench.repeats} alternating runs: {seconds_of(times)}. On a processor that multiplies bf16 "
        "slowly compute is most of a step.",
        runs=times.runs,
    )


@BENCHMARK.row("two-boxes")
def two_boxes(bench: Bench) -> Row:
    """Tokens a second of two nodes against one, each with a processor of its own."""
    measured, words = [], []
    for job, rows, names in _PINNED:
        rates = {name: [_pinned_tokens_per_s(bench, job, rows, name, nodes) for nodes in (1, 2)] for name in names}
        one_box = max(one for one, _ in rates.values())
        gains = {STRATEGIES[name].label: two / one_box for name, (_, two) in rates.items()}
        best = max(gains, key=lambda label: gains[label])
        measured.append(f"{gains[best]:.2f}x ({best})")
        words.append(f"{job}, {rows}: " + ", ".join(f"{label} {gain:.2f}x" for label, gain in gains.items()))
    return Row(
        claim=f"tokens a second of 2 x 2 at {format_rate(FAST_BITS_PER_S)} against 1 x 2, by the best of our "
        "strategies: full training with 2 / 8 rows a rank / LoRA with 2",
        measured=" / ".join(measured),
        note=f"Against the fastest on one node. {'; '.join(words)}. A row has 32 tokens. A pipeline is Eager1F1B with "
        "one row a micro-batch, 4 or 16 of them a step; the others take all rows of a rank at once. The ranks of a "
        "node share one processor of their own, on which the kernel's work for the wire runs, too; medians of "
        f"{_PINNED_REPEATS} runs.",
    )


def _pinned_tokens_per_s(bench: Bench, job: Job, rows: int, strategy: str, nodes: int) -> float:
    """The median over runs, each in fresh processes. On one node a pipeline has no stages, and shards the data."""
    name = "rank" if nodes == 1 and strategy == "pipeline" else strategy
    base, out = bench.comparison(EAGER).base, bench.out / f"pinned-{rows}-{nodes}"
    each, times = (1, rows) if name == "pipeline" else (rows, 1)
    train = dataclasses.replace(base.train, micro_batch_size=each, accumulation=times)
    steps = 5 if bench.quick else _PINNED_STEPS
    found = []
    for repeat in range(1 if bench.quick else _PINNED_REPEATS):
        case = Case(strategy=name, job=job, steps=steps, measure_memory=False, log_every=100, repeat=repeat)
        given, answer = (bench.out / f"pinned-{rows}-{nodes}-{case.name}-{what}.json" for what in ("jobs", "answers"))
        given.write_text(json.dumps([to_dict(config_of(dataclasses.replace(base, train=train), case, out))]))
        with Lab(nodes=nodes, rate_bits_per_s=FAST_BITS_PER_S if nodes > 1 else None) as lab:
            command = ["-m", "benchmarks.plan.ranks", str(given), str(answer), "pinned"]
            outcome = lab.run(command, local=2, env={"OMP_NUM_THREADS": "1"}, timeout_s=600.0, show=False)
        if outcome.exit_code:
            raise BenchmarkError(f"{case.label} on {nodes} x 2: {explain_failure(outcome)}")
        (summary,) = json.loads(answer.read_text())
        found.append(summary["tokens_per_step"] / statistics.median(summary["step_s"][_WARM_STEPS:]))
    return statistics.median(found)


@BENCHMARK.row("kills")
def kills(bench: Bench) -> Row:
    """How each stage ends when one of them dies."""
    turns = list(_TURNS)[:: 10 if bench.quick else 1]
    named = 0
    for turn in turns:
        ends = ranks(step_for_ever, nodes=3, faults=[Kill(rank=1, turn=turn)])
        told = [ends[0], ends[2]]  # rank 2 may wait for rank 0, which ends first
        named += all("is gone" in each for each in told) and any("rank 1 is gone" in each for each in told)
    waits_s, is_named = [], []
    for kill in range(2 if bench.quick else _KILLS):
        processes = started(bench.out, _endless(bench, f"killed-{kill}"))
        code, lines, seconds_to_end = said_after_kill(processes, 1 + kill)
        waits_s.append(seconds_to_end)
        is_named.append(code > 0 and len(lines) == 1)
    return Row(
        claim=f"a stage's rank dies at {len(turns)} points of a schedule of three stages, and {len(waits_s)} real "
        "processes of two: every other rank ends, and names it",
        measured=f"{named} of {len(turns)}; {sum(is_named)} of {len(is_named)}, the slowest after {max(waits_s):.1f} s",
        note="In a schedule a rank gets its turn when the others wait, and the killed one gets none any more. A real "
        "process gets SIGKILL after its first, second, ... step.",
    )


def _endless(bench: Bench, folder: str) -> Any:
    base = bench.comparison(HOME).base
    train = dataclasses.replace(
        base.train, steps=1_000_000, log_every=1, eval_every=0, save_every=-1, device="cpu",
        output=str(bench.out / folder),
    )  # fmt: skip
    return dataclasses.replace(base, train=train)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
