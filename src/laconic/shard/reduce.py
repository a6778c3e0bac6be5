"""How a unit's gradients come together: written into the bucket, summed inside the node, then across the nodes.

Inside the node every micro-batch, across nodes once per optimizer step: between the two a rank holds one slice of
partial sums. Sums are in the reduce dtype and are divided once, at the end.

[Note: Gradients that do not come]
A parameter that got no gradient on this rank adds zero, since other ranks may have one (experts to which no token was
routed, say). All ranks must reduce the same buckets: those of every unit whose outputs got gradients. An optimizer
therefore sees a zero, not None, for an unused parameter of a unit that was used.
"""

from __future__ import annotations

import weakref
from collections import deque
from enum import Enum, auto

import torch
from torch import Tensor, nn

from laconic.comm.collectives import Communicator, ReduceScatter
from laconic.shard.bucket import Bucket
from laconic.shard.lanes import Lanes, Mark, wait_for
from laconic.shard.ledger import Ledger


class ReductionState(Enum):
    """Where a reduction stands."""

    LOCAL = auto()
    """Being summed inside the node."""
    NODE = auto()
    """The slice is being summed across nodes."""
    DONE = auto()


class BucketGradients:
    """The gradients of one bucket, from the first parameter's in a backward to `.grad` of the sharded parameters."""

    def __init__(self, bucket: Bucket, node: Communicator, local: Communicator, lanes: Lanes, ledger: Ledger) -> None:
        self.bucket = bucket
        self.node, self.local, self.lanes, self.ledger = node, local, lanes, ledger
        self._full: Tensor | None = None
        self._written: set[int] = set()
        self.partial: Tensor | None = None
        """Sums of earlier micro-batches inside this node, (N * C,), not yet sent across nodes."""
        bucket.send_gradients_to(self)

    @property
    def are_waiting(self) -> bool:
        """True if this backward has written gradients that are not under reduction yet."""
        return self._full is not None

    def collect(self, index: int, parameter: nn.Parameter) -> None:
        """Move a gathered parameter's gradient into the bucket, in the reduce dtype."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # written in place already
            return
        if gradient.is_sparse:
            raise ValueError(
                f"{self.bucket.layout.slots[index].name} got a sparse gradient, which cannot be reduced in a flat "
                "bucket; build the embedding with sparse=False"
            )
        gradient = self.bucket.part_of_gradient(index, gradient)
        self._allocate()
        view = self._view(index)
        if index in self._written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._written.add(index)

    def takes(self, dtype: torch.dtype) -> bool:
        """True if gradients of `dtype` need no cast."""
        return dtype == self.bucket.reduce_dtype

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add left @ right to a gradient, in the bucket: [Note: Gradients written in place] in shard/linear.py."""
        self._allocate()
        view = self._view(index)
        if index in self._written:
            view.addmm_(left, right)
        else:
            torch.mm(left, right, out=view)
            self._written.add(index)

    def _allocate(self) -> None:
        if self._full is None:
            device = self.bucket.cluster.device
            self._full = torch.empty(self.bucket.layout.numel, dtype=self.bucket.reduce_dtype, device=device)
            self.ledger.hold(self._full.nbytes)

    def _view(self, index: int) -> Tensor:
        assert self._full is not None
        slot = self.bucket.layout.slots[index]
        return self._full[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def take_full(self) -> Tensor:
        """The bucket of this backward's gradients, complete: [Note: Gradients that do not come]."""
        self._allocate()
        assert self._full is not None
        if not self._written:
            self._full.zero_()
        else:
            for index in set(range(len(self.bucket.sharded))) - self._written:
                self._view(index).zero_()
        full, self._full = self._full, None
        self._written.clear()
        return full

    def discard(self) -> None:
        """Forget what a failed backward has written, and the partial sums it may be part of."""
        if self._full is not None:
            self.ledger.hold(-self._full.nbytes)
            self._full = None
        if self.partial is not None:
            self.ledger.hold(-self.partial.nbytes)
            self.partial = None
        self._written.clear()

    def accumulate(self, shard: Tensor) -> None:
        """Add a finished sum to the sharded parameters' `.grad`: (C,), the sum over all ranks and micro-batches."""
        if self.bucket.divide_by != 1:
            shard.div_(self.bucket.divide_by)
        shard = shard.to(self.bucket.dtype)
        trainable = [(i, parameter) for i, parameter in enumerate(self.bucket.sharded) if parameter.requires_grad]
        base = getattr(trainable[0][1].grad, "base", None)
        if base is not None and all(getattr(parameter.grad, "base", None) is base for _, parameter in trainable):
            base.add_(shard)  # all of them at once
            return
        self.ledger.hold(shard.nbytes)
        weakref.finalize(shard, self.ledger.hold, -shard.nbytes)
        for index, parameter in trainable:
            local = self.bucket.local_view(shard, index)
            if parameter.grad is None:
                gradient = parameter.like(local)  # type: ignore[attr-defined]
                gradient.base = shard  # the account closes when the last gradient of the bucket goes
                parameter.grad = gradient
            else:
                parameter.grad.to_local().add_(local)  # type: ignore[attr-defined]


class Reduction:
    """One bucket's gradients on their way."""

    def __init__(self, gradients: BucketGradients, full: Tensor | None, *, across_nodes: bool) -> None:
        self.gradients = gradients
        self._across_nodes = across_nodes
        self._ledger, self._lanes = gradients.ledger, gradients.lanes
        self._full = full
        self._transfer: ReduceScatter | None = None
        self._mark: Mark = None
        self.stage = ReductionState.LOCAL
        if full is not None:
            with self._lanes.reduce.running():
                self._transfer = gradients.local.start_reduce_scatter(full)
            self._ledger.hold(self._transfer.nbytes)

    def finish_local(self) -> None:
        """Finish the sum inside the node and, at the end of an optimizer step, send it across the nodes."""
        if self.stage is not ReductionState.LOCAL:
            return
        with self._lanes.reduce.running():
            gradients = self.gradients
            total, gradients.partial = gradients.partial, None
            if self._transfer is not None:
                fresh = self._finish_transfer()
                if total is None:
                    total = fresh
                    self._ledger.hold(total.nbytes)
                else:
                    total.add_(fresh)
            assert total is not None
            if self._across_nodes:
                self._slice = total
                self._transfer = gradients.node.start_reduce_scatter(total)
                self._ledger.hold(self._transfer.nbytes)
                self.stage = ReductionState.NODE
            else:
                gradients.partial = total
                self.stage = ReductionState.DONE
        self._mark = self._lanes.reduce.mark()
        if self._mark is None:  # no lane still reads the bucket
            self._release()

    def finish(self) -> None:
        """Return with the sum in `.grad`, or among the partial sums, for whatever compute does next."""
        self.finish_local()
        if self.stage is ReductionState.NODE:
            with self._lanes.reduce.running():
                shard = self._finish_transfer()
                self._ledger.hold(-self._slice.nbytes)
                del self._slice
                self.gradients.accumulate(shard)
            self.stage = ReductionState.DONE
            self._mark = self._lanes.reduce.mark()
        wait_for(self._mark)
        self._release()

    def abandon(self) -> None:
        """Finish what is under way and throw the sum away."""
        if self._transfer is not None:
            with self._lanes.reduce.running():
                self._finish_transfer()
        if self.stage is ReductionState.NODE:
            self._ledger.hold(-self._slice.nbytes)
        self.stage = ReductionState.DONE
        wait_for(self._lanes.reduce.mark())
        self._release()

    def _release(self) -> None:
        """Give this micro-batch's gradient bucket back ([Note: Who may free a transfer buffer] in shard/lanes.py)."""
        if self._full is not None:
            self._ledger.hold(-self._full.nbytes)
            self._full = None

    def _finish_transfer(self) -> Tensor:
        assert self._transfer is not None
        total = self._transfer.finish()
        self._ledger.hold(-self._transfer.nbytes)
        self._transfer = None
        return total


class ReductionQueue:
    """Reductions under way, first come, first finished ([Note: The same order on every rank] in shard/gather.py)."""

    def __init__(self) -> None:
        self._under_way: deque[Reduction] = deque()

    def has(self, gradients: BucketGradients) -> bool:
        """True if a reduction of these gradients is under way."""
        return any(reduction.gradients is gradients for reduction in self._under_way)

    def add(self, reduction: Reduction) -> None:
        """Enter a reduction, which is being summed inside the node: finish the one before, then send the sum on its
        way.

        So the wire has always one, and while backward computes the next bucket there is nothing else in memory.
        """
        while self._under_way:
            self._under_way.popleft().finish()
        reduction.finish_local()
        self._under_way.append(reduction)

    def finish(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._under_way.popleft().finish()

    def abandon(self) -> None:
        """Wait for all of them and keep nothing."""
        while self._under_way:
            self._under_way.popleft().abandon()
