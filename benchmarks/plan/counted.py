"""The row `bytes-counted`: predicted payload bytes against the counters of real runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plan.bench import Bench, any_cluster
from benchmarks.plan.jobs import ISLANDS, STRATEGIES, VARIANTS, Case, candidate_of, make_case
from laconic.plan.prediction import Refusal
from tests.support.record import Row

SHAPES = ((2, 2), (3, 1), (2, 3))
"""(nodes, ranks of each)."""
VARIED = {
    "LoRA": ("none", "host", "device", "8bit", "4bit", "zero++", "islands int4"),
    "2 micro-batches": ("none", "host", "4bit", "zero++", "islands int4"),
    "bf16 parameters": ("host", "4bit", "zero++"),
    "bf16 parameters, fp32 sums": ("host", "4bit"),
    "adamw8bit": ("host", "4bit"),
    "muon": ("none", "host", "4bit"),
    "shampoo": ("host",),
    "checkpointing": ("none", "host", "device", "4bit", "islands int4"),
    "weights stay": ("none", "host", "device", "4bit", "zero++", "islands int4"),
    "offload": ("none", "host", "device", "4bit", "islands int4"),
    "device budget": ("host",),
    "checks": ("none", "host", "device", "4bit", "islands int4"),
    "checks every 2 steps": ("none", "host", "8bit"),
    "5 micro-batches": ("none", "host", "8bit", "islands int4"),
    "NF4": ("none", "host", "8bit"),
    "DoRA": ("host",),
}
"""The strategies with which each variant is tried."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One case on one cluster."""

    case: Case
    nodes: int
    local: int
    differences: Mapping[str, tuple[float, float]]
    """By level and purpose: predicted and counted bytes of all ranks in a step, where they differ."""
    problem: str = ""
    """Why there is nothing to compare."""

    @property
    def text(self) -> str:
        """One line."""
        found = ", ".join(f"{kind} {said:,.2f} for {real:,.2f}" for kind, (said, real) in self.differences.items())
        return f"{self.case.name} on {self.nodes} x {self.local}: {self.problem or found or 'equal'}"


def cases(bench: Bench, nodes: int, local: int) -> list[Case]:
    """All cases on a cluster."""
    tables = {**STRATEGIES, **ISLANDS}
    names = ("none", "host", "8bit", "islands int4") if bench.quick else tuple(tables)
    out = bench.out / f"{nodes}x{local}"
    jobs = [(name, "") for name in names]
    varied = {"LoRA": ("host",)} if bench.quick else VARIED
    jobs += [(name, variant) for variant, strategies in varied.items() for name in strategies]
    return [
        make_case(
            f"{name}, {variant}" if variant else name, "llama", tables[name],
            *([VARIANTS[variant]] if variant else []), out=out, candidate=candidate_of(name),
            steps=4,
        )
        for name, variant in jobs
    ]  # fmt: skip


def compare(case: Case, bench: Bench, summary: Mapping[str, Any], nodes: int, local: int) -> Compared:
    """Hold the prediction of a case to the counters of its run."""
    same = {"case": case, "nodes": nodes, "local": local}
    estimate = bench.predictions.of(case, any_cluster(nodes, local))
    if isinstance(estimate, Refusal) or "error" in summary:
        refusals = [estimate.reason if isinstance(estimate, Refusal) else "", summary.get("error", "")]
        if all(refusals):
            return Compared(**same, differences={})
        return Compared(**same, differences={}, problem=f"the planner: {refusals[0]!r}; the trainer: {refusals[1]!r}")
    counted = _per_step(summary["traffic_bytes"], case)
    said = {f"{level}/{purpose}": size * nodes * local for (level, purpose), size in estimate.sent_bytes.items()}
    kinds = sorted({*counted, *said})
    pairs = {kind: (said.get(kind, 0.0), counted.get(kind, 0.0)) for kind in kinds}
    return Compared(**same, differences={kind: pair for kind, pair in pairs.items() if abs(pair[0] - pair[1]) > 1e-3})


def _per_step(by_step: Sequence[Mapping[str, int]], case: Case) -> dict[str, float]:
    """The bytes of a warm step: with islands the mean over a round of syncs, before the end, which waits for all.

    With checks it is the mean over the steps from one to the next.
    """
    config = case.config
    every = config.sync.policy.schedule.every if config.sync.is_local else config.shard.policy.checks.interval
    warm = by_step[every : 2 * every] if every > 1 else by_step[2:3]
    kinds = {kind for step in warm for kind in step}
    return {kind: sum(step.get(kind, 0) for step in warm) / len(warm) for kind in kinds}


def row(bench: Bench) -> Row:
    """Measure the row."""
    found: list[Compared] = []
    for nodes, local in SHAPES[: 1 if bench.quick else None]:
        known = cases(bench, nodes, local)
        for case, summary in zip(known, bench.train(known, nodes, local), strict=True):
            found.append(compare(case, bench, summary, nodes, local))
            print(found[-1].text, flush=True)
    wrong = [each for each in found if each.differences or each.problem]
    equal = len(found) - len(wrong)
    return Row(
        key="bytes-counted",
        claim="payload bytes of a step by level and purpose against the counters, every strategy of ours",
        measured=f"{equal} of {len(found)} equal",
        note=(
            f"on {', '.join(f'{nodes} x {local}' for nodes, local in SHAPES)} (nodes x ranks). "
            + "; ".join(each.text for each in wrong)
        ).strip(),
    )
