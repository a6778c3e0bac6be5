"""How a unit's gradients come together: written into the bucket, summed inside the node, then across the nodes.

Inside the node every micro-batch, across nodes once per optimizer step : between the two a
rank holds one slice of partial sums. Sums are in the reduce dtype and are divided once, at the end.

[Note: Gradients that do not come]
A parameter that got no gradient on this rank adds zero, since other ranks may have one; only where a whole bucket got
none does `.grad` stay None. An optimizer therefore sees a zero, not None, for an unused parameter of a unit that was
used.
"""

from __future__ import annotations

import weakref
from collections import deque
from enum import Enum, auto

import torch
from torch import Tensor, nn

from laconic.shard.bucket import Bucket
from laconic.shard.collectives import Level, ReduceScatter
from laconic.shard.lanes import Lanes, Mark, wait_for
from laconic.shard.ledger import Ledger

MAX_IN_FLIGHT = 1
"""Reductions that may still be under way when the next one starts inside the node. One is enough to keep the wire busy: the
next is summed inside the node while it finishes. It bounds memory, as FSDP2 does, to one reduction beside the bucket that
backward is writing."""


class Stage(Enum):
    """Where a reduction stands."""

    LOCAL = auto()
    """Being summed inside the node."""
    NODE = auto()
    """The slice is being summed across nodes."""
    DONE = auto()


class BucketGradients:
    """The gradients of one bucket, from the first parameter's in a backward to `.grad` of the sharded parameters."""

    def __init__(self, bucket: Bucket, node: Level, local: Level, lanes: Lanes, ledger: Ledger) -> None:
        self.bucket = bucket
        self._node, self._local, self._lanes, self._ledger = node, local, lanes, ledger
        self._full: Tensor | None = None
        self._written: set[int] = set()
        self.partial: Tensor | None = None
        """Sums of earlier micro-batches inside this node, (N * C,), not yet sent across nodes."""
        bucket.on_grad(self.collect)

    @property
    def are_waiting(self) -> bool:
        """True if this backward has written gradients that are not under reduction yet."""
        return self._full is not None

    def collect(self, index: int, parameter: nn.Parameter) -> None:
        """Move a gathered parameter's gradient into the bucket, in the reduce dtype."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(
                f"{self.bucket.layout.slots[index].name} got a sparse gradient, which cannot be reduced in a flat "
                "bucket; build the embedding with sparse=False"
            )
        if self._full is None:
            size = self.bucket.layout.numel
            self._full = torch.empty(size, dtype=self.bucket.reduce_dtype, device=gradient.device)
            self._ledger.hold(self._full.nbytes)
        view = self._view(index)
        if index in self._written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._written.add(index)

    def _view(self, index: int) -> Tensor:
        assert self._full is not None
        slot = self.bucket.layout.slots[index]
        return self._full[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def take_full(self) -> Tensor | None:
        """The bucket of this backward's gradients, complete; None if there are none."""
        if self._full is None:
            return None
        for index in range(len(self.bucket.sharded)):
            if index not in self._written:
                self._view(index).zero_()
        full, self._full = self._full, None
        self._written.clear()
        return full

    def discard(self) -> None:
        """Forget what a failed backward has written."""
        if self._full is not None:
            self._ledger.hold(-self._full.nbytes)
            self._full = None
        self._written.clear()

    def accumulate(self, chunk: Tensor) -> None:
        """Add a finished sum to the sharded parameters' `.grad`: (C,), the sum over all ranks and micro-batches."""
        if self.bucket.divide_by != 1:
            chunk.div_(self.bucket.divide_by)
        chunk = chunk.to(self.bucket.dtype)
        self._ledger.hold(chunk.nbytes)
        weakref.finalize(chunk, self._ledger.hold, -chunk.nbytes)
        for index, parameter in enumerate(self.bucket.sharded):
            if not parameter.requires_grad:
                continue
            local = self.bucket.local_view(chunk, index)
            if parameter.grad is None:
                gradient = parameter.like(local)  # type: ignore[attr-defined]
                gradient.base = chunk  # the account closes when the last gradient of the bucket goes
                parameter.grad = gradient
            else:
                parameter.grad.to_local().add_(local)  # type: ignore[attr-defined]


