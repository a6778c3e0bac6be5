"""The schedule: at which time step and on which device every op runs. Pure arithmetic, no tensors.

A time step is the forward or the backward of one stage. Worker i runs stage j of batch t in the time steps

    forward   2N t + 2i + j            backward   2N t + 2i + 2N - 1 - j

so it runs two time steps after worker i - 1. For N = 2 and two batches (F1 and B1: the first stage):

    time step   0   1   2   3   4   5   6   7   8   9
    worker 0   F1  F2  B2  B1  F1  F2  B2  B1
    worker 1           F1  F2  B2  B1  F1  F2  B2  B1

Under plain data parallelism all workers run in the time steps of worker 0.

Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837, figure 1; equations CDP-v1 and CDP-v2 for the rules, of which `lag2` and `clip` are our members. The
messages (program.py) are our own.

[Note: Rules and switches]
There are N stages and N workers. In batch t a worker is *fresh* for stage j if it computes with version t of the stage,
which a worker that starts late enough can have. Otherwise it is *stale*, and computes with version t - 1. One number
per stage decides, the *switch* s_j: worker i is fresh iff i >= s_j. All else about a rule follows from its switches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, get_args

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

    def batch_of_version(self, worker: int, stage: int, version: int) -> int:
        """The batch in which the worker uses a version of the stage."""
        return version if self.is_fresh(worker, stage) else version + 1

    @property
    def is_staggered(self) -> bool:
        """Whether workers run one after the other. False for plain data parallelism and for one worker alone."""
        return any(self.switch)

    @property
    def allows_global_norm(self) -> bool:
        """Whether the gradients of all stages are complete before any of them must be applied.

        Clipping by the global norm needs this. The total of stage 0 is the last to be complete, just before worker
        N - 1 starts its next batch.
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


@dataclass(frozen=True, slots=True)
class Op:
    """The forward or the backward of one stage on one micro-batch."""

    step: int
    worker: int
    """The worker whose micro-batch the op computes, 0..N-1. The number of the `device` may be another."""
    device: int
    stage: int
    batch: int
    is_forward: bool


StatePlacement = Literal["single", "replicated", "sharded", "shared"]
"""The four ways to place model states: see the table in [Note: Messages of a batch]."""
StageCache = Literal["none", "host"]
"""Where a worker keeps the weights of stages that are not its own between their forward and their backward."""


@dataclass(frozen=True)
class Schedule:
    """The time steps and devices of N workers and N stages under a rule, with model states placed in one of four ways.

    Raises:
        ValueError: the placement does not exist, or the rule cannot serve it: shared stages need a staggered rule, and
            the global norm needs a rule whose `allows_global_norm` is true.
    """

    rule: Rule
    states: StatePlacement = "replicated"
    has_norm: bool = False
    """Whether updates wait for the global norm of the gradient."""
    cache: StageCache = "none"
    """With sharded states: "host" copies weights to host memory for the backward; else they come a second time."""

    def __post_init__(self) -> None:
        if self.states not in get_args(StatePlacement):
            raise ValueError(f"states={self.states!r}, expected one of {', '.join(get_args(StatePlacement))}")
        if self.cache not in get_args(StageCache):
            raise ValueError(f"cache={self.cache!r}, expected one of {', '.join(get_args(StageCache))}")
        if self.cache == "host" and self.states != "sharded":
            raise ValueError(
                f'cache="host" has nothing to keep with states="{self.states}": a device has the weights of its stages '
                'all the time, and none come again for a backward; use states="sharded", or leave cache out'
            )
        if self.states == "shared" and not self.rule.is_staggered and self.num_stages > 1:
            raise ValueError(
                f'states="shared" needs workers at different times, but under rule {self.rule.name!r} all '
                f"{self.num_stages} are at the same stage at once; give another rule, such as v2"
            )
        if self.has_norm and not self.rule.allows_global_norm:
            able = ", ".join(name for name in RULES if Rule.named(name, self.num_stages).allows_global_norm)
            raise ValueError(
                "clipping by the global norm needs the gradients of all stages before any is applied, which rule "
                f"{self.rule.name!r} cannot wait for; rules that can: {able}. Or clip stage by stage, in the optimizer"
            )

    @property
    def num_stages(self) -> int:
        """N, the number of stages and of workers."""
        return self.rule.num_stages

    @property
    def num_devices(self) -> int:
        """The number of devices: 1, N, or N(N+1)/2 if stages are shared."""
        return self.devices_of(self.num_stages - 1).stop

    @property
    def has_device_per_worker(self) -> bool:
        """Whether each worker has a device of its own. The device then has the worker's number."""
        return self.states in ("replicated", "sharded")

    def step(self, worker: int, stage: int, batch: int, *, is_forward: bool = True) -> int:
        """The time step of a forward or of a backward."""
        begin = 2 * self.num_stages * batch + (2 * worker if self.rule.is_staggered else 0)
        return begin + (stage if is_forward else 2 * self.num_stages - 1 - stage)

    def device(self, worker: int, stage: int, batch: int) -> int:
        """The device that runs a stage of a worker's micro-batch.

        The devices of a stage take turns, so micro-batch m = t N + i runs on number m mod N, which has the worker's
        number, or m mod (N - j) of the N - j devices that hold a shared stage j, which is the one that is free.
        """
        devices = self.devices_of(stage)
        return devices[(batch * self.num_stages + worker) % len(devices)]

    def devices_of(self, stage: int) -> range:
        """The devices that run a stage."""
        if self.states == "shared":
            first = sum(self.num_stages - earlier for earlier in range(stage))
            return range(first, first + self.num_stages - stage)
        return range(self.num_stages if self.has_device_per_worker else 1)

    def updaters(self, stage: int) -> range:
        """The devices on which the optimizer of a stage steps."""
        owner = self.rule.owner(stage)
        return range(owner, owner + 1) if self.has_device_per_worker else self.devices_of(stage)

    def ops(self, device: int, batch: int) -> list[Op]:
        """The ops of a device for one batch, in their order."""
        return _ops_by_device(self, batch)[device]


@lru_cache(maxsize=8)
def _ops_by_device(schedule: Schedule, batch: int) -> list[list[Op]]:
    stages = range(schedule.num_stages)
    found: list[list[Op]] = [[] for _ in range(schedule.num_devices)]
    for worker, stage, is_forward in product(stages, stages, (True, False)):
        device, step = schedule.device(worker, stage, batch), schedule.step(worker, stage, batch, is_forward=is_forward)
        found[device].append(Op(step, worker, device, stage, batch, is_forward))
    return [sorted(ops, key=lambda op: (op.step, op.worker)) for ops in found]
