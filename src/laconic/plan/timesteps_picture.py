"""A picture of the time steps of a cyclic schedule, drawn by matplotlib."""

from pathlib import Path
from typing import Any

from laconic.cyclic.schedule import Message, MessageKind, Op, Rule
from laconic.plan.timesteps import KINDS, CyclicPlan

SUFFIXES = (".png", ".svg", ".pdf")
"""The endings of file names that `draw_timesteps` accepts."""

# Forwards are blue and backwards orange; later stages are darker.
_FORWARD, _BACKWARD = ("#d6e6f2", "#3f7fb5"), ("#fbe3cc", "#d9731a")
_MAX_LABELLED_STAGES = 16  # ops of more stages are too narrow for labels
KIND_COLOURS: dict[MessageKind, str] = {
    "gradient": "#0072b2", "total": "#e69f00", "weights": "#009e73", "rear weights": "#7fc8ac", "activation": "#56b4e9",
    "activation gradient": "#b3d9f0", "square": "#cc79a7", "norm": "#e3b6cd",
}  # fmt: skip
"""The colour of each kind of message, after the palette of Okabe and Ito."""


def draw_timesteps(plan: CyclicPlan, path: Path) -> None:
    """Write a picture of every worker's time steps, the activations alive in each, and the messages that leave.

    Raises: ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    rows, messages = plan.schedule.table(plan.batches), plan.messages()
    steps, workers = len(messages), len(rows)
    width = min(max(7.0, 0.32 * steps), 40.0)
    figure = Figure(figsize=(width, 0.32 * workers + 4.2), layout="constrained", dpi=120)
    heights = [0.32 * workers + 0.2, 1.3, 1.3]
    grid, alive, sent = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    states = f", states {plan.schedule.states}" if plan.schedule.states != "replicated" else ""
    figure.suptitle(f"{workers} workers and stages, rule {plan.schedule.rule.name}{states}", fontsize=10)
    _draw_ops(grid, rows, plan.schedule.rule)
    _draw_live(alive, plan)
    _draw_messages(sent, messages)
    sent.set_xlim(0, steps)
    sent.set_xlabel("time step", fontsize=9)
    for axes in (grid, alive, sent):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_ops(axes: Any, rows: list[list[Op | None]], rule: Rule) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    forward, backward = (LinearSegmentedColormap.from_list("", colours) for colours in (_FORWARD, _BACKWARD))
    for op in (op for row in rows for op in row if op is not None):
        colour = (forward if op.is_forward else backward)((op.stage + 1) / rule.num_stages)
        axes.add_patch(Rectangle((op.step, op.worker), 1, 0.92, facecolor=colour, edgecolor="white", linewidth=0.8))
        weight = "bold" if rule.is_fresh(op.worker, op.stage) else "normal"
        if rule.num_stages <= _MAX_LABELLED_STAGES:
            axes.text(op.step + 0.5, op.worker + 0.48, op.label, ha="center", va="center", fontsize=6.5, weight=weight)
    axes.set_ylim(len(rows), -0.1)
    axes.set_yticks([worker + 0.46 for worker in range(len(rows))], [f"worker {w + 1}" for w in range(len(rows))])
    axes.set_title("bold: with the newest parameters", fontsize=8, loc="right")


def _draw_live(axes: Any, plan: CyclicPlan) -> None:
    plain, live = plan.plain.live_activations(plan.batches), plan.live()
    axes.stairs(plain, label="all at once", color="#999999", fill=True, alpha=0.9)
    axes.stairs(live, label=plan.schedule.rule.name, color="#0072b2", alpha=0.9)
    _label(axes, "live stage\nactivations", num_columns=2)


def _draw_messages(axes: Any, messages: list[list[Message]]) -> None:
    middles = [step + 0.5 for step in range(len(messages))]
    bottom = [0] * len(messages)
    for kind in KINDS:
        counts = [sum(message.kind == kind for message in step) for step in messages]
        if any(counts):
            axes.bar(middles, counts, 0.8, bottom, color=KIND_COLOURS[kind], label=kind)
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    _label(axes, "messages that\nleave", num_columns=3)


def _label(axes: Any, text: str, *, num_columns: int) -> None:
    axes.set_ylabel(text, fontsize=8)
    axes.margins(y=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=num_columns)
