"""Rows about the loss at equal tokens, and the picture of its curves."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.local_steps.bench import EVERY, LOSSES, NUM_ISLANDS, OUTER_MOMENTUM, STREAMED, Bench
from benchmarks.local_steps.islands import Job
from benchmarks.record import Record, Row

_PICTURE = Path(__file__).parents[2] / "docs" / "local-steps.png"
Curve = list[tuple[int, float, float]]
"""(step, seconds of training, eval loss) of every evaluation."""


def loss_codecs(bench: Bench) -> Row:
    names = ["diloco int8", "diloco fp4", "streamed int8", "streamed fp4"]
    excess = {name: excess_over(bench.losses(name), bench.losses("ddp")) for name in names}
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
    excess = [excess_over(bench.losses(f"slices {n}"), bench.losses("streamed fp4")) for n in (2, 4)]
    return Row(
        key="loss-slices",
        claim="eval loss at equal tokens, partial updates of 2 / 4 slices, against streaming DiLoCo",
        required="within 1 % / within 2 %",
        measured=" / ".join(f"{value:+.2%}" for value in excess),
        is_met=excess[0] <= 0.01 and excess[1] <= 0.02,
        note=_losses_note(bench, ["streamed fp4", "slices 2", "slices 4"], "streamed fp4"),
    )


def excess_over(losses: list[float], baseline: list[float]) -> float:
    """Return the excess of the mean of `losses` over the mean of `baseline`, as a fraction of the latter."""
    return statistics.mean(losses) / statistics.mean(baseline) - 1


def _losses_note(bench: Bench, names: list[str], baseline: str) -> str:
    job = Job(name="", steps=bench.loss_steps, every=EVERY)
    base = bench.losses(baseline)

    def described(name: str) -> str:
        losses = bench.losses(name)
        by_seed = ", ".join(f"{a / b - 1:+.2%}" for a, b in zip(losses, base, strict=True))
        return f"{name} {statistics.mean(losses):.4f}" + (f" ({by_seed})" if name != baseline else "")

    return (
        f"means of {bench.seeds} seeds and, by seed, against {baseline}: {'; '.join(map(described, names))}. "
        f"{bench.answer('ddp/0').num_parameters / 1e6:.2f} M parameters, {bench.loss_steps} steps of {NUM_ISLANDS} x "
        f"{job.rows} x {job.length} tokens after {bench.warm_steps} of data parallel, on one cosine from {job.lr:g}, "
        f"every={job.every}, streamed in {STREAMED['fragments']} fragments with overlap {STREAMED['overlap']}, outer "
        f"learning rate {_outer_rates(names)}, momentum {OUTER_MOMENTUM:g}; losses of the outer parameters."
    )


def _outer_rates(names: list[str]) -> str:
    rates = {name: LOSSES[name].get("outer_lr", Job.outer_lr) for name in names if name != "ddp"}
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values())):g}"
    return ", ".join(f"{rate:g} ({name})" for name, rate in rates.items())


def save_curves(curves: dict[str, Curve], path: Path) -> None:
    """Draw the mean eval loss over tokens, with a line for each of `LOSSES`, and its excess over data parallel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    job = Job(name="", steps=1)
    tokens_per_step = NUM_ISLANDS * job.rows * job.length
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    base = mean_curve(curves, "ddp")
    for name in LOSSES:
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
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def mean_curve(curves: dict[str, Curve], name: str) -> dict[int, float]:
    """Return the mean loss over seeds, by step."""
    runs = [curve for key, curve in curves.items() if key.rsplit("/", 1)[0] == name]
    return {points[0][0]: statistics.mean(point[2] for point in points) for points in zip(*runs, strict=True)}


def save(record: Record, bench: Bench) -> None:
    """Write the rows and the curves of the losses, and draw the picture."""
    curves = {name: answer.evaluations for name, answer in bench.answers.items()} or record.known.get("curves", {})
    record.save(curves=curves)
    if curves:
        save_curves(curves, _PICTURE)
