"""What islands that agree rarely save, and what it costs in quality: every row of the claim.

    python benchmarks/local_steps.py                        all rows, some 90 minutes on 2 cores, recorded in RESULTS.md
    python benchmarks/local_steps.py --rows bytes,peak      some of them, recorded too
    python benchmarks/local_steps.py --quick                all rows on tiny jobs, printed only: does the method work?

Four islands of one rank each train a Llama over bytes on the trainer's corpus (benchmarks/_islands.py). Losses do not
mind what else the machine does; times (wall-clock, overlap) are measured in the lab on a quiet one.

[Note: Equal tokens]
All runs of a seed take the same rows in the same steps; a step of every-step data parallel averages the gradients of
the rows that the islands of the others see on their own. They start from the same weights, and follow the rest of one
learning-rate schedule: before, a model of this size learns something new with every batch, and averages of weights that
learnt different things lose much of it (DiLoCo's paper begins after a quarter of its steps, too).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from _islands import Answer, Job, Shape, run_jobs, write_jobs
from _launch import launch
from _partial import step_cost
from measure import measure, options_of
from record import Record, Row, rows_table

from laconic.compare.runner import why
from laconic.lab import Lab, LabUnavailable, format_rate

_HERE = Path(__file__).parent
_PICTURE = _HERE.parent / "docs" / "local-steps.png"
_ISLANDS = 4
_TIMEOUT_S = 3 * 3600.0
_RATE = 50e6
_TINY = Shape(hidden=32, intermediate=64, layers=8)
_SMALL_STEP = {"rows": 2, "length": 64}
"""Rows of jobs whose times are measured: the wire, and not two cores for four islands, is what they wait for."""

_WIDE = Shape(hidden=384, intermediate=1024, layers=4)
"""Of the wall-clock: half the layers of `Shape` and four times its parameters, so that calls of small kernels, which no
large model waits for, weigh less beside the wire."""
_WIDE_LR = 5e-4
"""Of 2e-3, 1e-3 and this one the best for data parallel."""

_WARM_STEPS = 880
"""Of every-step data parallel, before what is compared begins: [Note: Equal tokens]."""
_LOSS_STEPS = 320
_EVERY = 16
"""For twenty syncs in these steps: the outer momentum needs about ten."""
_LOSS_SHAPE = Shape(layers=5)
_STREAMED = {"fragments": 4, "overlap": 2}
LOSSES = {
    "ddp": {"kind": "ddp"},
    "diloco int8": {"codec": "int8"},
    "diloco fp4": {"codec": "fp4"},
    "streamed int8": {"codec": "int8", **_STREAMED},
    "streamed fp4": {"codec": "fp4", **_STREAMED},
    "slices 2": {"codec": "fp4", "slices": 2, "outer_lr": 0.4, **_STREAMED},
    "slices 4": {"codec": "fp4", "slices": 4, "outer_lr": 0.2, **_STREAMED},
}
"""The runs whose losses are compared. Islands that train different slices do not see each other move, and overshoot
together: the more slices, the shorter the outer step. Outer settings were tuned on a seed that is none of the runs'."""
_OUTER_MOMENTUM = 0.8
"""0.9 forgets too slowly in twenty syncs: what was learnt at a higher learning rate carries on into the end."""


