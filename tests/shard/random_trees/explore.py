"""Tries many random cases, sorts the failures into classes, and shrinks one case of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.errors import NoSuchExample

from tests.shard.random_trees.case import Case
from tests.shard.random_trees.pool import Outcome, Pool
from tests.shard.random_trees.strategies import cases

_OPTIONS = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=400)


@dataclass
class Findings:
    """The outcomes of the cases that were tried."""

    kinds: dict[str, int] = field(default_factory=dict)
    """The number of cases by the kind of their outcome."""
    failures: dict[str, list[tuple[Case, Outcome]]] = field(default_factory=dict)
    """The cases that are not equal, by signature."""

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count one case."""
        self.kinds[outcome.kind] = self.kinds.get(outcome.kind, 0) + 1
        if outcome.kind != "equal":
            self.failures.setdefault(outcome.signature, []).append((case, outcome))

    def merge(self, others: Findings) -> None:
        """Add the counts of other findings."""
        for kind, number in others.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + number
        for signature, found in others.failures.items():
            self.failures.setdefault(signature, []).extend(found)

    @property
    def num_valid(self) -> int:
        """The number of cases that torch itself can run."""
        return sum(number for kind, number in self.kinds.items() if kind != "invalid")

    def report(self, pools: dict[int, Pool] | None = None) -> str:
        """Describe each class with its smallest case, which is shrunk if there are pools to do so."""
        lines = [", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()))]
        for signature, found in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            case, outcome = min(found, key=lambda pair: len(repr(pair[0])))
            if pools is not None and outcome.kind != "invalid":
                case, outcome = shrink(pools[case.world], signature, case, outcome)
            worlds = sorted({case.world for case, _ in found})
            lines += [f"\n{len(found)}x {signature} (worlds {worlds})", f"    {case}"]
            lines += [f"    {detail}" for detail in outcome.details[:5]]
            lines += [f"    | {line}" for line in outcome.text.splitlines()[-40:]]
        return "\n".join(lines)


def explore(pool: Pool, num_cases: int, first_seed: int, findings: Findings) -> None:
    """Try `num_cases` random cases on a pool."""

    def body(case: Case) -> None:
        findings.add(case, pool.check(case))

    options = settings(_OPTIONS, max_examples=num_cases, phases=(Phase.generate,))
    seed(first_seed)(options(given(cases(pool.world))(body)))()


def shrink(pool: Pool, signature: str, case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """Look for a smaller case with the same signature."""
    try:
        found = find(
            cases(pool.world),
            lambda case: pool.check(case).signature == signature,
            settings=_OPTIONS,
            random=Random(case.seed),
        )
    except NoSuchExample:
        return case, outcome
    return found, pool.check(found)
