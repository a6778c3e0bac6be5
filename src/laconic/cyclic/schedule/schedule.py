"""When every micro-batch runs, and which messages that takes: pure arithmetic, no tensors.

One time step is one stage's forward or one stage's backward. Worker i runs stage j of batch t in time steps

    forward   2N t + 2i + j            backward   2N t + 2i + 2N - 1 - j

two steps after worker i - 1; under plain data parallelism all workers run when worker 0 does. What a device does is a
flat list of instructions per batch, its *program*. Programs are the only source of messages: the planner counts them,
the runtime executes them, and a receiver knows what will come, and in which order, from the sender's program.

Source: Fournier and Oyallon, arXiv 2403.08837, figure 1 (the time steps); the messages are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from laconic.cyclic.schedule.messages import Instruction, Message, MessageKind, Op, Run, Send
from laconic.cyclic.schedule.program import program
from laconic.cyclic.schedule.rule import RULES, Rule

StatePlacement = Literal["single", "replicated", "sharded", "shared"]
STATES: tuple[StatePlacement, ...] = ("single", "replicated", "sharded", "shared")


@dataclass(frozen=True)
class Schedule:
    """The time steps of N workers and N stages under a rule, with model states kept in one of four ways.

    `rule` with `is_staggered` False is plain data parallelism on the same machinery: everybody at once.
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

    @staticmethod
    def of(
        rule: Rule | str | Sequence[Sequence[bool | int]], num_stages: int, states: StatePlacement = "replicated"
    ) -> Schedule:
        """From a rule, its name or a mask. Raises ValueError as `Rule.of` does."""
        return Schedule(Rule.of(rule, num_stages), states)

    @property
    def num_stages(self) -> int:
        """N, also the number of workers."""
        return self.rule.num_stages

    @property
    def num_devices(self) -> int:
        """1, N, or N(N+1)/2 if stages are shared."""
        n = self.num_stages
        return {"single": 1, "shared": n * (n + 1) // 2}.get(self.states, n)

    # -- time ----------------------------------------------------------------------------------------------------------

    def forward_step(self, worker: int, stage: int, batch: int) -> int:
        """The time step of this forward."""
        return 2 * self.num_stages * batch + (2 * worker if self.rule.is_staggered else 0) + stage

    def backward_step(self, worker: int, stage: int, batch: int) -> int:
        """The time step of this backward."""
        return self.forward_step(worker, 0, batch) + 2 * self.num_stages - 1 - stage

    def num_steps(self, batches: int) -> int:
        """Time steps of a whole run: 2N per batch, and 2(N - 1) to fill and to drain."""
        return self.backward_step(self.num_stages - 1, 0, batches - 1) + 1 if batches else 0

    # -- place ---------------------------------------------------------------------------------------------------------

    def device(self, worker: int, stage: int, batch: int) -> int:
        """Where this micro-batch's stage runs.

        Shared stages: N - j devices have stage j; micro-batch m = t N + i uses number m mod (N - j) of them, which is
        free at that time.
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

    def ops(self, device: int, batch: int) -> list[Op]:
        """What a device computes of one batch, in its order."""
        return _ops_by_device(self, batch)[device]

    # -- tables --------------------------------------------------------------------------------------------------------

    def table(self, batches: int) -> list[list[Op | None]]:
        """Row i is worker i's op in every time step of a run; None while it idles, in the fill and the drain."""
        rows: list[list[Op | None]] = [[None] * self.num_steps(batches) for _ in range(self.num_stages)]
        for batch in range(batches):
            for ops in _ops_by_device(self, batch):
                for op in ops:
                    rows[op.worker][op.step] = op
        return rows

    def live_activations(self, batches: int) -> list[int]:
        """Stage activations alive during every time step, over all workers.

        One begins with its forward and ends with its backward; in steady state there are N(N+1)/2, and up to N^2 if all
        workers run at once.
        """
        change = [0] * (self.num_steps(batches) + 1)
        for row in self.table(batches):
            for op in row:
                if op is not None:
                    change[op.step if op.is_forward else op.step + 1] += 1 if op.is_forward else -1
        live, alive = [], 0
        for step in range(self.num_steps(batches)):
            alive += change[step]
            live.append(alive)
        return live

    def messages(self, batches: int) -> list[Message]:
        """All that crosses between devices in a run of `batches` batches, drained at its end; by time step."""
        run = Run(num_batches=batches)
        sent = [
            instruction.message
            for batch in range(batches + 2)
            for device in range(self.num_devices)
            for instruction in self.program(device, batch, run)
            if isinstance(instruction, Send) and instruction.message.source != instruction.message.target
        ]
        return sorted(sent, key=lambda message: (message.step, message.source, message.target))

    def messages_per_step(self, batches: int) -> list[list[Message]]:
        """`messages` by the time step at whose beginning they leave; the drain's last are in later steps than ops."""
        messages = self.messages(batches)
        steps = max([self.num_steps(batches), *(message.step + 1 for message in messages)])
        by_step: list[list[Message]] = [[] for _ in range(steps)]
        for message in messages:
            by_step[message.step].append(message)
        return by_step

    def busiest(self, batches: int, kinds: Sequence[MessageKind] = ("gradient", "total", "weights")) -> tuple[int, int]:
        """The most messages of these kinds that one device sends, and receives, in one time step."""
        most = (0, 0)
        for messages in self.messages_per_step(batches):
            sends = Counter(message.source for message in messages if message.kind in kinds)
            receives = Counter(message.target for message in messages if message.kind in kinds)
            most = max(most[0], *sends.values(), 0), max(most[1], *receives.values(), 0)
        return most

    # -- programs ------------------------------------------------------------------------------------------------------

    def program(self, device: int, batch: int, run: Run = Run()) -> list[Instruction]:  # noqa: B008 (it is frozen)
        """What a device does in one batch of a run, in order."""
        return program(self, device, batch, run)


@lru_cache(maxsize=8)
def _ops_by_device(schedule: Schedule, batch: int) -> list[list[Op]]:
    found: list[list[Op]] = [[] for _ in range(schedule.num_devices)]
    for worker in range(schedule.num_stages):
        for stage in range(schedule.num_stages):
            device = schedule.device(worker, stage, batch)
            forward, backward = (step(worker, stage, batch) for step in (schedule.forward_step, schedule.backward_step))
            found[device].append(Op(forward, worker, device, stage, batch, True))
            found[device].append(Op(backward, worker, device, stage, batch, False))
    return [sorted(ops, key=lambda op: (op.step, op.worker)) for ops in found]