class Bench:
    """Runs what rows ask for, each job once."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.shape = _TINY if quick else Shape()
        self.seeds = 1 if quick else 3
        self.loss_steps = 40 if quick else _LOSS_STEPS
        self.warm_steps = 20 if quick else _WARM_STEPS
        self.answers: dict[str, Answer] = {}

    def losses(self, name: str) -> list[float]:
        """Final loss by seed of one of `LOSSES`."""
        return [self.answer(f"{name}/{seed}").evaluations[-1][2] for seed in range(self.seeds)]

    def answer(self, key: str) -> Answer:
        """Of a job of `LOSSES`, "name/seed"; all that are missing are run at once."""
        if key not in self.answers:
            jobs = [
                Job(
                    name=f"{name}/{seed}",
                    seed=seed,
                    steps=self.loss_steps,
                    warm_steps=self.warm_steps,
                    shape=_TINY if self.quick else _LOSS_SHAPE,
                    every=_EVERY,
                    outer_momentum=_OUTER_MOMENTUM,
                    eval_every=self.loss_steps // 8,
                    **options,  # type: ignore[arg-type]
                )
                for seed in range(self.seeds)
                for name, options in LOSSES.items()
            ]
            tokens = str(self.folder / "tokens")
            found = launch(run_jobs, _ISLANDS, 1, tokens, jobs, backend="gloo", timeout_s=_TIMEOUT_S)
            self.answers |= {job.name: answer for job, answer in zip(jobs, found[0], strict=True)}
        return self.answers[key]

    def warm_up(self, job: Job) -> None:
        """Have the weights that `job` begins with in the folder."""
        launch(run_jobs, _ISLANDS, 1, str(self.folder / "tokens"), [job], backend="gloo", timeout_s=_TIMEOUT_S)

    def in_lab(self, jobs: Sequence[Job], rate: float | None) -> dict[str, Answer]:
        """Run jobs in one launch on the lab's nodes, one island each."""
        given, answers = self.folder / "jobs.json", self.folder / "answers.json"
        write_jobs(jobs, given)
        with Lab(nodes=_ISLANDS, rate_bits_per_s=rate) as lab:
            command = [str(_HERE / "_islands.py"), str(given), str(answers), str(self.folder / "tokens")]
            outcome = lab.run(command, local=1, timeout_s=_TIMEOUT_S, show=False)
        if outcome.exit_code:
            raise RuntimeError(f"the lab's run failed: {why(outcome)}")
        found = [Answer(**answer) for answer in json.loads(answers.read_text())]
        return {job.name: answer for job, answer in zip(jobs, found, strict=True)}


# ------------------------------------------------------------------------------------------------ the rows


def loss_codecs(bench: Bench) -> Row:
    names = ["diloco int8", "diloco fp4", "streamed int8", "streamed fp4"]
    excess = {name: _excess(bench.losses(name), bench.losses("ddp")) for name in names}
    return Row(
        key="loss-codecs",
        claim="eval loss at equal tokens against every-step data parallel: DiLoCo / streaming + overlap, int8 and fp4",
        required="within 1 % / within 1 %",
        measured=" / ".join(
            ", ".join(f"{name.split()[1]} {excess[name]:+.2%}" for name in names if name.startswith(kind))
            for kind in ("diloco", "streamed")
        ),
        is_met=max(excess.values()) <= 0.01,
        note=_losses_note(bench, ["ddp", *names], "ddp"),
        tried="with DiLoCo's outer momentum of 0.9, the default: int8 +0.94%, fp4 +0.83% / int8 +1.03%, fp4 +0.92%.",
    )


def loss_slices(bench: Bench) -> Row:
    excess = [_excess(bench.losses(f"slices {n}"), bench.losses("streamed fp4")) for n in (2, 4)]
    return Row(
        key="loss-slices",
        claim="eval loss at equal tokens, partial updates of 2 / 4 slices, against streaming DiLoCo",
        required="within 1 % / within 2 %",
        measured=" / ".join(f"{value:+.2%}" for value in excess),
        is_met=excess[0] <= 0.01 and excess[1] <= 0.02,
        note=_losses_note(bench, ["streamed fp4", "slices 2", "slices 4"], "streamed fp4"),
    )


def _excess(mine: list[float], other: list[float]) -> float:
    return statistics.mean(mine) / statistics.mean(other) - 1


def _losses_note(bench: Bench, names: list[str], baseline: str) -> str:
    job = Job(name="", steps=bench.loss_steps, every=_EVERY)
    base = bench.losses(baseline)

    def described(name: str) -> str:
        losses = bench.losses(name)
        by_seed = ", ".join(f"{a / b - 1:+.2%}" for a, b in zip(losses, base, strict=True))
        return f"{name} {statistics.mean(losses):.4f}" + (f" ({by_seed})" if name != baseline else "")

    return (
        f"means of {bench.seeds} seeds and, by seed, against {baseline}: {'; '.join(map(described, names))}. "
        f"{bench.answer('ddp/0').num_parameters / 1e6:.2f} M parameters, {bench.loss_steps} steps of {_ISLANDS} x "
        f"{job.rows} x {job.length} tokens after {bench.warm_steps} of data parallel, on one cosine from {job.lr:g}, "
        f"every={job.every}, streamed in {_STREAMED['fragments']} fragments with overlap {_STREAMED['overlap']}, outer "
        f"learning rate {_outer_rates(names)}, momentum {_OUTER_MOMENTUM:g}; the loss is of the outer parameters."
    )


