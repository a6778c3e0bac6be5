"""`.grad` of sharded parameters: which of them get one, and what stands in it while sums of gradients wait.

[Note: Agreement on used parameters]
A reduction sums zero for a parameter without a gradient. If no rank has a gradient for it, its `.grad` must be None,
not zero: Adam would move a parameter whose gradient is zero. So at the end of a backward the ranks unite their flags:
one for each parameter, set if it got a gradient on this rank. They do so also if all parameters had a `.grad` before:
users may clear gradients on one rank only, and no rank may wait for a message that others do not send. A bucket whose
parameters have hooks agrees at once, because a hook may take the optimizer's step and free the gradient.

Most ranks need no answer. A parameter that this rank has used keeps its `.grad`, whatever the others say. What they say
matters for a parameter that this rank has not used, and only if its `.grad` is new, or if it has hooks. So on streams
(NCCL) the flags follow the last sum down the reduce lane, in an all-reduce of a byte a parameter on each level. No
thread waits for it, but on a rank that needs the answer: its host waits until the lane has copied the flags out.

A rank could not remember the answer of an earlier step instead. Whether another rank has used the parameter now, only a
message of this backward says, and this rank's optimizer may not begin without it. So a wait is the least that a rank
with such a parameter can do; freeze what no rank ever uses. Nor can a rank that has used all be silent: it does not
know who needs its flags. The sums themselves have no room for them: a rank gets its own part of a sum, but needs all
flags. The weights of the next step would bring them after the optimizer. On Gloo a host waits for each transfer in any
case, so there the hosts exchange their flags, in one trip, while the last sums are under way.

[Note: Cleared gradients]
After a backward that does not sync, the engine keeps sums that are not in `.grad`: of a node, of an island, or on their
way. What a user clears is cleared, as under DDP, where `.grad` holds such sums itself. So between backwards `.grad`
stands for the sums that wait: a parameter that has none gets a `WaitingGradient`, which is zero and takes no memory
until it is read or changed. At the first gradient of the next backward the engine looks at each parameter whose sums
wait. If another `.grad` is in its place, or none, or if its `.grad` was set to zero since, the sums of this parameter
are dropped. Then the waiting gradients go, and the backward finds `.grad` as if they had never been. The sums are
dropped by writing zeros into them, so all ranks reduce the same buckets, whatever a single one has cleared.

An optimizer that steps meanwhile passes over parameters without a `.grad`, and must go on to do so: Adam would move a
parameter whose gradient is zero. So waiting gradients are hidden during a step, unless its closure runs a backward.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator, PendingFlags, start_flags
from laconic.comm.traffic import Level
from laconic.comm.watch import waiting_for
from laconic.ragged.steps import OptimizerStep, after_step, before_step
from laconic.ragged.tensor import RaggedTensor, admit_edits
from laconic.shard.bucket import Bucket
from laconic.shard.lanes import Lane

_HIDDEN = "_laconic_hidden"
"""The attribute of an optimizer that takes a step: the parameters whose waiting gradients are hidden."""


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

    def note_new_gradients(self, indices: Iterable[int]) -> None:
        """Record parameters whose `.grad` was None before this reduction."""
        self._new.update(indices)

    @property
    def has_hooks(self) -> bool:
        """True if a sharded parameter has hooks that run after its gradient is in place."""
        return _compat.have_post_accumulate_hooks(self.bucket.sharded)

    def flags(self) -> Tensor:
        """1 for each parameter that got a gradient on this rank, else 0: uint8, (P,)."""
        count = len(self.bucket.sharded)
        if len(self._used) == count:  # most often
            return torch.ones(count, dtype=torch.uint8)
        return torch.tensor([index in self._used for index in range(count)], dtype=torch.uint8)

    @property
    def needs_others(self) -> bool:
        """True if only other ranks know what becomes of a parameter that got no gradient on this one."""
        unused = set(range(len(self.bucket.sharded))) - self._used
        hooked = [self.bucket.sharded[index] for index in unused]
        return not unused.isdisjoint(self._new) or _compat.have_post_accumulate_hooks(hooked)

    def conclude(self, used: Sequence[int]) -> None:
        """Remove the new `.grad` of parameters that no rank used, and run the hooks of the others.

        `used` has what some rank used, (P,); it may leave out what this one did.
        """
        own, new, has_hooks = self._used, self._new, self.has_hooks
        self._used, self._new = set(), set()
        for index in sorted(new - own):
            if not used[index]:
                self.bucket.sharded[index].grad = None
        for index, parameter in enumerate(self.bucket.sharded) if has_hooks else ():
            if index in own or used[index]:
                for hook in _compat.post_accumulate_hooks(parameter):
                    hook(parameter)

    def forget(self) -> None:
        """Forget all: the ranks have agreed, need not agree, or drop the backward."""
        self._used.clear()
        self._new.clear()


class Agreement:
    """The ranks' agreement on the parameters of some buckets: [Note: Agreement on used parameters].

    Collective over the ranks of their clusters, when it begins and when it is concluded.
    """

    def __init__(self, reduced: Sequence[UsedParameters]) -> None:
        """Begin to agree on parameters that get no further gradient. Hosts send their flags at once."""
        kinds = [(each.bucket.cluster, each.bucket.replicas_diverge) for each in reduced]
        self._groups: list[tuple[list[UsedParameters], list[Communicator], PendingFlags | None]] = []
        for cluster, diverge in dict.fromkeys(kinds):
            members = [each for each, kind in zip(reduced, kinds, strict=True) if kind == (cluster, diverge)]
            names: tuple[Level, ...] = ("local", "node") if diverge else ("local", "node", "island")
            levels = [level for name in names if (level := Communicator(cluster, name)).size > 1]
            pending = None
            if not levels or not all(level.is_stream_ordered for level in levels):
                pending = start_flags(cluster, _flags(members), across_islands=not diverge)
            self._groups.append((members, levels, pending))

    def conclude(self, lane: Lane) -> None:
        """Finish the `.grad` of all parameters, whose sums have ended on `lane`.

        It removes gradients that no rank has, and runs the parameters' hooks.
        """
        for members, levels, pending in self._groups:
            if pending is not None:
                united = pending.wait()
            else:
                is_needed = any(each.needs_others for each in members)
                cluster = members[0].bucket.cluster
                united = _unite_on_lane(cluster, levels, _flags(members), lane, is_needed=is_needed)
            sizes = [len(each.bucket.sharded) for each in members]
            for each, used in zip(members, united.split(sizes), strict=True):
                each.conclude(used.tolist())


def _flags(members: Sequence[UsedParameters]) -> Tensor:
    return torch.cat([each.flags() for each in members])


def _unite_on_lane(
    cluster: Cluster, levels: Sequence[Communicator], flags: Tensor, lane: Lane, *, is_needed: bool
) -> Tensor:
    """Unite flags over the ranks of `levels`, behind the jobs of the lane.

    If it `is_needed` the host waits for the flags that some rank has set. Otherwise it gets back its own, at once.

    Shapes: flags (K,), uint8, on the host -> (K,), on the host.
    Cost: an all-reduce of K bytes on each level, counted as "control".
    """
    with lane.going_on():  # all memory here is the lane's own
        if flags.all():  # most ranks, in most steps: nothing to copy
            united = torch.ones(len(flags), dtype=torch.uint8, device=cluster.device)
        else:
            united = flags.pin_memory().to(cluster.device, non_blocking=True)
        for level in levels:
            level.all_reduce(united, dist.ReduceOp.MAX)
        if not is_needed:
            return flags
        answer = united.to("cpu", non_blocking=True)
    arrived = lane.record_event()
    if arrived is not None:
        with waiting_for("an agreement on used parameters"):
            arrived.synchronize()
    return answer


class WaitingGradient(RaggedTensor):
    """A `.grad` of zeros that stands for sums of gradients elsewhere: [Note: Cleared gradients]."""

    elements: Tensor | None
    """None until somebody reads or changes them."""
    _count: Callable[[Tensor], None]
    changes: list[None]
    """One for each time that the elements were changed in place."""
    is_hidden: bool
    """True while an optimizer takes a step."""

    def __new__(cls, bucket: Bucket, index: int) -> WaitingGradient:
        """Make a gradient for a sharded parameter. The ledger of the bucket counts its memory, once it has some."""
        parameter = bucket.sharded[index]
        self = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self.spec, self._zeroings, self.changes = parameter.spec, [0], []  # type: ignore[attr-defined]
        self._bump = partial(self.changes.append, None)
        self.elements, self.is_hidden = None, False
        # A reference to the bucket would be a cycle that Python never frees.
        self._count = partial(bucket.ledger.hold_until_freed, on_host=bucket.stored.is_offloaded)
        return self

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        if self.elements is None:
            numel = 0 if self.extent is None else self.extent.numel
            self.elements = torch.zeros(numel, dtype=self.dtype, device=self.device)
            self._count(self.elements)
        return self.elements


class WaitingSums:
    """The parameters of one bucket whose sums wait, and what stands in their `.grad`: [Note: Cleared gradients]."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.shown: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        """By parameter, the tensor put into its `.grad`, and how often that had been cleared and changed by then."""

    def show(self, index: int) -> None:
        """Let `.grad` of a parameter stand for its sums, from the end of a backward on."""
        parameter = self.bucket.sharded[index]
        if parameter.grad is None:
            parameter.grad = WaitingGradient(self.bucket, index)
        shown = parameter.grad
        num_changes = len(shown.changes) if isinstance(shown, WaitingGradient) else 0
        self.shown[index] = weakref.ref(shown), _zeroings(shown), num_changes

    def take(self) -> set[int]:
        """Take the waiting gradients away, and return the parameters whose gradients were cleared since `show`."""
        cleared, scaled = set(), list[str]()
        for index, (reference, zeroings, num_changes) in self.shown.items():
            parameter, shown = self.bucket.sharded[index], reference()
            waiting = shown if isinstance(shown, WaitingGradient) else None
            if waiting is not None and waiting.is_hidden:
                waiting.is_hidden = False
            elif shown is None or parameter.grad is not shown or _zeroings(shown) != zeroings:
                cleared.add(index)
            elif waiting is not None and len(waiting.changes) > num_changes and not waiting._local_tensor.any():
                scaled.append(self.bucket.layout.slots[index].name)
            if waiting is not None and parameter.grad is waiting and waiting.elements is None:
                parameter.grad = None
        self.shown.clear()
        if scaled:
            warnings.warn(
                f".grad of {', '.join(scaled)} of {self.bucket.unit_name} was scaled or clipped while its sums wait "
                "for a micro-batch that syncs, which changes nothing: scale the loss, or the gradients after that one",
                stacklevel=2,
            )
        return cleared


def _zeroings(gradient: Tensor) -> int:
    return gradient.zeroings if isinstance(gradient, RaggedTensor) else gradient._version


@before_step
def _hide(step: OptimizerStep) -> None:
    """Hide waiting gradients from a step, which is about to edit the weights."""
    admit_edits()
    _show_again(step.optimizer)  # of a step that raised
    if step.has_closure:
        return
    hidden = []
    for parameter in step.parameters:
        gradient = parameter.grad
        if isinstance(gradient, WaitingGradient) and gradient.elements is None:
            gradient.is_hidden, parameter.grad = True, None
            hidden.append((parameter, gradient))
    if hidden:
        setattr(step.optimizer, _HIDDEN, hidden)


@after_step
def _show_again(optimizer: Optimizer) -> None:
    hidden: list[tuple[nn.Parameter, WaitingGradient]] = optimizer.__dict__.pop(_HIDDEN, [])
    for parameter, gradient in hidden:
        if gradient.is_hidden and parameter.grad is None:
            parameter.grad = gradient
        gradient.is_hidden = False
