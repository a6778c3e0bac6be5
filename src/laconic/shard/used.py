"""The parameters that a backward has used: those that no rank has used get no gradient.

[Note: Agreement on used parameters]
A reduction sums zero for a parameter without a gradient. If no rank has a gradient for it, its `.grad` must be None,
not zero: Adam would move a parameter whose gradient is zero. So at the end of a backward the ranks agree, in one small
message, on the parameters that got a gradient on any rank. They do so also if all parameters had a `.grad` before:
users may clear gradients on one rank only, and no rank may wait for a message that others do not send. A bucket whose
parameters have hooks agrees at once, because a hook may take the optimizer's step and free the gradient.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laconic import _compat
from laconic.comm.collectives import start_flags
from laconic.shard.bucket import Bucket


class UsedParameters:
    """The parameters of one bucket that got a gradient on this rank since the ranks last agreed."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._used: set[int] = set()
        self._new: set[int] = set()  # parameters whose `.grad` was None until the last reduction

    def __contains__(self, index: int) -> bool:
        return index in self._used

    def add(self, indices: Iterable[int]) -> None:
        """Record parameters that got a gradient on this rank."""
        self._used.update(indices)

    def remove(self, indices: Iterable[int]) -> None:
        """Forget that parameters got a gradient: it was cleared."""
        self._used.difference_update(indices)

    def note_new_gradient(self, index: int) -> None:
        """Record a parameter whose `.grad` was None before this reduction."""
        self._new.add(index)

    @property
    def has_hooks(self) -> bool:
        """True if a sharded parameter has hooks that run after its gradient is in place."""
        return any(_compat.post_accumulate_hooks(parameter) for parameter in self.bucket.sharded)

    def flags(self) -> Tensor:
        """1 for each parameter that got a gradient on this rank, else 0: uint8, (P,)."""
        return torch.tensor([index in self._used for index in range(len(self.bucket.sharded))], dtype=torch.uint8)

    def conclude(self, used: Sequence[int]) -> None:
        """Remove the new `.grad` of parameters that no rank used, and run the hooks of the others."""
        new = set(self._new)
        self.forget()
        for index, parameter in enumerate(self.bucket.sharded):
            if used[index]:
                for hook in _compat.post_accumulate_hooks(parameter):
                    hook(parameter)
            elif index in new:
                parameter.grad = None

    def forget(self) -> None:
        """Forget all: the ranks have agreed, need not agree, or drop the backward."""
        self._used.clear()
        self._new.clear()


def agree(reduced: Sequence[UsedParameters]) -> None:
    """Finish the `.grad` of all parameters of `reduced`: [Note: Agreement on used parameters].

    Collective over the ranks of their clusters. It removes gradients that no rank has, and runs the parameters' hooks.
    """
    kinds = [(each.bucket.cluster, each.bucket.replicas_diverge) for each in reduced]
    for cluster, diverge in dict.fromkeys(kinds):
        members = [each for each, kind in zip(reduced, kinds, strict=True) if kind == (cluster, diverge)]
        flags = [each.flags() for each in members]
        united = start_flags(cluster, torch.cat(flags), across_islands=not diverge).wait()
        for each, used in zip(members, united.split([len(own) for own in flags]), strict=True):
            each.conclude(used.tolist())