def _outer_rates(names: list[str]) -> str:
    rates = {name: LOSSES[name].get("outer_lr", Job.outer_lr) for name in names if name != "ddp"}
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values())):g}"
    return ", ".join(f"{rate:g} ({name})" for name, rate in rates.items())


def bytes_per_token(bench: Bench) -> Row:
    steps = 100
    common = {"shape": bench.shape, "warmup_steps": 5, **_SMALL_STEP}
    jobs = [
        Job(name="ddp", kind="ddp", steps=12, **common),
        Job(name="local", steps=2 * steps, every=steps, codec="fp4", **common),
    ]
    found = bench.in_lab(jobs, None)
    # DDP's first steps build its buckets
    other = statistics.mean(_wire(found["ddp"])[2:])
    mine = statistics.mean(_wire(found["local"]))
    counted = sum(found["local"].sent_bytes) / len(found["local"].sent_bytes)
    return Row(
        key="bytes",
        claim="wire bytes per token against every-step DDP, every=100, fp4",
        required="<= 1/400",
        measured=f"1/{other / mine:.0f}",
        is_met=mine <= other / 400,
        note=(
            f"sent by island 0 at the lab's interface: {mine / 1e3:.2f} kB a step (counted {counted / 1e3:.2f} kB) "
            f"against {other / 1e3:.0f} kB; as many tokens a step. Arithmetic says 1/{_bytes_arithmetic():.0f}: DDP's "
            "ring sends 3/2 of the gradients in fp32, two trips send 3/2 of them in codes of 4 bits with one scale a "
            "block."
        ),
    )


def _bytes_arithmetic() -> float:
    from laconic.codec.codecs import codec_named

    numel = 2**20
    return 100 * 4 * numel / codec_named("fp4").payload_bytes(numel)


def peak(bench: Bench) -> Row:
    common = {"shape": bench.shape, "warmup_steps": 5, "codec": "fp4", "every": 40, "steps": 80, **_SMALL_STEP}
    jobs = [Job(name="diloco", **common), Job(name="streamed", fragments=8, **common)]  # type: ignore[arg-type]
    found = bench.in_lab(jobs, None)
    largest = {name: max(_wire(answer)) for name, answer in found.items()}
    ratio = largest["streamed"] / largest["diloco"]
    return Row(
        key="peak",
        claim="peak wire rate of streaming against DiLoCo, 8 fragments",
        required="<= 1/6",
        measured=f"1/{1 / ratio:.2f}",
        is_met=ratio <= 1 / 6,
        note=(
            f"the most bytes that island 0 sent in one step: {largest['streamed'] / 1e3:.1f} against "
            f"{largest['diloco'] / 1e3:.1f} kB. Not 1/8, as one fragment also has embeddings and output layer."
        ),
    )


