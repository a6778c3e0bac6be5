"""What the cyclic schedule saves, what it costs, and that models train as well: every row of the claim.

    python benchmarks/cyclic.py                        all rows, some 40 minutes on 2 cores, recorded in RESULTS.md
    python benchmarks/cyclic.py --rows bytes,devices   some of them, recorded too
    python benchmarks/cyclic.py --quick                all rows on tiny jobs, printed only: does the method work?

Run rows with times (live, wall-clock, throughput, sharded) on a quiet machine; accuracy takes most of the time.

[Note: How each row is measured]
Activations, messages and the wall-clock are those of the runtime with stages that sleep for a known time, one process
per worker on one machine, as the stages note them themselves (_cyclic_jobs.py). Bytes of real models are traced over
one forward and backward of one worker, and summed as the workers' offsets prescribe (_cyclic_traces.py). Throughput is
that of real training in the lab, 4 nodes with one rank each, runs of all strategies alternating (_cyclic_lab.py).
Accuracy is that of one process that plays all workers, to the same bits as N of them (_cyclic_accuracy.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _cyclic_accuracy as accuracy
import numpy as np
from _cyclic_accuracy import Setting
from _cyclic_jobs import STAGE_BYTES, Watched, live_over_time, run_sleeping, train_digest
from _cyclic_traces import MODELS
from _launch import launch
from _llama import Llama
from measure import measure, options_of
from record import Record, Row, rows_table

from laconic.compare.runner import why
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule, StatePlacement
from laconic.lab import Lab, format_rate

_HERE = Path(__file__).parent
_TIMEOUT_S = 900.0

RATE_BITS_PER_S = 400e6
"""In the lab. DDP's step must be longer there than on an unshaped wire by EXPOSED, or the row says nothing."""
EXPOSED = 1.1
_LLAMA = Llama(
    hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=6, vocab=256, batch=4, sequence=128,
)  # fmt: skip
_TINY_LLAMA = dataclasses.replace(_LLAMA, hidden=96, intermediate=128, layers=4, sequence=32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """How large everything is."""

    op_s: float
    """Of stages that sleep."""
    workers: tuple[int, ...]
    """Whose live activations are counted."""
    batches: int
    wall_batches: int
    llama: Llama
    lab_steps: int
    repeats: int
    digits: dict[str, Any]
    language: dict[str, Any]
    out: Path


FULL = {
    "op_s": 0.08, "workers": (4, 8), "batches": 4, "wall_batches": 16, "llama": _LLAMA, "lab_steps": 8, "repeats": 3,
    "digits": {
        "seeds": 6, "tuning_seeds": 2, "epochs": 15,
        "settings": tuple(Setting(lr=lr, momentum=m) for lr, m in ((0.03, 0.9), (0.1, 0.9), (0.1, 0.5), (0.3, 0.5))),
    },
    "language": {
        "seeds": 5, "tuning_seeds": 1, "plain_steps": 400, "steps": 1000,
        "settings": (
            Setting(lr=2e-3, momentum=0.9), Setting(lr=2e-3, momentum=0.95, nesterov=True),
            Setting(lr=3e-3, momentum=0.95, nesterov=True),
        ),
    },
}  # fmt: skip
QUICK = {
    "op_s": 0.03, "workers": (2, 3), "batches": 3, "wall_batches": 3, "llama": _TINY_LLAMA, "lab_steps": 2,
    "repeats": 1,
    "digits": {"seeds": 2, "tuning_seeds": 1, "epochs": 1, "settings": (Setting(lr=0.05, momentum=0.9),)},
    "language": {
        "seeds": 2, "tuning_seeds": 1, "plain_steps": 2, "steps": 4,
        "settings": (Setting(lr=3e-3, momentum=0.9, nesterov=True),),
    },
}  # fmt: skip


def _sleeping(bench: Bench, rule: str, states: StatePlacement, workers: int, batches: int) -> list[Watched]:
    return launch(
        run_sleeping, workers, workers, rule, states, workers, batches, bench.op_s, backend="gloo", timeout_s=_TIMEOUT_S
    )


# ------------------------------------------------------------------------------------------------ the rows


def live(bench: Bench) -> Row:
    told, notes, is_met = [], [], True
    for n in bench.workers:
        cyclic, plain = (
            [alive for _, alive in live_over_time(_sleeping(bench, rule, "replicated", n, bench.batches))]
            for rule in ("v2", "dp")
        )
        ideal = n * (n + 1) // 2
        is_met &= max(cyclic) <= ideal + n // 2 and max(plain) == n * n
        told.append(f"N={n}: {max(cyclic)} against {max(plain)}")
        notes.append(f"N={n}: ideal {ideal}, at most {ideal + n // 2}")
    return Row(
        key="live",
        claim=f"live stage activations summed over workers, N = {_listed(bench.workers)}, at most, against dp",
        required="N(N+1)/2 + at most N/2, against N^2",
        measured="; ".join(told),
        is_met=is_met,
        note=(
            f"{'; '.join(notes)}. Rule v2 on Gloo, equal stages of {bench.op_s * 1e3:.0f} ms each way, "
            f"{bench.batches} batches, counted by the stages, from the beginning of a forward to the end of its "
            "backward."
        ),
    )


def traced_bytes(bench: Bench) -> Row:
    told, notes, is_met = [], [], True
    for model in MODELS:
        found = model.trace()
        by_workers = {n: found.reduction(n) for n in (8, 32)}
        is_met &= model.required is None or min(by_workers.values()) >= model.required
        told.append(f"{model.name} {' / '.join(f'{saved:.1%}' for saved in by_workers.values())}")
        notes.append(
            f"{model.name}: {found.peak_bytes / 2**20:.1f} MiB a worker at its peak, limit "
            f"{1 - found.mean_bytes / found.peak_bytes:.1%}"
        )
    return Row(
        key="bytes",
        claim="total peak of bytes saved for backward, N = 8 / 32, against all at once",
        required="; ".join(
            f"{model.name} {'reported' if model.required is None else f'-{model.required:.0%}'}" for model in MODELS
        ),
        measured="; ".join(told),
        is_met=is_met,
        note=(
            f"{'; '.join(notes)}. Traced on one worker, fp32, one sample (224 x 224; 1024 tokens): unique storages "
            "without parameters, time by FLOPs, the exact maximum over time of the staggered sum."
        ),
    )


def messages(bench: Bench) -> Row:
    n, told, most_of_all, largest, burst = 4, [], 0, 0.0, 0.0
    for rule in ("v1", "v2", "lag2"):
        watched = _sleeping(bench, rule, "replicated", n, bench.batches + 2)
        sends, receives = (
            max(len(step) for worker in watched for step in getattr(worker.log, name))
            for name in ("sent_bytes", "received_bytes")
        )
        steps = [step for worker in watched for step in worker.log.sent_bytes if step]
        largest = max(largest, max(size for step in steps for size in step) / (n * STAGE_BYTES))
        burst = max(burst, max(map(sum, steps)) / (n * STAGE_BYTES))
        most_of_all = max(most_of_all, sends, receives)
        told.append(f"{rule} {sends} + {receives}")
    return Row(
        key="messages",
        claim=f"messages per worker per time step, N = {n}, sends + receives / largest burst, against DP's all-reduce",
        required="<= 2 + 2 / P/N against P",
        measured=f"{', '.join(told)} / {burst:.3f} P, in messages of {largest:.3f} P",
        is_met=most_of_all <= 2 and burst <= 1 / n,
        note=(
            "counted where they are sent and taken, between the ops of the runtime on Gloo, replicated states; "
            "P: bytes of all parameters. An all-reduce begins with all of P at hand on every worker, "
            f"and moves {2 * (n - 1) / n:.2f} P of each. Two messages, a stage's new parameters and another's gradient "
            "sums, may leave at one boundary: nothing spaces them out, though a batch has fewer than one per time step."
        ),
    )


def devices(bench: Bench) -> Row:
    n, batches, rule = 4, 5, "v2"
    shared = Schedule(Rule.named(rule, n), "shared")
    alone = train_digest(rule, "replicated", n, batches)
    parts = {
        states: launch(train_digest, ranks, 1, rule, states, n, batches, backend="gloo", timeout_s=_TIMEOUT_S)
        for states, ranks in (("shared", shared.num_devices), ("replicated", n))
    }
    whole = {"shared": _stages_of(shared, parts["shared"])}
    whole |= {f"worker {worker}": part for worker, part in enumerate(parts["replicated"])}
    differing = [
        name for name, part in whole.items() if not all(np.array_equal(a, b) for a, b in zip(part, alone, strict=True))
    ]
    return Row(
        key="devices",
        claim=f"devices for model and data parallelism, N = {n}",
        required=f"{n * (n + 1) // 2} against {n * n}, same result to the bit",
        measured=f"{shared.num_devices} against {n * n}, {'equal' if not differing else 'different'} bits",
        is_met=shared.num_devices == n * (n + 1) // 2 and not differing,
        note=(
            f"parameters after {batches} batches of AdamW, rule {rule}, on {shared.num_devices} ranks with shared "
            f"stages, on {n} ranks with replicated ones, and in one process"
            f"{': ' + ', '.join(differing) if differing else ''}."
        ),
    )


def _stages_of(schedule: Schedule, parts: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """All stages' parameters, each from the first of its devices, all of which must agree."""
    found = []
    for stage in range(schedule.num_stages):
        first, *others = (parts[device] for device in schedule.devices_of(stage))
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        found += first
    return found


def wall_clock(bench: Bench) -> Row:
    n, ratios, on_time = 4, {}, {}
    ideal_s = Schedule(Rule.named("v2", n)).num_steps(bench.wall_batches) * bench.op_s
    for rule in ("v2", "lag2", "v1"):
        watched = _sleeping(bench, rule, "replicated", n, bench.wall_batches)
        wall_s = max(worker.end_s for worker in watched) - min(worker.start_s for worker in watched)
        ratios[rule] = wall_s / ideal_s
        on_time[rule] = statistics.mean(worker.on_time for worker in watched)
    return Row(
        key="wall-clock",
        claim="wall-clock against the ideal 2N-step schedule, unshaped",
        required="<= 1.10x",
        measured=", ".join(f"{rule} {ratio:.3f}x" for rule, ratio in ratios.items()),
        is_met=max(ratios.values()) <= 1.10,
        note=(
            f"N = {n} processes, {bench.wall_batches} batches of stages that take {bench.op_s * 1e3:.0f} ms each way, "
            f"filling and draining included: {ideal_s:.2f} s ideally. Time steps on time: "
            f"{', '.join(f'{rule} {share:.0%}' for rule, share in on_time.items())}."
        ),
    )


def throughput(bench: Bench) -> Row:
    free, times = (
        _alternated(bench, {"ddp": None}),
        _alternated(bench, dict.fromkeys(("ddp", "lag2/replicated", "v2/replicated"), RATE_BITS_PER_S)),
    )
    exposed = times["ddp"] / free["ddp"]
    speed = times["ddp"] / times["lag2/replicated"]
    return Row(
        key="throughput",
        claim="throughput in the lab where DP's all-reduce is exposed, against DDP",
        required=">= 1.0x",
        measured=f"lag2 {speed:.3f}x, v2 {times['ddp'] / times['v2/replicated']:.3f}x",
        is_met=speed >= 1 and exposed >= EXPOSED,
        note=(
            f"{bench.llama} on 4 nodes at {format_rate(RATE_BITS_PER_S)}: {_seconds(times)} a step, medians of "
            f"{bench.repeats} alternating runs of {bench.lab_steps} steps. DDP unshaped {free['ddp']:.3f} s: the wire "
            f"shows by {exposed - 1:.0%} (required: {EXPOSED - 1:.0%})."
        ),
    )


def sharded(bench: Bench) -> Row:
    times = _alternated(bench, dict.fromkeys(("fsdp2", "lag2/sharded", "v2/sharded"), RATE_BITS_PER_S))
    speed = times["fsdp2"] / times["lag2/sharded"]
    return Row(
        key="sharded",
        claim="throughput in the lab, sharded states, against FSDP2",
        required=">= 1.0x",
        measured=f"lag2 {speed:.3f}x, v2 {times['fsdp2'] / times['v2/sharded']:.3f}x",
        is_met=speed >= 1,
        note=(
            f"{bench.llama} on 4 nodes at {format_rate(RATE_BITS_PER_S)}: {_seconds(times)} a step, medians of "
            f"{bench.repeats} alternating runs of {bench.lab_steps} steps."
        ),
    )


def _alternated(bench: Bench, rates: dict[str, float | None]) -> dict[str, float]:
    """Seconds per step by strategy: the medians of runs that take turns."""
    job = bench.out / "lab.json"
    job.write_text(json.dumps({"llama": dataclasses.asdict(bench.llama), "steps": bench.lab_steps}))
    times: dict[str, list[float]] = {strategy: [] for strategy in rates}
    with Lab(nodes=4) as lab:
        for _, (strategy, rate) in itertools.product(range(bench.repeats), rates.items()):
            lab.set_rate(rate)
            answer = bench.out / "lab-answer.json"
            command = [str(_HERE / "_cyclic_lab.py"), strategy, str(job), str(answer)]
            outcome = lab.run(command, local=1, timeout_s=_TIMEOUT_S, show=False)
            if outcome.exit_code:
                raise RuntimeError(f"{strategy} failed: {why(outcome)}")
            found = json.loads(answer.read_text())
            print(f"{strategy}, {format_rate(rate)}: {found['step_s']:.3f} s, loss {found['loss']:.4f}", flush=True)
            times[strategy].append(found["step_s"])
    return {strategy: statistics.median(found) for strategy, found in times.items()}


def _seconds(times: dict[str, float]) -> str:
    return ", ".join(f"{strategy} {time:.3f} s" for strategy, time in times.items())


def digits(bench: Bench) -> Row:
    return _study(accuracy.digits(**bench.digits), "digits", "accuracy on scikit-learn's digits, a small ResNet")


def language(bench: Bench) -> Row:
    study = accuracy.language(**bench.language, folder=bench.out / "tokens")
    row = _study(study, "language", "eval loss on the trainer's corpus, a small Llama")
    tried = (
        "500 steps, all of them under the rule: dp 2.2264 ± 0.0182, v1 2.5328 ± 0.0408, v2 2.3576 ± 0.1042, lag2 "
        "2.5179 ± 0.0329, which is not within the noise."
    )
    return dataclasses.replace(row, tried=tried)


def _study(study: accuracy.Study, key: str, claim: str) -> Row:
    found = accuracy.outcomes(study, lambda line: print(line, flush=True))
    plain, *others = found
    digits_shown = 4 if study.is_loss else 2
    scale = 1 if study.is_loss else 100

    first = f", the first {study.plain_steps} under rule dp" if study.plain_steps else ""

    def told(outcome: accuracy.Outcome) -> str:
        return f"{outcome.rule} {scale * outcome.mean:.{digits_shown}f} ± {scale * outcome.deviation:.{digits_shown}f}"

    def paired(outcome: accuracy.Outcome) -> str:
        by_seed = [scale * (mine - its) for mine, its in zip(outcome.results, plain.results, strict=True)]
        mean, deviation = statistics.mean(by_seed), statistics.stdev(by_seed)
        return f"{outcome.rule} {mean:+.{digits_shown}f} ± {deviation:.{digits_shown}f}"

    return Row(
        key=key,
        claim=f"{claim}, tuned, {study.seeds} seeds, rules against dp",
        required="within seed noise of dp",
        measured=", ".join(told(outcome) for outcome in found) + ("" if study.is_loss else " %"),
        is_met=all(accuracy.is_within_noise(study, plain, other) for other in others),
        note=(
            f"{study.measure}, mean ± standard deviation between seeds, {study.steps} steps{first}, {accuracy.WORKERS} "
            "workers; noise: the larger deviation of the two. Differences from dp, seed by seed: "
            f"{', '.join(map(paired, others))}. Learning rates and, in brackets, momenta "
            f"{', '.join(f'{outcome.rule} {outcome.setting}' for outcome in found)}, chosen of "
            f"{', '.join(map(str, study.settings))} on validation data with the first "
            f"{study.tuning_seeds} seeds."
        ),
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


ROWS: dict[str, Callable[[Bench], Row]] = {
    "live": live,
    "bytes": traced_bytes,
    "messages": messages,
    "devices": devices,
    "throughput": throughput,
    "sharded": sharded,
    "wall-clock": wall_clock,
    "digits": digits,
    "language": language,
}
"""In the order of the table."""


def main() -> int:
    options = options_of(__doc__, ROWS, quick="tiny jobs")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(**(QUICK if options.quick else FULL), out=Path(folder))  # type: ignore[arg-type]
        rows = measure(ROWS, options, bench, lambda found: Record("cyclic.py", found, ROWS).save())
    print(f"\n{rows_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
