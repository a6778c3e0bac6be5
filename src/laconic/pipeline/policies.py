"""The policy of a pipeline: torch's schedule by name, the micro-batches that it needs, and the wire between stages.

[Note: Placement of stages]
With R ranks in a pipeline and v stages on each there are v * R stages. GPipe and 1F1B have one stage on each rank. The
schedules with several go round: rank r has the stages r, r + R, r + 2 R and so on. The V-shaped ones have two, and rank
r has the stages r and 2 R - 1 - r. So the last rank hands its first stage's output to its second stage itself, and the
first rank has the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from laconic.policy import Bound, Count, Policy

if TYPE_CHECKING:  # a job description imports no torch
    from torch import Tensor

    from laconic.pipeline.wire import WireStage

ScheduleName = Literal[
    "GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
"""The schedules of torch.distributed.pipelining, and one that hides the wire: [Note: Eager 1F1B]."""
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
PipelineWire = Annotated[
    str,
    Bound(
        lambda value: value in ("exact", "8bit"),
        "be 'exact' or '8bit'; nothing that follows makes up for the error of an activation, as feedback does for that "
        "of a gradient, so fewer bits have no evidence",
    ),
]
_ONE_STAGE = ("GPipe", "1F1B", "Eager1F1B")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")


@dataclass(frozen=True, kw_only=True)
class PipelinePolicy(Policy):
    """The policy of a pipeline: its schedule, its micro-batches, and the bits in which activations cross.

    Raises:
        ValueError: the schedule is none of torch's or cannot have so many stages on a rank, a number is not positive,
            or the wire is neither exact nor in eight bits.
    """

    schedule: ScheduleName = "1F1B"
    """The order of forwards and backwards, by the name that torch.distributed.pipelining gives it; or `Eager1F1B`."""
    micro_batches: Count = 4
    """The equal parts into which each batch is cut. With S stages the bubble of 1F1B is (S - 1) / micro_batches."""
    wire: PipelineWire = "exact"
    """The bits in which activations and their gradients cross between stages: "exact" is the dtype that they have;
    "8bit" is eight bits a value, and a step of two bytes for every 128."""
    stages_per_rank: Count | None = None
    """The stages on each rank. Default: what the schedule needs: one for GPipe, 1F1B and Eager1F1B, two for others."""

    def _check_keys(self) -> None:
        wanted = 1 if self.schedule in _ONE_STAGE else 2 if self.schedule in _V_SHAPED else None
        self._check(
            "stages_per_rank",
            self.stages_per_rank is None or wanted in (None, self.stages_per_rank),
            f"does not go with {{schedule=}}, which has {wanted} on each rank; leave it out, or take another schedule",
        )

    @property
    def num_stages_per_rank(self) -> int:
        """The number of stages on each rank."""
        return self.stages_per_rank or (1 if self.schedule in _ONE_STAGE else 2)

    @property
    def splits_backward(self) -> bool:
        """True if the schedule asks for the gradients of inputs first, and for those of weights later."""
        return self.schedule in ("InterleavedZeroBubble", *_V_SHAPED)

    @property
    def asks_ahead(self) -> bool:
        """True if messages of both directions are under way beside each other: [Note: Eager 1F1B]."""
        return self.schedule == "Eager1F1B"

    def num_stages(self, num_ranks: int) -> int:
        """The number of stages of a pipeline of so many ranks."""
        return num_ranks * self.num_stages_per_rank

    def stages_of(self, rank: int, num_ranks: int) -> list[int]:
        """The stages of a rank, ascending: [Note: Placement of stages]."""
        if self.schedule in _V_SHAPED:
            return [rank, 2 * num_ranks - 1 - rank]
        return [rank + chunk * num_ranks for chunk in range(self.num_stages_per_rank)]

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """The rank that has a stage."""
        if self.schedule in _V_SHAPED:
            return min(stage, 2 * num_ranks - 1 - stage)
        return stage % num_ranks

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a pipeline of so many ranks.

        Raises:
            ValueError: there are fewer than two, or the schedule needs more micro-batches, or another number of them.
        """
        if num_ranks < 2:
            raise ValueError(
                f"a pipeline of {num_ranks} rank has no boundary to send over; give its mesh two ranks or more, or "
                "leave the pipeline out"
            )
        least = self.least_micro_batches(num_ranks)
        if self.micro_batches < least:
            raise ValueError(
                f"micro_batches={self.micro_batches} are too few: {self.schedule} with "
                f"{self.num_stages(num_ranks)} stages needs {least} at least; give as many, or take GPipe"
            )
        rounds = max(1, self.micro_batches // num_ranks)
        if self.schedule in _IN_ROUNDS and self.micro_batches % rounds:
            raise ValueError(
                f"micro_batches={self.micro_batches} do not divide into {rounds} equal rounds, as {self.schedule} on "
                f"{num_ranks} ranks wants them; give a multiple of {num_ranks}, such as {rounds * num_ranks}"
            )

    def least_micro_batches(self, num_ranks: int) -> int:
        """The fewest micro-batches with which the schedule works."""
        if self.schedule in ("1F1B", "DualPipeV"):
            return self.num_stages(num_ranks)
        return 1

    def make_schedule(
        self, stages: Sequence[WireStage], loss_fn: Callable[..., Tensor] | None, *, scale_grads: bool = False
    ) -> Any:
        """Build torch's schedule for the stages of this rank, which `stages_of` lists.

        Args:
            stages: all of one pipeline, ascending.
            loss_fn: the loss of one micro-batch. Its gradients are added up over micro-batches.
            scale_grads: divide all of `.grad` by the micro-batches at the end of each step. It divides what earlier
                steps have left there once more, so `Pipeline` divides the loss instead.

        Raises:
            ValueError: see `check_ranks`; or the stages are not those of this rank.
        """
        from torch.distributed.pipelining import schedules

        from laconic.pipeline.schedules import ScheduleEager1F1B

        num_ranks, rank = stages[0].group_size, stages[0].group_rank
        self.check_ranks(num_ranks)
        numbers, wanted = [stage.stage_index for stage in stages], self.stages_of(rank, num_ranks)
        if numbers != wanted or {stage.num_stages for stage in stages} != {self.num_stages(num_ranks)}:
            raise ValueError(
                f"rank {rank} of {num_ranks} has the stages {wanted} of {self.num_stages(num_ranks)} under "
                f"{self.schedule}, got {numbers} of {stages[0].num_stages}; give it those that stages_of lists"
            )
        made: Any = ScheduleEager1F1B if self.schedule == "Eager1F1B" else schedules.get_schedule_class(self.schedule)
        given = stages[0] if self.schedule in ("GPipe", "1F1B") else list(stages)
        return made(given, self.micro_batches, loss_fn=loss_fn, scale_grads=scale_grads)

    def forward_slots(self, rank: int, num_ranks: int, micro_batches: int | None = None) -> dict[int, tuple[int, int]]:
        """The forwards of an evaluation on one rank: the (stage, micro-batch) of each time slot in which it has one.

        A forward's output is an input in the next slot, on whichever rank. So all ranks send what slot t has made, and
        receive what slot t + 1 needs, together, and nobody waits for a message that is not sent yet.
        """
        slots = {}
        for stage in self.stages_of(rank, num_ranks):
            for number in range(micro_batches or self.micro_batches):
                if self.schedule in _V_SHAPED:  # a rank's two stages have different parities
                    slot = 2 * number + stage
                else:
                    whole, rest = divmod(number, num_ranks)
                    slot = whole * self.num_stages(num_ranks) + rest + stage
                slots[slot] = stage, number
        return slots