def wall_clock(bench: Bench) -> Row:
    steps = 30 if bench.quick else 150
    common = {
        "shape": bench.shape if bench.quick else _WIDE, "warm_steps": 3 * steps, "outer_momentum": _OUTER_MOMENTUM,
        "lr": _WIDE_LR, "warm_lr": _WIDE_LR, "eval_every": steps // 15, "eval_rows": 64, **_SMALL_STEP,
    }  # fmt: skip
    bench.warm_up(Job(name="warm up", steps=0, schedule_steps=4 * steps, **common))  # not on the lab's wire
    jobs = [
        Job(name="ddp", kind="ddp", steps=steps * 3 // 5, schedule_steps=4 * steps, **common),
        # the settings of PyTorch's own (torchft): fp32 on the wire, and training waits for it
        Job(name="diloco", steps=steps, **common),
        Job(name="ours", steps=steps, codec="fp4", **_STREAMED, **common),
    ]
    found = bench.in_lab(jobs, _RATE)
    target = found["ddp"].evaluations[-1][2]
    start = found["ddp"].evaluations[0][2]
    assert bench.quick or target < start, f"nothing was learnt: {start:.4f} before, {target:.4f} after"
    reached = {name: _seconds_to(answer, target) for name, answer in found.items()}
    each = "; ".join(f"{name} {seconds:.1f} s, {step} steps" for name, (seconds, step) in reached.items())
    ddp, diloco, mine = (reached[job.name][0] for job in jobs)
    return Row(
        key="wall-clock",
        claim=f"wall-clock to a fixed loss in the lab at {format_rate(_RATE)}, against DDP / an equivalent DiLoCo",
        required="<= 1/10 / <= 1.0x",
        measured=f"1/{ddp / mine:.1f} / {mine / diloco:.3f}x" if mine < math.inf else "never",
        is_met=mine <= ddp / 10 and mine <= diloco,
        note=(
            f"seconds of training, without evaluations, until the eval loss, {start:.4f} at first, is {target:.4f}, "
            f"DDP's after three fifths of these steps: {each} (inf: not in {steps}). "
            f"{found['ddp'].num_parameters / 1e6:.2f} M parameters, learning rate {_WIDE_LR}. "
            "Streamed fp4 every 20 steps; the DiLoCo sends fp32 every 20 steps and waits for it, as torchft's does. "
            f"{_SMALL_STEP['rows']} rows of {_SMALL_STEP['length']} tokens per island and step, the last {steps} of a "
            f"schedule that begins with {3 * steps} of data parallel."
        ),
        tried=(
            "models of 1.67 M and 1.87 M parameters at 0.002 gave 1/7.6, as islands, four on two cores, wait for "
            "calls of small kernels; 7.28 M at 0.002, too high for that width, never reached DDP's loss."
        ),
    )


def _seconds_to(answer: Answer, loss: float) -> tuple[float, int]:
    """Seconds and steps of training until the first evaluation that is as good; inf seconds if none is."""
    for step, seconds, found in answer.evaluations:
        if found <= loss:
            return seconds, step
    return math.inf, answer.evaluations[-1][0]


def flops(bench: Bench) -> Row:
    found = _saved("flops")
    return Row(
        key="flops",
        claim="training FLOPs (torch's flop counter), slices=4, MLP / MLP + attention, 1.3B-like shapes",
        required="-14 % / -20 % or better",
        measured=" / ".join(f"{value:+.2%}" for value in found),
        is_met=found[0] <= -0.14 and found[1] <= -0.20,
        note="GPT-2-like, d = 2048, 24 layers, untied vocabulary of 32,000, 1 x 1024 tokens; forward and backward.",
    )


def memory(bench: Bench) -> Row:
    found, larger = _saved("peak_bytes"), _saved("peak_bytes", batch=2)
    return Row(
        key="memory",
        claim="peak of weights + gradients + optimizer + saved activations, same",
        required="-20 % / -40 % or better",
        measured=" / ".join(f"{value:+.1%}" for value in found),
        is_met=found[0] <= -0.20 and found[1] <= -0.40,
        note=(
            "AdamW, all in fp32, counted on the meta device; outer parameters and momentum rest in host memory. With a "
            f"batch of 2, where activations weigh more, {' / '.join(f'{value:+.1%}' for value in larger)}."
        ),
    )


def _saved(what: str, batch: int = 1) -> list[float]:
    full = step_cost("gpt2", batch=batch)
    parts = [step_cost("gpt2", slices=4, include=include, batch=batch) for include in (("mlp",), ("mlp", "attention"))]
    return [getattr(part, what) / getattr(full, what) - 1 for part in parts]


def overlap(bench: Bench) -> Row:
    synced = {"every": 100, "fragments": 4, "overlap": 10}
    # one period, in which each fragment is sent and applied: an exchange that begins with the last step cannot hide
    begin, end = 11, 36 if bench.quick else 111
    repeats = 1 if bench.quick else 5
    common = {"shape": bench.shape, "steps": end + 1, "codec": "fp4", "warmup_steps": 5}
    jobs = []
    for repeat in range(repeats):
        jobs.append(Job(name=f"synced {repeat}", **common, **synced))  # type: ignore[arg-type]
        jobs.append(Job(name=f"never {repeat}", every=10**9, **common))  # type: ignore[arg-type]
    found = bench.in_lab(jobs, _RATE)
    means = {
        kind: statistics.median(statistics.mean(found[f"{kind} {r}"].step_s[begin:end]) for r in range(repeats))
        for kind in ("synced", "never")
    }
    reports = [report for answer in found.values() for report in answer.reports]
    takes_s = statistics.mean(report["hidden_s"] + report["exposed_s"] for report in reports)
    exposed_s = statistics.mean(report["exposed_s"] for report in reports)
    ratio = means["synced"] / means["never"]
    return Row(
        key="overlap",
        claim="seconds per step with overlap, at a rate where a sync takes <= overlap steps, against no sync",
        required="within 3 %",
        measured=f"{ratio - 1:+.2%}",
        is_met=ratio <= 1.03 and takes_s <= synced["overlap"] * means["never"],
        note=(
            f"{format_rate(_RATE)}, fp4, every=100 in 4 fragments, overlap 10: {means['synced']:.4f} against "
            f"{means['never']:.4f} s a step, medians of {repeats} alternating runs of {end - begin} steps. An "
            f"exchange takes {takes_s * 1e3:.0f} ms, {takes_s / means['never']:.1f} steps; training waits for "
            f"{exposed_s * 1e3:.1f} ms of it."
        ),
        tried="runs that end on a sync, whose exchange has nothing left to hide behind: +6.32%.",
    )


def _wire(answer: Answer) -> list[int]:
    assert answer.wire_bytes is not None  # the lab has a wire
    return answer.wire_bytes


ROWS: dict[str, Callable[[Bench], Row]] = {
    "loss-codecs": loss_codecs,
    "loss-slices": loss_slices,
    "bytes": bytes_per_token,
    "peak": peak,
    "wall-clock": wall_clock,
    "flops": flops,
    "memory": memory,
    "overlap": overlap,
}
"""In the order of the table."""


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    options = options_of(__doc__, ROWS, quick="tiny jobs and few steps")
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), quick=options.quick)
            rows = measure(ROWS, options, bench, lambda found: _record(found, bench.answers))
    except LabUnavailable as error:
        print(f"local_steps.py: {error}", file=sys.stderr)
        return 1
    print(f"\n{rows_table(rows)}")
    return 0


