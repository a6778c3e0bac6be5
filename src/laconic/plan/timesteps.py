"""`laconic plan cyclic`: the time steps of a schedule, what is alive in them and what is sent; also as a picture.

All of it is read off `laconic.cyclic.schedule.schedule`, the schedule that the runtime executes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from laconic.cyclic.schedule.messages import Message, MessageKind, Op
from laconic.cyclic.schedule.rule import RULES, Rule
from laconic.cyclic.schedule.schedule import STATES, Schedule

_DESCRIPTION = """\
When every worker runs which stage of its micro-batch under the cyclic schedule (F1: forward of the first stage; B4:
backward of the fourth), how many stage activations are alive, and what is sent. One time step is one stage's forward or
backward. Needs no GPU and no other rank."""

_EPILOG = """\
examples:
  laconic plan cyclic --stages 4
  laconic plan cyclic --stages 8 --rule lag2 --states sharded --json
  laconic plan cyclic --stages 4 --draw cyclic.png"""

_PARAMETER_KINDS: tuple[MessageKind, ...] = ("gradient", "total", "weights", "rear weights")
"""Messages as large as a stage; the others are activations of a boundary, or single numbers."""
_KINDS: tuple[MessageKind, ...] = get_args(MessageKind)
_CELLS_PER_LINE = 24
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class CyclicPlan:
    """A schedule, drained after some batches, beside plain data parallelism with as many workers."""

    schedule: Schedule
    batches: int

    @property
    def plain(self) -> Schedule:
        """All workers at once."""
        return Schedule(Rule.named("dp", self.schedule.num_stages))

    def live(self) -> list[int]:
        """Stage activations alive in each time step, over all workers."""
        return self.schedule.live_activations(self.batches)

    def messages(self) -> list[list[Message]]:
        """By the time step at whose beginning they leave."""
        return self.schedule.messages_per_step(self.batches)

    def busiest(self) -> tuple[int, int]:
        """The most messages as large as a stage that one device sends, and receives, in one time step."""
        return self.schedule.busiest(self.batches, _PARAMETER_KINDS)

    def facts(self) -> dict[str, Any]:
        """What the table says below the time steps; shares are of the whole model's parameters."""
        rule, n = self.schedule.rule, self.schedule.num_stages
        sends, receives = self.busiest()
        return {
            "rule": rule.name,
            "states": self.schedule.states,
            "stages": n,
            "workers": n,
            "devices": self.schedule.num_devices,
            "batches": self.batches,
            "time_steps": self.schedule.num_steps(self.batches),
            "time_steps_plain": self.plain.num_steps(self.batches),
            "fresh": rule.freshness,
            "switch": list(rule.switch),
            "slack": [rule.slack(stage) for stage in range(n)],
            "allows_global_norm": rule.allows_global_norm,
            "peak_live": max(self.live()),
            "peak_live_plain": max(self.plain.live_activations(self.batches)),
            "messages_by_kind": dict(Counter(m.kind for step in self.messages() for m in step)),
            "most_sends": sends,
            "most_receives": receives,
            "largest_burst": sends / n,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the facts, every worker's ops, what is alive, and every message."""
        return {
            **self.facts(),
            "table": [[op and op.label for op in row] for row in self.schedule.table(self.batches)],
            "live": self.live(),
            "messages": [dataclasses.asdict(message) for step in self.messages() for message in step],
        }


def add_parser(commands: Any) -> None:
    """Add the command to those of `laconic plan`."""
    parser = commands.add_parser(
        "cyclic",
        help="the time steps, activations and messages of a cyclic schedule",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stages", type=_positive, required=True, metavar="N", help="stages of the model, and workers")
    parser.add_argument("--rule", choices=RULES, default="v2", help="who uses which parameters (default: v2)")
    parser.add_argument("--states", choices=STATES, default="replicated", help="where they are (default: replicated)")
    parser.add_argument("--batches", type=_positive, default=3, metavar="T", help="in the run (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every message")
    parser.add_argument("--draw", metavar="FILE", help=f"draw it; the name ends in {', '.join(_PICTURES)}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit code is 2 for a mistake in the arguments."""
    try:
        schedule = Schedule(Rule.named(options.rule, options.stages), options.states)
        if options.draw and Path(options.draw).suffix not in _PICTURES:
            raise ValueError(
                f"--draw {options.draw} is no picture that can be written; end it in {', '.join(_PICTURES)}"
            )
    except ValueError as error:
        print(f"laconic plan cyclic: {error}", file=sys.stderr)
        return 2
    plan = CyclicPlan(schedule=schedule, batches=options.batches)
    print(json.dumps(plan.to_dict(), indent=1) if options.json else in_words(plan))
    if options.draw:
        try:
            draw(plan, Path(options.draw))
        except ModuleNotFoundError as error:
            print(f"laconic plan cyclic: --draw needs {error.name}; pip install 'laconic[bench]'", file=sys.stderr)
            return 2
    return 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


# ------------------------------------------------------------------------------------------------ words


def in_words(plan: CyclicPlan) -> str:
    """The time steps, some to a line, and what there is to know about them."""
    return "\n".join([*_time_table(plan), *_summary(plan)])


def _time_table(plan: CyclicPlan) -> list[str]:
    rows = plan.schedule.table(plan.batches)
    live, sent = plan.live(), [len(step) for step in plan.messages()]
    columns = [("step", [str(step) for step in range(len(sent))])]
    columns += [(f"w{worker + 1}", [op.label if op else "." for op in row]) for worker, row in enumerate(rows)]
    columns += [("live", [str(count) for count in live]), ("sent", [str(count) for count in sent])]
    columns = [(name, [*cells, *[""] * (len(sent) - len(cells))]) for name, cells in columns]
    width = 1 + max(len(cell) for _, cells in columns for cell in cells)
    lines = []
    for start in range(0, len(sent), _CELLS_PER_LINE):
        for name, cells in columns:
            shown = cells[start : start + _CELLS_PER_LINE]
            lines.append(f"{name:>4} " + "".join(f"{cell:>{width}}" for cell in shown).rstrip())
        lines.append("")
    return lines


def _summary(plan: CyclicPlan) -> list[str]:
    facts, rule = plan.facts(), plan.schedule.rule
    n, counts = rule.num_stages, facts["messages_by_kind"]
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS if kind in counts) or "none"
    against = f", against {n * n} for model and data parallelism" if plan.schedule.states == "shared" else ""
    clipping = "may be clipped, and steps skipped"
    if not rule.allows_global_norm:
        clipping = "cannot be clipped, nor steps skipped: some stages are updated before all gradients are known"
    lines = {
        "live": f"stage activations of all workers: at most {facts['peak_live']}, of workers all at once "
        f"{facts['peak_live_plain']}",
        "sent": f"messages that leave at the beginning of the time step: {kinds}",
        "time steps": f"{facts['time_steps']} for {plan.batches} batches, of workers all at once "
        f"{facts['time_steps_plain']}",
        "devices": f"{facts['devices']}{against}",
        "largest burst": f"{facts['most_sends']} sends and {facts['most_receives']} receives of one stage's "
        "parameters, by a device in a time step",
        "fresh": f"{facts['fresh']:.1%} of all (worker, stage) pairs have the newest parameters; of F1 to F{n}, from "
        f"{', '.join(_first_fresh(rule, stage) for stage in range(n))} on",
        "slack": f"{', '.join(map(str, facts['slack']))} time steps for the sum of B1 to B{n} to become parameters",
        "global norm": clipping,
    }
    return [f"{name:>13}  {text}" for name, text in lines.items()]


def _first_fresh(rule: Rule, stage: int) -> str:
    return f"w{rule.switch[stage] + 1}" if rule.switch[stage] < rule.num_stages else "nobody"


# ------------------------------------------------------------------------------------------------ picture

# Forwards blue, backwards orange, later stages darker; kinds of messages by Okabe and Ito.
_FORWARD, _BACKWARD = ("#d6e6f2", "#3f7fb5"), ("#fbe3cc", "#d9731a")
_KIND_COLOURS: dict[MessageKind, str] = {
    "gradient": "#0072b2", "total": "#e69f00", "weights": "#009e73", "rear weights": "#7fc8ac", "activation": "#56b4e9",
    "activation gradient": "#b3d9f0", "square": "#cc79a7", "norm": "#e3b6cd",
}  # fmt: skip


def draw(plan: CyclicPlan, path: Path) -> None:
    """Write a picture: every worker's time steps, the activations alive in them, and the messages that leave.

    Raises: ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    rows, messages = plan.schedule.table(plan.batches), plan.messages()
    steps, workers = len(messages), len(rows)
    width = min(max(7.0, 0.32 * steps), 40.0)
    figure = Figure(figsize=(width, 0.32 * workers + 4.2), layout="constrained", dpi=120)
    grid, alive, sent = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [0.32 * workers + 0.2, 1.3, 1.3]}
    )
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
    from matplotlib.patches import Rectangle

    for op in (op for row in rows for op in row if op is not None):
        colour = _shade(_FORWARD if op.is_forward else _BACKWARD, (op.stage + 1) / rule.num_stages)
        axes.add_patch(Rectangle((op.step, op.worker), 1, 0.92, facecolor=colour, edgecolor="white", linewidth=0.8))
        weight = "bold" if rule.is_fresh(op.worker, op.stage) else "normal"
        if rule.num_stages <= 16:
            axes.text(op.step + 0.5, op.worker + 0.48, op.label, ha="center", va="center", fontsize=6.5, weight=weight)
    axes.set_ylim(len(rows), -0.1)
    axes.set_yticks([worker + 0.46 for worker in range(len(rows))], [f"worker {w + 1}" for w in range(len(rows))])
    axes.set_title("bold: with the newest parameters", fontsize=8, loc="right")


def _shade(colours: tuple[str, str], share: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    light, dark = map(to_rgb, colours)
    return tuple(a + (b - a) * share for a, b in zip(light, dark, strict=True))


def _draw_live(axes: Any, plan: CyclicPlan) -> None:
    for live, label, colour in (
        (plan.plain.live_activations(plan.batches), "all at once", "#999999"),
        (plan.live(), plan.schedule.rule.name, "#0072b2"),
    ):
        axes.stairs(live, range(len(live) + 1), label=label, color=colour, fill=colour == "#999999", alpha=0.9)
    axes.set_ylabel("live stage\nactivations", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=2)
    axes.margins(y=0.25)


def _draw_messages(axes: Any, messages: list[list[Message]]) -> None:
    bottom = [0] * len(messages)
    for kind in _KINDS:
        counts = [sum(message.kind == kind for message in step) for step in messages]
        if any(counts):
            axes.bar(
                [step + 0.5 for step in range(len(messages))],
                counts,
                0.8,
                bottom,
                color=_KIND_COLOURS[kind],
                label=kind,
            )
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    axes.set_ylabel("messages that\nleave", fontsize=8)
    axes.margins(y=0.25)
    if any(bottom):
        axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=3)
