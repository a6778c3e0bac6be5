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

[Note: Messages of a batch]
There are N workers and N stages; s_j is the switch of stage j under the rule. A batch sends these messages:

  gradient      The gradient of stage j, summed over workers 0..i. Worker i sends it to worker i + 1 after its backward.
  total         The sum over all workers. The last worker sends it to the devices that step the stage's optimizer.
  weights       One version of a stage's parameters. It travels along a ring of workers, from the stage's owner, worker
                s_j mod N. Each worker uses it two time steps after the previous worker, and sends it on before its
                forward or after it: [Note: One message at a time] in program.py.
  rear weights  The same version once more for the backward, if workers do not keep parameters after the forward.
  activation, activation gradient
                The output of a stage, and the gradient of its input, between stages on different devices.
  square        The sum of squares of the totals of stages j..N-1. It travels from the last stage to the first.
  norm          The sum of squares over all stages, for every device. Square and norm are sent if updates need the norm.

states        parameters                 optimizer state   total goes to              other devices get a version by
replicated    all stages, every worker   owner             owner                      weights
sharded       owner                      owner             owner                      weights and rear weights
shared        one stage per device       every device      every device of the stage  applying the total themselves
single        one device                 that device       that device                -

A run begins with batch 0. Version t of a stage contains the gradients of batches 0..t-1 of the run. Stale workers use
version t - 1 in batch t, hence version -1 in batch 0. If the run was resumed while a gradient waited to be applied,
version -1 lacks that gradient and version 0 contains it. In every other run the two versions are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

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


MessageKind = Literal[
    "gradient", "total", "weights", "rear weights", "activation", "activation gradient", "square", "norm"
]
Key = tuple[str, int, int, int]
"""The kind, stage, index and worker of a message, which name its content at the receiver."""


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

    @property
    def label(self) -> str:
        """The name of the op in papers, which count stages from 1: F1, B4."""
        return f"{'F' if self.is_forward else 'B'}{self.stage + 1}"


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer from one device to another, or a value that a device keeps for itself if both are the same."""

    kind: MessageKind
    source: int
    target: int
    stage: int
    index: int
    """The version, for weights and rear weights. The batch of the gradient, for all other kinds."""
    worker: int
    """The worker whose activation is sent, the last worker of a sum of gradients, or the worker that uses weights."""
    step: int
    """The time step at whose beginning the message leaves."""
    due: int
    """The time step at whose beginning the receiver needs it."""
    sent_in: int
    """The sender's batch when it sends."""
    due_in: int
    """The receiver's batch when it needs the message."""
    is_last: bool = False
    """Whether it brings weights of the last version of a run, which is known once the run is drained."""

    @property
    def key(self) -> Key:
        """The name of the content at the receiver."""
        return self.kind, self.stage, self.index, self.worker

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage} between devices {self.source} and {self.target}"


class Compute(NamedTuple):
    """Run the op with this version of its stage."""

    op: Op
    version: int


class Receive(NamedTuple):
    """Wait for the message; then use it, or throw it away if it is not needed."""

    message: Message
    is_needed: bool = True


class Send(NamedTuple):
    """Start to send the message, without waiting for the receiver."""

    message: Message


class Update(NamedTuple):
    """Apply the total of batch `version - 1` to the stage, unless the stage has this version already."""

    stage: int
    version: int


class Square(NamedTuple):
    """Add the squares of this stage's total, which is now complete, to the squares of later stages."""

    stage: int


