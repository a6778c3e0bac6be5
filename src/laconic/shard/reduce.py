"""Reducing a unit's gradients: written into the bucket, summed inside the node, across the nodes, over the islands.

The sum inside the node runs in every micro-batch, the sum across nodes once per optimizer step. In between a rank holds
one node shard of partial sums. Sums are in the reduce dtype and are divided once, at the end. Islands are the replicas
of HSDP: the sum of a shard over the islands follows, unless `LocalSteps` trains the islands on their own.

[Note: Gradients that wait]
Sums that wait for a later backward are added up in float32 at least. The engine casts them to the reduce dtype once,
before it sends them on: in bfloat16, 256 + 1 is 256. FSDP2 adds them up in the reduce dtype. The first bucket has that
dtype, too, because the engine learns only at the end of a backward that its gradients wait.

[Note: Gradients that wait whole]
With `Cache(gradients="rank")` no sum runs before the last micro-batch: the bucket's buffer stays, and the gradients of
the next backward are added where they are, as under DDP's `no_sync`. That saves the sums inside the node of all
micro-batches but one. It takes the memory of all gradients; node shards of sums take 1 / L of that.

[Note: Gradients that do not come]
A parameter without a gradient on this rank adds zero, because other ranks may have a gradient for it (a router may send
tokens to an expert on one rank only). All ranks must reduce the same buckets: those of every unit whose outputs got
gradients, in a backward that adds to `.grad` of some parameter (`autograd.grad` does not). Afterwards the ranks agree
on the parameters that none of them has used: [Note: Agreement on used parameters] in shard/grad.py.

[Note: Gradients that leave the device]
Under `CPUOffloadPolicy` the reduce lane copies a finished shard to page-locked memory, and nobody waits for it. At the
end of the backward the host waits once, for the last of them, and only then adds all to `.grad`: before that a sum with
an older gradient would read memory that is still being written. A bucket whose parameters have hooks waits at once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laconic import _compat
from laconic._compat import GradientUse
from laconic.comm.traffic import Level
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket
from laconic.shard.buffer import AS_THEY_COME, ISLAND_SUMS, NODE_SUMS, REDUCTION, SHARD, Buffer, Counted, Leg, Spread
from laconic.shard.crossing import ways_of_sums
from laconic.shard.extension import Observer
from laconic.shard.gather import HostReads
from laconic.shard.grad import Agreement, UsedParameters, WaitingGradient, WaitingSums
from laconic.shard.lanes import Event, Lanes, wait_for
from laconic.shard.linear import GradientSink

_requires_grad = attrgetter("requires_grad")


class Walk(NamedTuple):
    """The way of a reduction."""

    legs: Sequence[Leg]
    """Those over which the ranks' gradients are partial: the one over islands if these are replicas."""
    goal: Spread
    """Where the sums rest at the end: in `.grad`, or for a later backward."""


def _walk_of(has_replicas: bool, across_nodes: bool, across_islands: bool) -> Walk:
    resting = ISLAND_SUMS if has_replicas and not across_islands else SHARD
    return Walk(REDUCTION if has_replicas else REDUCTION[:2], resting if across_nodes else NODE_SUMS)


_WALKS = {each: _walk_of(*each) for each in product((False, True), repeat=3)}
"""By whether there are replicas, and whether sums go across nodes and across islands now."""


