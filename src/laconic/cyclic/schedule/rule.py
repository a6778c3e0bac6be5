"""Which version of each stage's parameters each worker uses.

N stages, N workers. In batch t, worker i computes with version t of stage j if it comes late enough in the round to
have it, and with version t - 1 otherwise. "Late enough" is one number per stage, the *switch* s_j: worker i is fresh
iff i >= s_j. All else about a rule (freshness, slack, who may clip by the global norm) follows from the switches.

Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837, equations CDP-v1 and CDP-v2; `lag2` and `clip` are members of the same family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SWITCHES: dict[str, Callable[[int, int], int]] = {
    # Everybody fresh: possible only if all workers run at once.
    "dp": lambda num_stages, stage: 0,
    # Nobody fresh: every gradient is one step old.
    "v1": lambda num_stages, stage: num_stages,
    # As fresh as the schedule permits.
    "v2": lambda num_stages, stage: num_stages - 1 - stage,
    # One worker less than v2, so that every hop has two time steps to arrive in.
    "lag2": lambda num_stages, stage: num_stages - stage,
    # As fresh as possible after the sums of all stages are known.
    "clip": lambda num_stages, stage: num_stages - 1 - stage // 2,
}
RULES = tuple(_SWITCHES)
"""The rules with names."""


@dataclass(frozen=True)
class Rule:
    """Worker i uses version t of stage j in batch t iff i >= switch[j], version max(t - 1, 0) otherwise.

    Raises:
        ValueError: not one switch in 0..N per stage; or a worker would use parameters before their gradient can be
            complete: s_j + j >= N - 1 must hold unless all switches are 0, which is plain data parallelism.
    """

    name: str
    num_stages: int
    switch: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_stages < 1 or len(self.switch) != self.num_stages:
            raise ValueError(
                f"rule {self.name!r} has {len(self.switch)} switches for {self.num_stages} stages; give one per stage, "
                "at least one stage"
            )
        for stage, switch in enumerate(self.switch):
            if not 0 <= switch <= self.num_stages:
                raise ValueError(
                    f"rule {self.name!r}: switch {switch} of stage {stage} is not in 0..{self.num_stages}; it is the "
                    f"first worker that is fresh, {self.num_stages} if none is"
                )
            earliest = self.num_stages - 1 - stage
            if self.is_staggered and switch < earliest:
                raise ValueError(
                    f"rule {self.name!r}: worker {switch} cannot use the newest version of stage {stage}, whose "
                    f"gradient is complete only when worker {earliest} starts; give a switch of at least {earliest} "
                    '(rule "v2"), or 0 for every stage (rule "dp")'
                )

    @staticmethod
    def named(name: str, num_stages: int) -> Rule:
        """One of `RULES`: dp, v1, v2, lag2, clip. Raises ValueError for any other name."""
        if name not in _SWITCHES:
            raise ValueError(f"unknown rule {name!r}; the rules are {', '.join(RULES)}, or give a mask")
        return Rule(name, num_stages, tuple(_SWITCHES[name](num_stages, stage) for stage in range(num_stages)))

    @staticmethod
    def from_mask(mask: Sequence[Sequence[bool | int]], name: str = "mask") -> Rule:
        """The rule of a table, N rows of workers x N columns of stages; true where the worker uses the newest version.

        Raises:
            ValueError: the table is not square, or a worker after a fresh one is stale (a version would go back).
        """
        num_stages = len(mask)
        if any(len(row) != num_stages for row in mask):
            raise ValueError(
                f"a mask is a square table, workers x stages; got rows of lengths {[len(row) for row in mask]} for "
                f"{num_stages} workers"
            )
        switches = []
        for stage in range(num_stages):
            column = [bool(row[stage]) for row in mask]
            if column != sorted(column):
                raise ValueError(
                    f"stage {stage} of the mask is fresh for workers {[i for i, fresh in enumerate(column) if fresh]}; "
                    "once a worker is fresh all later ones must be, since versions reach them later"
                )
            switches.append(num_stages - sum(column))
        return Rule(name, num_stages, tuple(switches))

    @staticmethod
    def of(rule: Rule | str | Sequence[Sequence[bool | int]], num_stages: int) -> Rule:
        """A rule from a rule, a name or a mask. Raises ValueError if it is for another number of stages."""
        if isinstance(rule, str):
            return Rule.named(rule, num_stages)
        made = rule if isinstance(rule, Rule) else Rule.from_mask(rule)
        if made.num_stages != num_stages:
            raise ValueError(f"rule {made.name!r} is for {made.num_stages} stages, but there are {num_stages}")
        return made

    def is_fresh(self, worker: int, stage: int) -> bool:
        """Whether this worker uses the newest version of this stage."""
        return worker >= self.switch[stage]

    def version(self, worker: int, stage: int, batch: int) -> int:
        """The version used in both forward and backward; version t has seen the gradients of batches 0..t-1."""
        return batch if self.is_fresh(worker, stage) else max(batch - 1, 0)

    @property
    def is_staggered(self) -> bool:
        """False for plain data parallelism, where all workers run at once. One worker alone is never staggered."""
        return any(self.switch)

    @property
    def mask(self) -> tuple[tuple[bool, ...], ...]:
        """N rows of workers x N columns of stages; true where the worker uses the newest version."""
        return tuple(
            tuple(self.is_fresh(worker, stage) for stage in range(self.num_stages)) for worker in range(self.num_stages)
        )

    @property
    def freshness(self) -> float:
        """The share of (worker, stage) pairs that use the newest version: 1 for dp, (N + 1) / 2N for v2, 0 for v1."""
        return sum(self.num_stages - switch for switch in self.switch) / self.num_stages**2

    def slack(self, stage: int) -> int:
        """Time steps between the end of the step that completes a stage's gradient and the first use of its update.

        0: the last worker's backward is directly followed by the first fresh worker's forward, so a message's latency
        delays the schedule.
        """
        if not self.is_staggered:
            return 2 * stage
        return 2 * (self.switch[stage] + stage - (self.num_stages - 1))

    def versions_needed(self, stage: int) -> int:
        """The most versions of a stage that micro-batches in flight use at one time, over all workers: 1 or 2.

        In flight at stage j are N - j micro-batches in a row, and a version lasts for N in a row.
        """
        return 2 if self.is_staggered and stage < self.num_stages - 1 else 1

    def mean_versions(self) -> float:
        """Versions in use at one time, the mean over stages and time steps: 1 + (N - 1) / 2N if staggered."""
        return 1 + (self.num_stages - 1) / (2 * self.num_stages) if self.is_staggered else 1.0

    @property
    def allows_global_norm(self) -> bool:
        """Whether the gradients of all stages are known before any of them must be applied.

        Clipping by the global norm, and skipping a step for an overflow anywhere, need that. The last sum is stage
        0's, complete before worker N - 1 starts its next batch.
        """
        last = 2 * (self.num_stages - 1)
        return not self.is_staggered or all(2 * switch + stage >= last for stage, switch in enumerate(self.switch))

    def owner(self, stage: int) -> int:
        """The worker that applies a stage's gradient: the first whose use of the result is due; any, if all are."""
        if not self.is_staggered:
            return self.num_stages - 1 - stage
        return self.switch[stage] % self.num_stages
