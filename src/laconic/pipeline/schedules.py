"""The eager 1F1B schedule, which torch's runtime of schedules carries out, and weights that rest under that runtime.

[Note: Eager 1F1B]
Under 1F1B stage s of S has S - s micro-batches under way. When a message has left, its stage has nothing else to do
until another one comes, so each micro-batch waits once for the wire. With 2 (S - s) - 1 micro-batches under way there
is always one to compute, and a message may travel for half of the time in which a stage computes a micro-batch
("eager-1F1B" of Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, arXiv 2211.05322).
Each rank asks for messages before it needs them. A communicator of NCCL takes its messages in order, so gradients have
one of their own: what is asked for ahead does not hold up what goes the other way. The price is memory: the activations
of nearly twice as many micro-batches.

[Note: Weights rest in a runtime of schedules]
torch's runtime gathers all weights of a stage before its first forward, and keeps them until its last backward. Here a
unit gathers its weights when it needs them, and they rest as its cache says. So `let_weights_rest` tells the runtime
that the weights are there. The runtime's reshard at the end of a step stays: it frees what a split backward kept whole.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import (
    ScheduleLoopedBFS,
    _Action,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)


class ScheduleEager1F1B(ScheduleLoopedBFS):
    """1F1B with 2 (S - s) - 1 micro-batches under way on stage s of S: [Note: Eager 1F1B].

    The base class lowers any order of one rank's forwards and backwards; this class says the order. And it lets go of
    messages that have arrived, where torch keeps all of a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: dict[_ComputationType, deque[list[dist.Work]]] = {}
        for kind in (_ComputationType.SEND_F, _ComputationType.SEND_B):
            self._sent[kind] = deque()
            self._comp_type_to_function_map[kind] = self._send

    def _send(self, action: _Action, context: Any) -> None:
        """Send, and wait for the message before so many others that its micro-batch has come back: that is no wait."""
        (stage,), sent = self._stages, self._sent[action.computation_type]
        is_forward, number = action.computation_type == _ComputationType.SEND_F, action.microbatch_index
        assert number is not None
        sent.append(_batch_p2p(stage.get_fwd_send_ops(number) if is_forward else stage.get_bwd_send_ops(number)))
        self._wait_for_all_but(2 * self.pp_group_size, sent)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._step_microbatches(*args, **kwargs)
        for sent in self._sent.values():
            self._wait_for_all_but(0, sent)
        return found

    @staticmethod
    def _wait_for_all_but(number: int, sent: deque[list[dist.Work]]) -> None:
        while len(sent) > number:
            _wait_batch_p2p(sent.popleft())

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


def let_weights_rest(schedule: Any) -> None:
    """Let the units of sharded stages gather: [Note: Weights rest in a runtime of schedules].

    It changes a schedule that torch's runtime carries out, and no other.
    """
    if isinstance(schedule, _PipelineScheduleRuntime):
        schedule._comp_type_to_function_map[_ComputationType.UNSHARD] = _say_that_weights_are_there


def _say_that_weights_are_there(action: _Action, context: Any) -> None:
    context.schedule_ref.unsharded_stages.add(action.stage_index)
