"""The schedule: at which time step and on which device every op runs. Pure arithmetic, no tensors.

A time step is the forward or the backward of one stage. Worker i runs stage j of batch t in the time steps

    forward   2N t + 2i + j            backward   2N t + 2i + 2N - 1 - j

so it runs two time steps after worker i - 1. For N = 2 and two batches (F1 and B1: the first stage):

    time step   0   1   2   3   4   5   6   7   8   9
    worker 0   F1  F2  B2  B1  F1  F2  B2  B1
    worker 1           F1  F2  B2  B1  F1  F2  B2  B1

Under plain data parallelism all workers run in the time steps of worker 0.

Source: Fournier and Oyallon, arXiv 2403.08837, figure 1. The messages (messages.py, program.py) are our own.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from laconic.cyclic.schedule.messages import Op
from laconic.cyclic.schedule.rule import RULES, Rule

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
