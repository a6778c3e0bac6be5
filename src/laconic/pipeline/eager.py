"""The eager 1F1B schedule, which torch's runtime of schedules carries out.

[Note: Eager 1F1B]
Under 1F1B stage s of S has S - s micro-batches under way. When a message has left, its stage has nothing else to do
until another one comes, so each micro-batch waits once for the wire. With 2 (S - s) - 1 micro-batches under way there
is always one to compute, and a message may travel for half of the time in which a stage computes a micro-batch
("eager-1F1B" of Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, arXiv 2211.05322).
Each rank asks for messages before it needs them. A communicator of NCCL takes its messages in order, so gradients have
one of their own: what is asked for ahead does not hold up what goes the other way. The price is memory: the activations
of nearly twice as many micro-batches.
"""

from __future__ import annotations

from torch.distributed.pipelining.schedules import ScheduleLoopedBFS, _Action, _ComputationType


class ScheduleEager1F1B(ScheduleLoopedBFS):
    """1F1B with 2 (S - s) - 1 micro-batches under way on stage s of S: [Note: Eager 1F1B].

    The base class lowers any order of one rank's forwards and backwards; this class says the order.
    """

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        forwards, backwards = (
            [_Action(rank, kind, number) for number in range(self._n_microbatches)]
            for kind in (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
        )
        ahead = min(len(forwards), 2 * (self.pp_group_size - rank) - 1)
        order: list[_Action | None] = [None] * rank + forwards[:ahead]
        for number, backward in enumerate(backwards):
            order += [backward, *forwards[ahead + number : ahead + number + 1]]
        return order
