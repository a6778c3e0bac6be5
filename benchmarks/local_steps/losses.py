"""Rows about the loss at equal tokens, and the picture of its curves."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.local_steps.bench import BENCHMARK, EVERY, LOSSES, NUM_ISLANDS, OUTER_MOMENTUM, TOP_K, Bench
from benchmarks.local_steps.islands import Job
from tests.support.record import Record, Row

_PICTURE = Path(__file__).parents[2] / "docs" / "local-steps.png"
Curve = list[tuple[int, float]]
"""(step, eval loss) of every evaluation."""


@BENCHMARK.row("loss-codecs")
def loss_codecs(bench: Bench) -> Row:
    names = ["diloco int4", "streamed int4"]
    excess = {name: excess_over(bench.losses(name), bench.losses("ddp")) for name in names}
    return Row(
        claim="eval loss at equal tokens against every-step data parallel: DiLoCo / streaming + overlap, int4",
        measured=" / ".join(f"{excess[name]:+.2%}" for name in names),
        note=_losses_note(bench, ["ddp", *names], "ddp"),
        tried="with DiLoCo's outer momentum of 0.9, the default: e3m0 +0.83% / +0.92%.",
    )


@BENCHMARK.row("loss-top-k")
def loss_top_k(bench: Bench) -> Row:
    excess = excess_over(bench.losses("top64"), bench.losses("ddp"))
    return Row(
        claim=f"eval loss at equal tokens, top-k in two bits every {TOP_K['every']} steps, against every-step DDP",
        measured=f"{excess:+.2%}",
        note=_losses_note(bench, ["ddp", "top64"], "ddp"),
    )


def excess_over(losses: list[float], baseline: list[float]) -> float:
    """Return the excess of the mean of `losses` over the mean of `baseline`, as a fraction of the latter."""
    return statistics.mean(losses) / statistics.mean(baseline) - 1


def _losses_note(bench: Bench, names: list[str], baseline: str) -> str:
    job = Job(name="", steps=bench.loss_steps)
    base = bench.losses(baseline)

    def described(name: str) -> str:
        losses = bench.losses(name)
        by_seed = ", ".join(f"{a / b - 1:+.2%}" for a, b in zip(losses, base, strict=True))
        return f"{name} {statistics.mean(losses):.4f}" + (f" ({by_seed})" if name != baseline else "")

    return (
        f"means of {bench.seeds} seeds and, by seed, against {baseline}: {'; '.join(map(described, names))}. "
        f"{bench.by_seed(baseline)[0].num_parameters / 1e6:.2f} M parameters, {bench.loss_steps} steps of "
        f"{NUM_ISLANDS} x {job.rows} x {job.length} tokens after {bench.warm_steps} of data parallel, on one cosine "
        f"from {job.lr:g}; losses of the outer parameters. Settings, beside every {EVERY}, outer_lr {job.outer_lr:g} "
        f"and outer_momentum {OUTER_MOMENTUM:g}: {'; '.join(map(_settings, names))}."
    )


def _settings(name: str) -> str:
    return f"{name}: {', '.join(f'{key} {value}' for key, value in LOSSES[name].items())}"


def save_curves(curves: dict[str, Curve], path: Path) -> None:
    """Draw the mean eval loss over tokens, with a line for each of `LOSSES`, and its excess over data parallel."""
    from matplotlib.figure import Figure

    job = Job(name="", steps=1)
    tokens_per_step = NUM_ISLANDS * job.rows * job.length
    figure = Figure(figsize=(10, 3.8), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2)
    base = mean_curve(curves, "ddp")
    for name in LOSSES:
        if f"{name}/0" not in curves:
            continue
        curve = mean_curve(curves, name)
        millions = [step * tokens_per_step / 1e6 for step in curve]
        left.plot(millions, list(curve.values()), label=name)
        right.plot(millions[1:], [100 * (curve[step] / base[step] - 1) for step in curve][1:])
    left.set(xlabel="million tokens", ylabel="eval loss")
    right.set(xlabel="million tokens", ylabel="% above every-step data parallel")
    right.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def mean_curve(curves: dict[str, Curve], name: str) -> dict[int, float]:
    """Return the mean loss over seeds, by step."""
    runs = [curve for key, curve in curves.items() if key.rsplit("/", 1)[0] == name]
    return {points[0][0]: statistics.mean(loss for _, loss in points) for points in zip(*runs, strict=True)}


def save(record: Record, bench: Bench) -> None:
    """Write the rows and the curves of the losses, and draw the picture."""
    known = {key: curve for key, curve in record.known.get("curves", {}).items() if key.rsplit("/", 1)[0] in LOSSES}
    curves = {**known, **{name: answer.evaluations for name, answer in bench.answers.items()}}
    record.save(curves=curves)
    if curves:
        save_curves(curves, _PICTURE)