class BucketGradients(GradientSink):
    """The gradients of one bucket, from the first one in a backward to `.grad` of the sharded parameters."""

    def __init__(self, bucket: Bucket, lanes: Lanes, begin_backward: Callable[[], bool], observer: Observer) -> None:
        """`begin_backward` is called before a buffer takes gradients, and says if it may have those that wait whole."""
        self.bucket, self.lanes, self.observer = bucket, lanes, observer
        self._begin_backward = begin_backward
        self.ways = ways_of_sums(bucket)
        self.full: Buffer | None = None
        """This backward's gradients, (L * N * C,), whose reduction has not begun."""
        self._numel, self._device = bucket.layout.numel, bucket.cluster.device
        self._places = [slice(each.offset, each.offset + each.numel) for each in bucket.layout.slots]
        """The elements of each parameter in the buffer."""
        self._shapes = [tuple(each.shape) for each in bucket.layout.slots]
        self._all = range(len(bucket.sharded))
        self._written: set[int] = set()
        self.waiting: dict[Spread, Buffer] = {}
        """Sums of earlier backwards, by the spread at which they wait: gradients `AS_THEY_COME`, of a node, or of an
        island. [Note: Gradients that wait whole] has the first ones."""
        self._written_before: set[int] = set()
        """The parameters that have a part in the gradients that wait whole."""
        self.used = UsedParameters(bucket)
        self.leaving: list[Tensor] = []
        """Shards of gradients on their way to host memory: [Note: Gradients that leave the device]."""
        self.shown = WaitingSums(bucket)
        self._is_replicated = bucket.cluster.cut is not None
        """True for a small bucket, all whose sums are those over replicas."""
        bucket.full.set_sink(self)

    def walk(self, *, across_nodes: bool, across_islands: bool) -> Walk:
        """The walk of these gradients, which go across nodes and islands now, or not."""
        has_replicas = self.bucket.cluster.num_islands > 1 and not self.bucket.replicas_diverge
        return _WALKS[has_replicas, across_nodes, across_islands or self._is_replicated]

    def has_partial_sums(self, *, across_islands: bool) -> bool:
        """True if sums of earlier backwards wait to be sent on; those of an island if they go `across_islands` now."""
        goes_on = across_islands or self._is_replicated
        return any(goes_on or spread is not ISLAND_SUMS for spread in self.waiting)

    def adds_to_grad(self) -> bool:
        """True if the running backward adds to `.grad` of a parameter: [Note: Gradients that do not come]."""
        return any(
            _compat.gradient_use(_compat.accumulator_of(parameter)) is GradientUse.ACCUMULATED
            for parameter in self.bucket.full.parameters
            if parameter.requires_grad
        )

    def collect(self, index: int, parameter: nn.Parameter) -> None:
        """Move a gathered parameter's gradient into the bucket, in the reduce dtype.

        Raises:
            ValueError: the gradient is sparse.
        """
        if torch.is_grad_enabled():  # with create_graph=True a gradient has a graph of its own
            with torch.no_grad():
                self.collect(index, parameter)
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(
                f"{self.bucket.layout.slots[index].name} got a sparse gradient, which cannot be reduced in a flat "
                "bucket; build the embedding with sparse=False"
            )
        if self.bucket.stored.specs[index].dtensor is not None or self.bucket.form.converts:
            gradient = self.bucket.part_of_gradient(index, gradient)
        view = (self.full or self._allocate()).memory[self._places[index]].view(self._shapes[index])
        if index in self._written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._written.add(index)

    def collect_left(self) -> None:
        """Move gradients that somebody has put on gathered parameters into the bucket: [Note: Pipelines] in unit.py."""
        for index, parameter in enumerate(self.bucket.full.parameters):
            if parameter.grad is not None:
                self.collect(index, parameter)

    def accepts(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """See `GradientSink.accepts`."""
        buffer = self.full or self.waiting.get(AS_THEY_COME)
        taken = buffer.memory.dtype if buffer is not None else self.bucket.reduce_dtype
        return dtype == taken and len(shape) == 2 and tuple(shape) == self._shapes[index]

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """See `GradientSink.add_product`, and [Note: Gradients written in place] in shard/linear.py."""
        if (*left.shape[:-1], *right.shape[1:]) != self._shapes[index]:
            slot = self.bucket.layout.slots[index]
            raise ValueError(  # torch would give the memory another shape, and leave the rest of it as it was
                f"a product {tuple(left.shape)} @ {tuple(right.shape)} cannot be the gradient of {slot.name}, "
                f"{tuple(slot.shape)}; ask `accepts` first, and return such a gradient to autograd"
            )
        view = (self.full or self._allocate()).memory[self._places[index]].view(self._shapes[index])
        if index in self._written:
            view.addmm_(left, right)
        else:
            torch.mm(left, right, out=view)
            self._written.add(index)

    def _allocate(self) -> Buffer:
        if self.full is None:
            if self._begin_backward() and AS_THEY_COME in self.waiting:
                self.full = self.waiting.pop(AS_THEY_COME)
                self._written, self._written_before = self._written_before, set()
                return self.full
            memory = torch.empty(self._numel, dtype=self.bucket.reduce_dtype, device=self._device)
            self.full = Buffer(memory, self.bucket.ledger)
        return self.full

    def fill_unused(self) -> None:
        """Give all trained parameters a gradient: zeros, if no rank has another."""
        self.used.add(self._trainable())

    def take_full(self) -> Buffer:
        """Hand over the gradients, (L * N * C,), to be reduced. The caller frees them."""
        self.full = self.full or self._allocate()  # which may bring those that wait whole
        self.used.add(self._written)
        return self.take_unreduced()

    def keep_whole(self) -> None:
        """Let the gradients wait for those of the next backward: [Note: Gradients that wait whole]."""
        self.waiting[AS_THEY_COME] = self.in_dtype(self._allocate(), self.bucket.waiting_dtype)
        self.used.add(self._written)
        self.full, self._written, self._written_before = None, set(), self._written

    def in_dtype(self, sums: Buffer, dtype: torch.dtype) -> Buffer:
        """Cast sums that wait, or that are sent on: [Note: Gradients that wait]."""
        if sums.memory.dtype == dtype:
            return sums
        cast = Buffer(sums.memory.to(dtype), self.bucket.ledger)
        sums.free()
        return cast

    def take_unreduced(self) -> Buffer:
        """Hand over the gradients, (L * N * C,). The caller frees them: [Note: Gradients that do not come]."""
        full = self.full or self._allocate()
        if not self._written:
            full.memory.zero_()
        elif len(self._written) < len(self.bucket.sharded):
            for index in set(range(len(self.bucket.sharded))) - self._written:
                full.memory[self._places[index]].zero_()
        self.full = None
        self._written.clear()
        return full if full.memory.dtype == self.bucket.reduce_dtype else self.in_dtype(full, self.bucket.reduce_dtype)

    def show_unreduced(self, probe: Callable[[Bucket, Tensor], None]) -> None:
        """Give the gradients, (L * N * C,), to `probe` in place of their reduction, and free them."""
        full = self.take_unreduced()
        probe(self.bucket, full.memory)
        full.free()

    def forget_lost(self) -> None:
        """Drop what a codec has lost of earlier gradients."""
        for way in self.ways.values():
            way.forget()

    def show_waiting(self) -> None:
        """Let `.grad` stand for sums that wait until the next backward: [Note: Cleared gradients] in grad.py."""
        for index in self._trainable():
            self.shown.show(index)

    def take_waiting(self) -> set[int]:
        """End `show_waiting`: drop the sums of the parameters that were cleared meanwhile, and return these."""
        cleared = self.shown.take()
        self.used.remove(cleared)
        self._written_before -= cleared
        for index in cleared:
            for sums in self.waiting.values():
                self.bucket.stored.part(sums.memory, index).zero_()
        return cleared

    def _trainable(self) -> Sequence[int]:
        """The parameters to whose `.grad` sums are added.

        One that was frozen after an earlier micro-batch keeps that one's gradient, as in torch.
        """
        trains = list(map(_requires_grad, self.bucket.sharded))
        if all(trains) or not any(trains):  # most often; without calls
            return self._all
        return [index for index, each in enumerate(trains) if each or index in self.used]

    def discard(self) -> None:
        """Drop the gradients of a failed backward, and the partial sums that may include some of them."""
        for buffer in filter(None, (self.full, *self.waiting.values())):
            buffer.free()
        self.full = None
        self.waiting.clear()
        self._written.clear()
        self._written_before.clear()
        self.leaving.clear()
        self.used.forget()
        self.shown.take()

    def accumulate(self, shard: Tensor) -> None:
        """Divide a finished sum over all ranks, (C,), and add it to `.grad` of the sharded parameters."""
        _, divide_by = self.bucket.divisors()
        if divide_by != 1:
            shard.div_(divide_by)
        if self.bucket.reduced_hook is not None:
            self.bucket.reduced_hook(shard)
        if shard.dtype != self.bucket.dtype:
            shard = shard.to(self.bucket.dtype)
        if not self.bucket.stored.is_offloaded or shard.device.type == "cpu":
            self._add_to_grad(shard)
            return
        self.leaving.append(self.bucket.stored.host_copy(shard, non_blocking=True))

    def land(self) -> None:
        """Add what has arrived in host memory to `.grad`. The host has waited for it."""
        leaving, self.leaving = self.leaving, []
        for on_host in leaving:
            self._add_to_grad(on_host)

    def _add_to_grad(self, shard: Tensor) -> None:
        sharded, stored, trainable = self.bucket.sharded, self.bucket.stored, self._trainable()
        base = getattr(sharded[trainable[0]].grad, "base", None)
        if base is not None and all(getattr(sharded[index].grad, "base", None) is base for index in trainable):
            base.add_(shard)  # one operation for all gradients
            return
        self.bucket.ledger.hold_until_freed(shard, on_host=stored.is_offloaded)
        parts, new = stored.geometry.slices[shard.numel()], []
        device = shard.device if shard.device != stored.shard.device else sharded[trainable[0]].device
        for index in trainable:
            parameter, local = sharded[index], shard[parts[index]]
            present = parameter.grad
            if present is None or isinstance(present, WaitingGradient):
                new.append(index)
            if present is None:
                spec = parameter.spec  # type: ignore[attr-defined]
                gradient: Any = RaggedTensor.__new__(RaggedTensor, local, spec, device=device)  # without its `__init__`
                gradient.base = shard  # so `shard` lives, and is counted, until the last of its gradients goes
                parameter.grad = gradient
            else:
                present.to_local().add_(local)  # type: ignore[attr-defined]
        self.used.note_new_gradients(new)


class Reduction:
    """The reduction of one bucket's gradients: a walk along `REDUCTION` to the spread at which sums rest now."""

    def __init__(self, gradients: BucketGradients, full: Buffer | None, walk: Walk) -> None:
        """Reduce `full`, (L * N * C,); with None, only the sums that wait."""
        self.gradients = gradients
        self._legs, self.goal = walk
        self.level: Level | None = None
        """The level whose sum is under way; the node's, too, while sums wait for a later backward. None at the end."""
        self.changed_grad = False
        """True once `.grad` has changed."""
        self.cleared: set[int] = set()
        """Parameters whose gradients were cleared after the backward that this sum is of."""
        self._keeps_sum = True
        self._full = full
        self._summed: Event = None
        """The lane's event after the first sum whose result is no longer the bucket itself: compute may free that."""
        self.ended: Event = None
        """The lane's event after all sums: compute may use `.grad`."""
        self._sums = self._walk()

    def advance(self) -> None:
        """Finish the sum that is under way, if one is, and begin the next one. Compute waits for none that begins."""
        lane = self.gradients.lanes.reduce
        if not lane.has_stream:
            self.level = next(self._sums, None)
            if self.level != "local" and self._full is not None:
                self._free_after(None)
            return
        self.level = lane.run_job(next, self._sums, None)
        if self.level is None:
            self.ended = lane.record_event()
            self._free_after(self._summed or self.ended)

    def free_bucket(self) -> None:
        """Free the bucket, as soon as compute has waited for the sum that reads it. Before that begins, do nothing."""
        if self._summed is not None:
            self._free_after(self._summed)

    def _free_after(self, event: Event) -> None:
        """Let compute wait for the lane before the bucket's memory goes, which older sums that waited may have, too.

        See [Note: Who may free a transfer buffer] in shard/lanes.py.
        """
        if event is not None and (self._full is not None or event is self.ended):
            wait_for(event)
        if self._full is not None:
            self._full.free()
            self._full = None

    def abandon(self) -> None:
        """Finish the transfers, and drop the sum."""
        self._keeps_sum = False
        while self.level is not None:
            self.advance()

    def _walk(self) -> Iterator[Level]:
        """Sum leg by leg, and yield the level meanwhile. The result goes to `.grad`, or waits for a later backward."""
        gradients, bucket, lane = self.gradients, self.gradients.bucket, self.gradients.lanes.reduce
        observer, cluster = gradients.observer, bucket.cluster
        sums, part = self._full, None
        if sums is not None and bucket.reduce_dtype is torch.float16:
            sums.memory.div_(bucket.divisors()[0])
        for leg in self._legs:
            level, way = leg.level, gradients.ways[leg.level]
            if leg.source is not AS_THEY_COME:
                sums, part = self._with_waiting(leg.source, part), None
                if level == "node" and lane.has_stream and cluster.num_local > 1:
                    self._summed = lane.record_event()
            if sums is None:  # there are none, or they wait
                if level != "island":
                    yield level
                if leg.source is self.goal:
                    return
            elif leg.transfer == "all-reduce":
                part = sums.memory
                sums.free()
                for _ in way.sum_in_place(part):
                    yield level
                if observer.inspects:
                    observer.replicas_summed(bucket, part)
            else:
                transfer = way.start_reduce_scatter(sums.memory, numels=bucket.geometry.numels_on[level])
                taken = Counted(transfer.nbytes, bucket.ledger)
                if observer.inspects and len(sums.memory):
                    observer.sum_begun(bucket, level, transfer)
                yield level
                if observer.inspects:
                    observer.sum_arrived(bucket, level, transfer)
                part = transfer.finish()
                taken.free()
                if level == "node":
                    if self._summed is None and lane.has_stream and cluster.num_nodes > 1:
                        self._summed = lane.record_event()
                    if self.cleared:
                        self._drop_cleared(part)
                    sums.free()
                del transfer
        if part is not None and self._keeps_sum:
            if self.cleared:
                self._drop_cleared(part)
            gradients.accumulate(part)
            self.changed_grad = True

    def _with_waiting(self, spread: Spread, fresh: Tensor | None) -> Buffer | None:
        """Add the sums that wait at `spread` to fresh ones. Returns the total, or None if it waits there, too."""
        gradients, bucket = self.gradients, self.gradients.bucket
        total = gradients.waiting.pop(spread, None)
        if total is not None and fresh is not None:
            total.memory.add_(fresh)
        elif fresh is not None:
            total = Buffer(fresh, bucket.ledger)
        if total is None:
            return None
        total = gradients.in_dtype(total, bucket.waiting_dtype if spread is self.goal else bucket.reduce_dtype)
        if spread is not self.goal:
            return total
        gradients.waiting[spread] = total
        return None

    def _drop_cleared(self, shard: Tensor) -> None:
        for index in self.cleared:
            self.gradients.bucket.stored.part(shard, index).zero_()


class ReductionQueue:
    """The reductions in flight, oldest first: at most one on each level.

    So the wire is never idle between two buckets, and the next bucket's gradients are all that takes memory meanwhile.
    All ranks issue them at the same points: [Note: The same order on every rank] in shard/gather.py.
    """

    def __init__(self) -> None:
        self._in_flight: list[Reduction] = []
        self._ended: Event = None
        """The lane's event after the sums that have ended; compute has not waited for it."""
        self._reduced: list[BucketGradients] = []  # whose use the ranks have yet to agree on

    def has(self, gradients: BucketGradients) -> bool:
        """True if a reduction of these gradients is under way."""
        return any(each.gradients is gradients for each in self._in_flight)

    def drop(self, gradients: BucketGradients, cleared: set[int]) -> None:
        """Drop the sums of some parameters that are under way."""
        for each in self._in_flight:
            if each.gradients is gradients:
                each.cleared |= cleared

    def is_crossing_nodes(self, gradients: BucketGradients) -> bool:
        """True if a reduction of these gradients is on its way across nodes."""
        return any(each.gradients is gradients and each.level == "node" for each in self._in_flight)

    def settle(self, gradients: BucketGradients) -> None:
        """Finish the reductions of these gradients, of earlier backwards, whose sums are to wait: they go on now."""
        while any(each.gradients is gradients and each.goal is NODE_SUMS for each in self._in_flight):
            self._advance()

    def add(self, reduction: Reduction) -> None:
        """Begin a reduction, move those in flight one level on, finish its sum inside the node, and send that on.

        On a stream those in flight come first: who waits for an older one must not wait for this one. Without streams
        the host waits for the older ones, and the new sum runs meanwhile.
        """
        has_stream = reduction.gradients.lanes.reduce.has_stream
        if not has_stream:
            reduction.advance()
        self._advance()
        if has_stream:
            reduction.advance()
        reduction.advance()
        self._in_flight.append(reduction)

    def finish(self, reads: HostReads) -> None:
        """Finish the reductions in flight, and agree on the parameters that got a gradient.

        If the host waits for gradients, it waits for the reads of weights as well.
        """
        ending = [
            each.gradients for each in self._in_flight if each.goal is SHARD and not each.gradients.used.has_hooks
        ]
        reduced = list(dict.fromkeys([*self._reduced, *ending]))
        agreement = Agreement([gradients.used for gradients in reduced])
        while self._in_flight:
            self._advance()
        self.wait_for_ended()
        _land(reduced, reads)
        for gradients in reduced[:1]:
            agreement.conclude(gradients.lanes.reduce)
        self._reduced.clear()

    def abandon(self) -> None:
        """Finish the reductions in flight, and drop their sums."""
        for reduction in self._in_flight:
            reduction.abandon()
            self._ended = reduction.ended or self._ended
        self._in_flight.clear()
        self._reduced.clear()
        self.wait_for_ended()

    def free_buckets(self) -> None:
        """Free the buckets whose sums inside the node have begun, as soon as compute has waited for them."""
        for reduction in self._in_flight:
            reduction.free_bucket()

    def wait_for_ended(self) -> None:
        """Let compute wait for the reductions that have ended. Until then it may not use their `.grad`."""
        wait_for(self._ended)
        self._ended = None

    def _advance(self) -> None:
        """Move each reduction one level on, the youngest first: its next sum then runs beside the older one's end."""
        for reduction in self._in_flight[::-1]:
            reduction.advance()
            self._ended = reduction.ended or self._ended
            if reduction.changed_grad:
                self._note_use(reduction.gradients)
            if reduction.level is None:
                self._in_flight.remove(reduction)

    def _note_use(self, gradients: BucketGradients) -> None:
        """Agree on the used parameters now, or at the end of the backward."""
        if gradients.used.has_hooks:
            self.wait_for_ended()
            _land([gradients])
            Agreement([gradients.used]).conclude(gradients.lanes.reduce)
        elif gradients not in self._reduced:
            self._reduced.append(gradients)


def _land(reduced: Sequence[BucketGradients], reads: HostReads | None = None) -> None:
    """Put gradients into `.grad`. If some leave the device, the host waits once, for them and for `reads`."""
    leaving = [gradients for gradients in reduced if gradients.leaving]
    if not leaving:
        return
    lane = reduced[0].lanes.reduce
    with lane.going_on(reads.last() if reads is not None else None):
        written = lane.record_event()
    assert written is not None, "they leave a device"
    written.synchronize()
    if reads is not None:
        reads.let_edit()
    for gradients in leaving:
        gradients.land()