class Reduction:
    """One bucket's gradients on their way."""

    def __init__(self, gradients: BucketGradients, full: Tensor | None, *, across_nodes: bool) -> None:
        self.gradients = gradients
        self._across_nodes = across_nodes
        self._ledger, self._lanes = gradients._ledger, gradients._lanes
        self._full = full
        self._transfer: ReduceScatter | None = None
        self._mark: Mark = None
        self.stage = Stage.LOCAL
        if full is not None:
            with self._lanes.reduce.running():
                self._transfer = gradients._local.start_reduce_scatter(full)
            self._ledger.hold(self._transfer.nbytes)

    def is_ready(self) -> bool:
        """True if `advance` would not block."""
        return self._transfer is None or self._transfer.is_done()

    def advance(self) -> None:
        """Go one stage further, waiting if need be."""
        with self._lanes.reduce.running():
            if self.stage is Stage.LOCAL:
                self._finish_local()
            elif self.stage is Stage.NODE:
                self._finish_node()
            self._mark = self._lanes.reduce.mark()
        if self._mark is None:  # no lane still reads the bucket
            self.release()

    @property
    def holds_bucket(self) -> bool:
        """True if this micro-batch's gradient bucket is still in memory."""
        return self._full is not None

    def release(self) -> None:
        """Give this micro-batch's gradient bucket back ([Note: Who may free a transfer buffer] in shard/lanes.py)."""
        if self._full is not None:
            wait_for(self._mark)
            self._ledger.hold(-self._full.nbytes)
            self._full = None

    def _finish_local(self) -> None:
        gradients = self.gradients
        total = gradients.partial
        gradients.partial = None
        if self._transfer is not None:
            fresh = self._finish_transfer()
            if total is None:
                total = fresh
                self._ledger.hold(total.nbytes)
            else:
                total.add_(fresh)
        assert total is not None
        if not self._across_nodes:
            gradients.partial = total
            self.stage = Stage.DONE
            return
        self._slice = total
        self._transfer = gradients._node.start_reduce_scatter(total)
        self._ledger.hold(self._transfer.nbytes)
        self.stage = Stage.NODE

    def _finish_node(self) -> None:
        chunk = self._finish_transfer()
        self._ledger.hold(-self._slice.nbytes)
        del self._slice
        self.gradients.accumulate(chunk)
        self.stage = Stage.DONE

    def _finish_transfer(self) -> Tensor:
        assert self._transfer is not None
        total = self._transfer.finish()
        self._ledger.hold(-self._transfer.nbytes)
        self._transfer = None
        return total


class ReductionQueue:
    """Reductions under way, advanced in the order in which they began ([Note: The same order on every rank])."""

    def __init__(self) -> None:
        self._under_way: deque[Reduction] = deque()

    def has(self, gradients: BucketGradients) -> bool:
        """True if a reduction of these gradients is under way."""
        return any(reduction.gradients is gradients for reduction in self._under_way)

    def add(self, reduction: Reduction) -> None:
        """Enter a reduction; waits for the oldest while too many are under way."""
        self._under_way.append(reduction)
        while len(self._under_way) > MAX_IN_FLIGHT:
            self._advance_first()
        self.advance()

    def advance(self) -> None:
        """Move every reduction on as far as it goes without blocking, none past its elder."""
        furthest = Stage.DONE.value
        for reduction in list(self._under_way):
            while reduction.stage.value < furthest and reduction.stage is not Stage.DONE and reduction.is_ready():
                reduction.advance()
            furthest = reduction.stage.value
        self._forget_done()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._advance_first()
            self._forget_done(keep=0)

    def _advance_first(self) -> None:
        first = self._under_way[0]
        if first.stage is not Stage.DONE:
            first.advance()
        self._forget_done()

    def _forget_done(self, keep: int = MAX_IN_FLIGHT) -> None:
        # On CUDA a reduction is DONE for the host as soon as it is issued; the youngest few keep their buckets
        # meanwhile.
        while self._under_way and self._under_way[0].stage is Stage.DONE:
            if self._under_way[0].holds_bucket and len(self._under_way) <= keep:
                return
            self._under_way.popleft().release()
