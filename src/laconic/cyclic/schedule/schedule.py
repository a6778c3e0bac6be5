"""The schedule: at which time step and on which device every op runs. Pure arithmetic, no tensors.

A time step is the forward or the backward of one stage. Worker i runs stage j of batch t in the time steps

    forward   2N t + 2i + j            backward   2N t + 2i + 2N - 1 - j

so it runs two time steps after worker i - 1. For N = 2 and two batches (F1 and B1: the first stage):

    time step   0   1   2   3   4   5   6   7   8   9
    worker 0   F1  F2  B2  B1  F1  F2  B2  B1
    worker 1           F1  F2  B2  B1  F1  F2  B2  B1

Under plain data parallelism all workers run in the time steps of worker 0.

Source: Fournier and Oyallon, arXiv 2403.08837, figure 1. The messages (schedule.py, program.py) are our own.

[Note: Messages of a batch]
There are N workers and N stages; s_j is the switch of stage j under the rule (rule.py). A batch sends these messages:

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

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from laconic.cyclic.schedule.rule import RULES, Rule

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
