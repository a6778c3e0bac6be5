"""The grid: models, forms, lengths, nodes and rates, under every strategy; its rows, its tables and its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulated.cluster import FIGURES, NODES, RANKS_PER_NODE, RATES_GBIT_PER_S, h100_nodes
from benchmarks.simulated.jobs import BY_LABEL, FORMS, MODELS, RIVALS, TOKENS, Rival, job, simulate
from laconic.comm.traffic import WIRE_LEVELS, Purpose
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.forks import map_forked
from laconic.plan.machine import PlanLane, Simulator
from laconic.plan.model_trace import trace_job
from laconic.plan.pictures import draw_timelines
from laconic.plan.prediction import Predictor, Refusal
from tests.support.record import Row, Table

_LANES = (PlanLane.WIRE, PlanLane.LOCAL, PlanLane.TO_DEVICE, PlanLane.TO_HOST, PlanLane.HOST)
_COLUMNS = ("model", "form", "nodes", "tokens", "Gbit/s", "strategy", "seconds", "fits", "device's peak, GB")
_SHOWN_SHARE = 0.005
_EQUAL = 1.005
"""Smaller differences are none: the planner's own rule."""
_TRIED_8B = (
    "compute waited in backward until the next layer's sum inside the node had ended: 4bit took 1.735 s "
    "(1.211x), and at 400 Gbit/s host took 1.196 s where HSDP takes 1.179 s, and 1.165 s since."
)
_COMPARED = ("FSDP2", "HSDP", "host", "4bit")
_PURPOSES: tuple[Purpose, ...] = ("weights", "gradients")
_PICTURED = ("FSDP2", "host", "4bit")
_RATES_PICTURED = (25, 100)
_GROUP = "Llama 3 8B", "full", 8192
"""The jobs of `simulated-8b`, and of `--quick`."""


Step = Estimate | Refusal
"""A step of one strategy, or why there is none."""


