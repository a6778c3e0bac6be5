"""The stepper of DDP whose optimizer's states are cut over the ranks, by torch's ZeroRedundancyOptimizer.

[Note: ZeRO-1 beside DDP]
Ranks share out whole parameters. DDP averages all gradients on every rank. Then each rank updates its own parameters,
and sends them to all others. With `parameters_as_bucket_view` the parameters of a rank lie in one buffer, so that one
broadcast for each rank sends all of them. `overlap_with_ddp` updates a bucket in the hook that reduces it. No careful
user of clipping can set it: the norm of all gradients is not known before the last bucket. Besides, it takes one group
of parameters only, and its first two or three steps update nothing.

NCCL's broadcast goes along a ring, so all of them together send as much as one all-gather. Gloo's is a tree of whole
messages, which crosses more: on 2 nodes of 2 ranks the parameters leave each node 1.25 times in place of 0.75 times.
That does not belong to ZeRO-1, so on CPU the parts go along a ring, too: [Note: The strongest baseline] in ring.py. For
this torch has no public place, only the method that waits for all broadcasts.
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from laconic.config import JobError, OptimizerConfig
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_optimizer
from laconic.strategies.ring import pass_around
from laconic.strategies.simultaneous import Simultaneous


class _OnRing(ZeroRedundancyOptimizer):
    """A `ZeroRedundancyOptimizer` on CPU: [Note: ZeRO-1 beside DDP]."""

    def _sync_params(self) -> None:
        for parts in self._buckets:  # one list for each device
            pass_around(parts, self.process_group)


def make_cut_optimizer(model: nn.Module, settings: OptimizerConfig) -> ZeroRedundancyOptimizer:
    """The optimizer of `make_optimizer`, an AdamW, with states cut over all ranks. Collective.

    Raises:
        JobError: the trainable parameters have several dtypes, which one buffer cannot hold.
    """
    groups = make_optimizer(model, settings).param_groups
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    if len(dtypes) > 1:
        raise JobError(
            f"shard.strategy = 'ddp-zero1' keeps the trainable parameters of a rank in one buffer, and these have "
            f"{len(dtypes)} dtypes, {', '.join(sorted(map(str, dtypes)))}; use 'ddp'"
        )
    is_on_cpu = groups[0]["params"][0].device.type == "cpu"
    return (_OnRing if is_on_cpu else ZeroRedundancyOptimizer)(
        groups, torch.optim.AdamW, parameters_as_bucket_view=True, lr=settings.lr, fused=settings.fused,
        **settings.pick("betas", "eps"),
    )  # fmt: skip


class Zero1Stepper(Simultaneous):
    """A `Stepper` of [Note: ZeRO-1 beside DDP]."""

    optimizer: ZeroRedundancyOptimizer
    _make_optimizer = staticmethod(make_cut_optimizer)

    def resting_bytes(self) -> int:
        """See `Stepper.resting_bytes`."""
        return super().resting_bytes() + state_nbytes(self.optimizer.optim)