def _record(rows: list[Row], answers: dict[str, Answer]) -> None:
    """Beside rows measured before, with the curves of the losses; and the picture of them."""
    record = Record(Path(__file__).name, rows, ROWS)
    curves = {name: answer.evaluations for name, answer in answers.items()} or record.known.get("curves", {})
    record.save(curves=curves)
    if curves:
        save_curves(curves, _PICTURE)


def save_curves(curves: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    """Draw mean eval loss over tokens, a line for each of `LOSSES`; the second panel is against data parallel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    job = Job(name="", steps=1)
    tokens_per_step = _ISLANDS * job.rows * job.length
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    base = _mean_curve(curves, "ddp")
    for name in LOSSES:
        curve = _mean_curve(curves, name)
        millions = [step * tokens_per_step / 1e6 for step in curve]
        left.plot(millions, list(curve.values()), label=name)
        right.plot(millions[1:], [100 * (curve[step] / base[step] - 1) for step in curve][1:])
    left.set(xlabel="million tokens", ylabel="eval loss")
    right.set(xlabel="million tokens", ylabel="% above every-step data parallel")
    right.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mean_curve(curves: dict[str, list[tuple[int, float, float]]], name: str) -> dict[int, float]:
    """Loss by step, the mean over seeds."""
    runs = [curve for key, curve in curves.items() if key.rsplit("/", 1)[0] == name]
    return {points[0][0]: statistics.mean(point[2] for point in points) for points in zip(*runs, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