def bound(step: Estimate) -> tuple[float, PlanLane]:
    """The seconds of the busiest of compute and the lanes, below which no step can be, and which it is."""
    lane = max(step.busy_s, key=lambda each: step.busy_s[each])
    return step.busy_s[lane], lane


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job on one cluster, under all strategies."""

    model: str
    form: str
    tokens: int
    nodes: int
    rate_gbit_per_s: int
    steps: Mapping[str, Step]
    """By the label of the strategy."""

    def best(self, *, is_own: bool) -> Estimate | None:
        """The fastest exact strategy of a side that fits; None if none does."""
        fitting = [
            step
            for label, step in self.steps.items()
            if not isinstance(step, Refusal) and step.fits and _may_win(BY_LABEL[label], is_own=is_own)
        ]
        return min(fitting, key=lambda step: step.seconds, default=None)

    @property
    def ratio(self) -> float | None:
        """Seconds of laconic's best by those of torch's best; None unless both have one that fits."""
        own, other = self.best(is_own=True), self.best(is_own=False)
        return own.seconds / other.seconds if own is not None and other is not None else None

    def __str__(self) -> str:
        return (
            f"{self.model} {self.form}, {self.nodes} x {RANKS_PER_NODE}, {self.tokens} tokens, "
            f"{self.rate_gbit_per_s} Gbit/s"
        )


def _may_win(rival: Rival, *, is_own: bool) -> bool:
    return rival.is_exact and (rival.is_shared or rival.is_own is is_own)


class Bench:
    """The simulated cells, each group of jobs once, and the tables below the rows."""

    def __init__(self, out: Path, *, quick: bool, keeps: bool) -> None:
        self.out, self.quick, self.keeps = out, quick, keeps
        self.nodes = NODES[:1] if quick else NODES
        self.groups = [_GROUP] if quick else [(m, f, t) for m in MODELS for f in FORMS for t in TOKENS]
        self._cells: dict[tuple[str, str, int], list[Cell]] = {}
        self.tables: dict[str, Table] = {}
        """The raw figures, by name."""

    def cells(self, model: str, form: str, tokens: int) -> list[Cell]:
        """The cells of a group: all clusters."""
        return self._of([(model, form, tokens)])

    def all(self) -> list[Cell]:
        """All cells."""
        return self._of(self.groups)

    def _of(self, groups: Sequence[tuple[str, str, int]]) -> list[Cell]:
        missing = [group for group in groups if group not in self._cells]
        for group, cells in zip(missing, map_forked(self._simulate, missing), strict=True):
            self._cells[group] = cells
            print(f"{' '.join(map(str, group))}: {len(cells)} cells", flush=True)
        return [cell for group in groups for cell in self._cells[group]]

    def _simulate(self, group: tuple[str, str, int]) -> list[Cell]:
        model, form, tokens = group
        first = Predictor(job(model, form, tokens), h100_nodes(self.nodes[0], RATES_GBIT_PER_S[0]))
        found = []
        for nodes in self.nodes:
            for rate in RATES_GBIT_PER_S:
                predictor = first.on(h100_nodes(nodes, rate))
                steps = {rival.label: simulate(predictor, rival) for rival in RIVALS}
                cell = Cell(model=model, form=form, tokens=tokens, nodes=nodes, rate_gbit_per_s=rate, steps=steps)
                found.append(cell)
            if self.keeps:
                _draw(self.out, found[-len(RATES_GBIT_PER_S) :], first)
        return found


def _draw(out: Path, cells: Sequence[Cell], predictor: Predictor) -> None:
    """Write the pictures of some cells of one job, which differ in their rates."""
    for cell in cells:
        if cell.rate_gbit_per_s in _RATES_PICTURED:
            on = predictor.on(h100_nodes(cell.nodes, cell.rate_gbit_per_s))
            steps = [simulate(on, BY_LABEL[label], keeps_spans=True) for label in _PICTURED]
            name = f"{cell.model} {cell.form} {cell.nodes} {cell.tokens} {cell.rate_gbit_per_s}.png"
            drawn = [step for step in steps if isinstance(step, Estimate)]
            draw_timelines(drawn, out / name.lower().replace(" ", "-"), title=f"{cell}: simulated")


# -- tables ------------------------------------------------------------------------------------------------------------


def grid_table(cells: Sequence[Cell]) -> Table:
    """A line for each cell and strategy: seconds, what compute waits for of them, and the peak of a device's memory."""
    lines = [
        [
            cell.model, cell.form, str(cell.nodes), str(cell.tokens), str(cell.rate_gbit_per_s), label,
            *(["refused"] if isinstance(step, Refusal) else _figures(step)),
        ]
        for cell in cells for label, step in cell.steps.items()
    ]  # fmt: skip
    return Table(columns=(*_COLUMNS, *(f"waits for {lane.value}, s" for lane in _LANES)), rows=lines)


def _figures(step: Estimate) -> list[str]:
    waits = (step.waits_s.get(lane, 0.0) for lane in _LANES)
    return [
        f"{step.seconds:.4g}", "yes" if step.fits else "no", f"{step.peak_bytes / 1e9:.1f}",
        *(f"{wait:.2g}" if wait >= _SHOWN_SHARE * step.seconds else "" for wait in waits),
    ]  # fmt: skip


def figures_table() -> Table:
    """The figures of the cluster with their sources."""
    return Table(columns=("figure", "value", "source"), rows=[[each.name, each.text, each.source] for each in FIGURES])


# -- rows --------------------------------------------------------------------------------------------------------------


def _bound_of_halves_s(step: Estimate, cluster: ClusterSpec, group: tuple[str, str, int]) -> float:
    """The seconds below which no step can be whose weights cross in forward, and whose gradients cross in backward."""
    forward = (each for each in trace_job(job(*group)).phases if not each.is_backward)
    forward_s, rate = sum(map(Simulator(cluster).seconds, forward)), cluster.bytes_per_s("node")
    sent = [sum(step.sent_bytes.get((level, purpose), 0.0) for level in WIRE_LEVELS) for purpose in _PURPOSES]
    weights_s, gradients_s = (cluster.ranks_per_node * nbytes / rate for nbytes in sent)
    return max(forward_s, weights_s) + max(step.busy_s[PlanLane.COMPUTE] - forward_s, gradients_s)