Instruction = Compute | Receive | Send | Update | Square


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run on which its programs depend."""

    is_pending: bool = False
    """Whether a gradient waited to be applied when the run began."""
    num_batches: int | None = None
    """The number of batches, known once the run is drained. Programs of later batches only pass messages on."""

    def has_gradient(self, batch: int) -> bool:
        """Whether the run computes this batch."""
        return batch >= 0 and (self.num_batches is None or batch < self.num_batches)

    def has_version(self, version: int) -> bool:
        """Whether the run makes this version, and it differs from the version before."""
        first = 0 if self.is_pending else 1
        return version >= first and (self.num_batches is None or version <= self.num_batches)


StatePlacement = Literal["single", "replicated", "sharded", "shared"]
STATES: tuple[StatePlacement, ...] = ("single", "replicated", "sharded", "shared")
"""The four ways to place model states: see the table in [Note: Messages of a batch]."""


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

    def __post_init__(self) -> None:
        if self.states not in STATES:
            raise ValueError(f"states={self.states!r}, expected one of {', '.join(STATES)}")
        if self.states == "shared" and not self.rule.is_staggered and self.num_stages > 1:
            raise ValueError(
                f'states="shared" needs workers at different times, but under rule {self.rule.name!r} all '
                f"{self.num_stages} are at the same stage at once; give another rule, such as v2"
            )
        if self.has_norm and not self.rule.allows_global_norm:
            able = ", ".join(name for name in RULES if Rule.named(name, self.num_stages).allows_global_norm)
            raise ValueError(
                "clipping by the global norm and loss scaling need the gradients of all stages before any is applied, "
                f"which rule {self.rule.name!r} cannot wait for; rules that can: {able}. Or clip stage by stage, in "
                "the optimizer"
            )

    @property
    def num_stages(self) -> int:
        """N, the number of stages and of workers."""
        return self.rule.num_stages

    @property
    def num_devices(self) -> int:
        """The number of devices: 1, N, or N(N+1)/2 if stages are shared."""
        n = self.num_stages
        return {"single": 1, "shared": n * (n + 1) // 2}.get(self.states, n)

    @property
    def has_device_per_worker(self) -> bool:
        """Whether each worker has a device of its own. The device then has the worker's number."""
        return self.states in ("replicated", "sharded")

    def forward_step(self, worker: int, stage: int, batch: int) -> int:
        """The time step of a forward."""
        return 2 * self.num_stages * batch + (2 * worker if self.rule.is_staggered else 0) + stage

    def backward_step(self, worker: int, stage: int, batch: int) -> int:
        """The time step of a backward."""
        return self.forward_step(worker, 0, batch) + 2 * self.num_stages - 1 - stage

    def num_steps(self, batches: int) -> int:
        """The number of time steps of a whole run: 2N per batch, and 2(N - 1) until the last worker begins."""
        return self.backward_step(self.num_stages - 1, 0, batches - 1) + 1 if batches else 0

    def device(self, worker: int, stage: int, batch: int) -> int:
        """The device that runs a stage of a worker's micro-batch.

        N - j devices hold a shared stage j. Micro-batch m = t N + i runs on number m mod (N - j), the one that is free.
        """
        if self.states == "single":
            return 0
        if self.states == "shared":
            micro_batch = batch * self.num_stages + worker
            return self.devices_of(stage)[micro_batch % (self.num_stages - stage)]
        return worker

    def devices_of(self, stage: int) -> range:
        """The devices that run a stage."""
        if self.states == "shared":
            first = sum(self.num_stages - earlier for earlier in range(stage))
            return range(first, first + self.num_stages - stage)
        return range(self.num_devices)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that a device runs."""
        return tuple(stage for stage in range(self.num_stages) if device in self.devices_of(stage))

    def updated_on(self, device: int) -> tuple[int, ...]:
        """The stages whose optimizer steps on a device."""
        if not self.has_device_per_worker:
            return self.stages_of(device)
        return tuple(stage for stage in range(self.num_stages) if self.rule.owner(stage) == device)

    def ops(self, device: int, batch: int) -> list[Op]:
        """The ops of a device for one batch, in their order."""
        return _ops_by_device(self, batch)[device]

    def table(self, batches: int) -> list[list[Op | None]]:
        """The ops of a run: row i has worker i's op for every time step, None where the worker idles."""
        rows: list[list[Op | None]] = [[None] * self.num_steps(batches) for _ in range(self.num_stages)]
        for batch in range(batches):
            for ops in _ops_by_device(self, batch):
                for op in ops:
                    rows[op.worker][op.step] = op
        return rows

    def live_activations(self, batches: int) -> list[int]:
        """The number of stage activations, over all workers, that are alive during every time step of a run.

        An activation lives until the end of its backward. In steady state N(N+1)/2 live, or up to N^2 without stagger.
        """
        change = [0] * (self.num_steps(batches) + 1)
        for op in (op for row in self.table(batches) for op in row if op is not None):
            if op.is_forward:
                change[op.step] += 1
            else:
                change[op.step + 1] -= 1
        return list(accumulate(change))[:-1]


@lru_cache(maxsize=8)
def _ops_by_device(schedule: Schedule, batch: int) -> list[list[Op]]:
    ops: list[list[Op]] = [[] for _ in range(schedule.num_devices)]
    for worker in range(schedule.num_stages):
        for stage in range(schedule.num_stages):
            device = schedule.device(worker, stage, batch)
            for step_of, is_forward in ((schedule.forward_step, True), (schedule.backward_step, False)):
                ops[device].append(Op(step_of(worker, stage, batch), worker, device, stage, batch, is_forward))
    return [sorted(own, key=lambda op: (op.step, op.worker)) for own in ops]
