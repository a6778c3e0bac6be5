"""The rules: which version of each stage's parameters each worker uses.

There are N stages and N workers. In batch t a worker is *fresh* for stage j if it computes with version t of the stage,
which a worker that starts late enough can have. Otherwise it is *stale*, and computes with version t - 1. One number
per stage decides, the *switch* s_j: worker i is fresh iff i >= s_j. All else about a rule follows from its switches.

Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837, equations CDP-v1 and CDP-v2. `lag2` and `clip` are members of the same family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SWITCHES: dict[str, Callable[[int, int], int]] = {
    "dp": lambda num_stages, stage: 0,  # all workers are fresh; this is possible only if all run at once
    "v1": lambda num_stages, stage: num_stages,  # all workers are stale: every gradient is one batch old
    "v2": lambda num_stages, stage: num_stages - 1 - stage,  # as many workers are fresh as the time steps permit
    "lag2": lambda num_stages, stage: num_stages - stage,  # one less than v2: totals have two time steps to arrive
    "clip": lambda num_stages, stage: num_stages - 1 - stage // 2,  # as v2 where updates wait for all stages
}
RULES = tuple(_SWITCHES)


@dataclass(frozen=True)
class Rule:
    """A rule: in batch t, worker i uses version t of stage j if i >= switch[j], and version max(t - 1, 0) otherwise.

    Raises:
        ValueError: there is not one switch in 0..N per stage, or a worker would use parameters before their gradient
            can be complete: s_j + j >= N - 1 must hold unless all switches are 0 (plain data parallelism).
    """

    name: str
    num_stages: int
    switch: tuple[int, ...]
    """The first fresh worker of each stage; N if every worker is stale."""

    def __post_init__(self) -> None:
        if self.num_stages < 1 or len(self.switch) != self.num_stages:
            raise ValueError(
                f"rule {self.name!r} has {len(self.switch)} switches for {self.num_stages} stages; give one per stage, "
                "and at least one stage"
            )
        for stage, switch in enumerate(self.switch):
            if not 0 <= switch <= self.num_stages:
                raise ValueError(
                    f"rule {self.name!r}: switch {switch} of stage {stage} is not in 0..{self.num_stages}; give the "
                    f"first worker that is fresh, or {self.num_stages} if none is"
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
        """The rule of a table, N rows of workers x N columns of stages, true where the worker is fresh.

        Raises:
            ValueError: the table is not square, or a stale worker follows a fresh one.
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
                    "all workers after a fresh one must be fresh too, since versions reach them later"
                )
            switches.append(num_stages - sum(column))
        return Rule(name, num_stages, tuple(switches))

    @staticmethod
    def of(rule: Rule | str | Sequence[Sequence[bool | int]], num_stages: int) -> Rule:
        """A rule from a rule, a name or a mask. Raises ValueError if there is none, or not for `num_stages` stages."""
        if isinstance(rule, str):
            return Rule.named(rule, num_stages)
        made = rule if isinstance(rule, Rule) else Rule.from_mask(rule)
        if made.num_stages != num_stages:
            raise ValueError(f"rule {made.name!r} is for {made.num_stages} stages, but there are {num_stages}")
        return made

    def is_fresh(self, worker: int, stage: int) -> bool:
        """Whether the worker uses the newest version of the stage."""
        return worker >= self.switch[stage]

    def version_in_run(self, worker: int, stage: int, batch: int) -> int:
        """The version that the worker uses; -1 if it is stale in batch 0: see [Note: Messages of a batch]."""
        return batch if self.is_fresh(worker, stage) else batch - 1

    @property
    def is_staggered(self) -> bool:
        """Whether workers run one after the other. False for plain data parallelism and for one worker alone."""
        return any(self.switch)

    @property
    def mask(self) -> tuple[tuple[bool, ...], ...]:
        """N rows of workers x N columns of stages, true where the worker is fresh."""
        return tuple(
            tuple(self.is_fresh(worker, stage) for stage in range(self.num_stages)) for worker in range(self.num_stages)
        )

    @property
    def freshness(self) -> float:
        """The share of (worker, stage) pairs that are fresh: 1 for dp, (N + 1) / 2N for v2, 0 for v1."""
        return sum(self.num_stages - switch for switch in self.switch) / self.num_stages**2

    def slack(self, stage: int) -> int:
        """The number of time steps between the op that completes a stage's total and the first use of the new version.

        With a slack of 0 the one op follows the other directly, so the latency of the message delays the schedule.
        """
        if not self.is_staggered:
            return 2 * stage
        return 2 * (self.switch[stage] + stage - (self.num_stages - 1))

    @property
    def allows_global_norm(self) -> bool:
        """Whether the gradients of all stages are complete before any of them must be applied.

        Clipping by the global norm needs this, and so does skipping the update of all stages after an overflow. The
        total of stage 0 is the last to be complete, just before worker N - 1 starts its next batch.
        """
        last = 2 * (self.num_stages - 1)
        return not self.is_staggered or all(2 * switch + stage >= last for stage, switch in enumerate(self.switch))

    def owner(self, stage: int) -> int:
        """The worker that steps the optimizer of a stage.

        The owner is the first worker to use the new version: worker s_j in the next batch, or worker 0 one batch later
        if all workers are stale. Without stagger all workers use it at once, and every worker owns one stage.
        """
        if not self.is_staggered:
            return self.num_stages - 1 - stage
        return self.switch[stage] % self.num_stages