def row_8b(bench: Bench) -> Row:
    """How near steps of an 8B model on slow Ethernet come to what their busiest lane allows."""
    cell = next(each for each in bench.cells(*_GROUP) if (each.nodes, each.rate_gbit_per_s) == (2, 25))
    steps = {label: step for label in _COMPARED if not isinstance(step := cell.steps[label], Refusal)}
    own = {label: steps[label].seconds / bound(steps[label])[0] for label in ("host", "4bit")}
    told = []
    for label, step in steps.items():
        bound_s, lane = bound(step)
        waits = ", ".join(f"{each.value} {value:.3f} s" for each, value in step.waits_s.items() if value > 1e-3)
        told.append(
            f"{label}: the busiest is {lane.value}, {bound_s:.3f} s, and the step {step.seconds / bound_s:.3f}x of it; "
            f"compute works {step.busy_s[PlanLane.COMPUTE]:.3f} s and waits for {waits}"
        )
    halves_s = _bound_of_halves_s(steps["4bit"], h100_nodes(cell.nodes, cell.rate_gbit_per_s), _GROUP)
    return Row(
        key="simulated-8b",
        claim=f"{cell}, seconds of {' / '.join(steps)}; host / 4bit against the busiest of compute and the lanes",
        measured=f"{' / '.join(f'{step.seconds:.3f} s' for step in steps.values())}; "
        + " / ".join(f"{each:.3f}x" for each in own.values()),
        note=f"{'; '.join(told)}. In four bits the wire bounds forward, and compute bounds backward, and no order of "
        "transfers can mix the halves: a step's weights are not there before the step before has ended, nor its "
        f"gradients before backward. A step whose halves are each at their bound takes {halves_s:.3f} s, and 4bit "
        f"{steps['4bit'].seconds / halves_s:.3f}x of that. What is left are the ends. The root's unit has the embedding"
        " and the output layer: its gradients cross after the last layer's, and nothing computes beside them.",
        tried=_TRIED_8B,
    )


def row_grid(bench: Bench) -> Row:
    """Whether laconic is ever the wrong choice in the grid, by its exact strategies."""
    cells = bench.all()
    bench.tables["grid"] = grid_table(cells)
    both = [(cell, cell.ratio) for cell in cells if cell.ratio is not None]
    slower = [(cell, ratio) for cell, ratio in both if ratio > _EQUAL]
    worst, worst_ratio = max(both, key=lambda each: each[1])
    alone = [sum(cell.ratio is None and cell.best(is_own=own) is not None for cell in cells) for own in (True, False)]
    refused = {
        f"{label}: {step.reason}" for cell in cells for label, step in cell.steps.items() if isinstance(step, Refusal)
    }
    told = "; ".join(f"{cell} {ratio:.3f}x" for cell, ratio in slower)
    staged = [cell for cell in cells if cell.best(is_own=True) is cell.steps["pipeline"]]
    return Row(
        key="simulated-grid",
        claim=f"{len(cells)} simulated cells; laconic's best exact strategy against the best of FSDP2, HSDP and a "
        "pipeline, of those that fit",
        measured=f"{len(both) - len(slower)} of {len(both)}; {min(ratio for _, ratio in both):.3f}x to "
        f"{worst_ratio:.3f}x",
        note=f"The worst: {worst}. Slower: {told or 'none'}. In {alone[0]} cells laconic alone fits, in {alone[1]} "
        f"torch alone, in {len(cells) - len(both) - sum(alone)} nothing. Offload counts on both sides, and so "
        f"does the pipeline, which is the best of all in {len(staged)} cells: {_counted(staged)}. "
        f"{_in_four_bits(cells)} Refused: {'; '.join(sorted(refused)) or 'nothing'}.",
    )


def _counted(cells: Sequence[Cell]) -> str:
    """The cells of each model and form, in words."""
    found = Counter(f"{cell.model} {cell.form}, {cell.rate_gbit_per_s} Gbit/s" for cell in cells)
    return ", ".join(f"{count} of {name}" for name, count in found.items()) or "none"


def _in_four_bits(cells: Sequence[Cell]) -> str:
    """How 4bit, which rounds, stands against torch's best."""
    pairs = [(cell.steps["4bit"], cell.best(is_own=False)) for cell in cells]
    ratios = [
        step.seconds / other.seconds
        for step, other in pairs
        if isinstance(step, Estimate) and step.fits and other is not None
    ]
    return (
        f"4bit, which rounds and is in no ratio above, takes {min(ratios):.3f}x to {max(ratios):.3f}x of torch's best."
    )
