"""FSDP2 on Gloo with the collectives that NCCL gives it: a true ring reduce-scatter, and overlap with compute.

[Note: The strongest baseline]
Gloo runs a reduce-scatter as an all-reduce, which moves twice the bytes. And on CPU, where FSDP2 has no streams, it
waits for each gather and each reduction. Neither belongs to FSDP2: on NCCL it has both a ring and overlap. So the
baselines here get them through FSDP2's public interface: `set_custom_reduce_scatter`, `set_custom_all_gather`,
`set_modules_to_forward_prefetch` and, for the replicas of HSDP, `set_all_reduce_hook`. Gloo's all-gather is a ring
already, so only its wait moves to the first use.

A ring in rank order is also the flat collective that crosses the wire least. One rank of a node sends to another node,
so (R - 1) / R of the buffer leaves each node, however many of the R ranks are on it. If every rank sent to every other
at once, as comm/collectives.py does on one level, L ranks of a node would send to L ranks of every other: on 2 nodes of
2 ranks a third more. On nodes of one rank both move the same bytes, and the ring was as fast or faster.

[Note: Reductions behind backward]
FSDP2 gives each reduction an output. The gradients of the unit become views of that output. On NCCL all of that is in
the order of a stream, and the optimizer waits for the stream. Here a thread fills the output while backward goes on.
Nobody sees its contents before `backward` returns, since a callback of autograd waits for the thread. One ring is
under way at a time, as on NCCL: the next unit's gradients are copied together when the ring before them has ended.
HSDP's all-reduce follows in the order of the same thread, but in Gloo's own: it works in place, so it holds no other
memory, and the next ring need not wait for it.

That is right only if FSDP2 itself does not read the output at once. It does where it casts (gradients are reduced in
another dtype than the parameters'), where it adds (a parameter has a gradient already, from a micro-batch before), and
where it divides (float16, for which it asks for sums in place of means) or calls a hook of the parameter. Then the host
waits for the thread, and nothing overlaps. FSDP2 takes these turns by what anybody can see of its parameters, and so
does `_reads_at_once`. All other cases have the same bits with and without the wait: the operations and their order are
the same.

FSDP2's own all-reduce over replicas would read the output at once, too. So HSDP's parameters are given to FSDP2 on the
mesh of their shards alone, and the hook sums over replicas: FSDP2's way for a hybrid of one's own. Its own is left in
place in float16, where it divides by the number of all ranks in two parts, and where micro-batches before the last
reduce inside the node alone, whose sums FSDP2 keeps for the last.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from laconic import _compat

_SEGMENTS = 4
"""The messages per part: one is on its way while another is added. Measured: 1 leaves gaps, more cost time each."""


class Allocator:
    """The part of FSDP2's interface that makes buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make an uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class RingReduceScatter(Allocator):
    """A reduce-scatter along a ring of the group's ranks, for FSDP2's `set_custom_reduce_scatter`; CPU tensors only."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor` over the ranks, or average it, and leave this rank's part in `output_tensor`.

        Shapes: R ranks; input (R * C,), flat and contiguous -> output (C,).
        Cost: (R - 1) * C * itemsize bytes out of and into this rank, and no memory: messages land in `output_tensor`,
            and partial sums overwrite `input_tensor`, which FSDP2 drops afterwards.
        The order of each sum is fixed, so equal inputs give equal bits. Part r begins on rank r + 1 and ends on rank r.

        Raises:
            ValueError: another operation than the sum and the mean.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"the ring reduces by SUM or AVG, got {op}; use torch's own reduce-scatter")
        size, rank = group.size(), group.rank()
        landings = _segments(output_tensor)
        parts = [_segments(part) for part in input_tensor.view(size, -1)]
        before, after = (rank - 1) % size, (rank + 1) % size
        receives = [dist.irecv(landing, group=group, group_src=before) for landing in landings]
        sends = [dist.isend(segment, group=group, group_dst=after) for segment in parts[before]]
        for step in range(2, size + 1):
            own, is_last = parts[(rank - step) % size], step == size
            for index, landing in enumerate(landings):
                receives[index].wait()  # type: ignore[union-attr]
                if is_last:
                    landing.add_(own[index])
                    continue
                own[index].add_(landing)
                receives[index] = dist.irecv(landing, group=group, group_src=before)
                sends.append(dist.isend(own[index], group=group, group_dst=after))
        for send in sends:
            send.wait()  # type: ignore[union-attr]
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(size)


def pass_around(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Bring part r, which rank r has, to `parts[r]` of all ranks, along a ring. Parts may differ in size.

    Cost: this rank sends all parts but that of the rank after it, and receives all but its own. No memory.
    """
    size, rank = group.size(), group.rank()
    before, after = (rank - 1) % size, (rank + 1) % size
    rest = [piece for step in range(1, size) for piece in _segments(parts[(rank - step) % size])]
    passed_on = len(rest) - len(_segments(parts[after])) if size > 1 else 0
    receives = [dist.irecv(piece, group=group, group_src=before) for piece in rest]
    sends = [dist.isend(piece, group=group, group_dst=after) for piece in _segments(parts[rank]) if size > 1]
    for index, receive in enumerate(receives):
        receive.wait()  # type: ignore[union-attr]
        if index < passed_on:
            sends.append(dist.isend(rest[index], group=group, group_dst=after))
    for send in sends:
        send.wait()  # type: ignore[union-attr]


def _segments(part: Tensor) -> tuple[Tensor, ...]:
    """Cut a part into messages, none of them empty."""
    return part.tensor_split(min(_SEGMENTS, max(1, part.numel())))


class Reductions:
    """The reductions of a model that run behind its backward: [Note: Reductions behind backward]."""

    def __init__(self, reduce_scatter: Callable[..., None] | None = None) -> None:
        """Reduce along a ring of all ranks, or else with `reduce_scatter`, for which the names say "ring", too."""
        self._reduce_scatter = reduce_scatter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-ring")
        self._jobs: list[Future[dist.Work | None]] = []
        self._ring: Future[dist.Work | None] | None = None

    def start_ring(self, *arguments: Any) -> None:
        """Start the reduce-scatter with these arguments. Only in a backward."""
        self._ring = self._start(self._reduce_scatter or RingReduceScatter(), *arguments)

    def start_mean(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Average a tensor over a group in place, after the rings that have been started. Only in a backward."""
        self._start(_begin_mean, tensor, group)

    def wait_for_ring(self) -> None:
        """Wait for the last ring, but not for means."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.result()

    def finish(self) -> None:
        """Wait for all that has been started."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            work = job.result()
            if work is not None:
                work.wait()

    def _start(self, job: Callable[..., dist.Work | None], *arguments: Any) -> Future[dist.Work | None]:
        self._jobs.append(self._thread.submit(job, *arguments))
        _compat.after_this_backward(self.finish)
        return self._jobs[-1]


def _begin_mean(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group, async_op=True)


class RingBehindBackward(Allocator):
    """`RingReduceScatter` behind backward: [Note: Reductions behind backward]."""

    def __init__(self, unit: nn.Module, reductions: Reductions) -> None:
        self._unit, self._reductions = unit, reductions

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make an uninitialised tensor, when no other ring's are alive."""
        self._reductions.wait_for_ring()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """See `RingReduceScatter`. `output_tensor` has its values when backward returns, or at once if FSDP2 reads."""
        self._reductions.start_ring(output_tensor, input_tensor, group, op)
        if op != dist.ReduceOp.AVG or _reads_at_once(self._unit, output_tensor):
            self._reductions.wait_for_ring()


class MeanOverReplicas:
    """HSDP's all-reduce behind backward, for FSDP2's `set_all_reduce_hook`: [Note: Reductions behind backward]."""

    def __init__(self, unit: nn.Module, reductions: Reductions, group: dist.ProcessGroup) -> None:
        self._unit, self._reductions, self._group = unit, reductions, group

    def __call__(self, reduce_output: Tensor) -> None:
        """Average the output of a reduce-scatter over the replicas, in place."""
        self._reductions.start_mean(reduce_output, self._group)
        if _reads_at_once(self._unit, reduce_output):
            self._reductions.finish()


def _reads_at_once(unit: nn.Module, reduced: Tensor) -> bool:
    """Whether FSDP2 itself reads what it gets of a reduction of means: [Note: Reductions behind backward]."""
    return not all(
        isinstance(parameter, DTensor)  # else gathered weights stay, and gradients are not to be seen
        and parameter.device_mesh.ndim == 1  # else FSDP2's own sums over replicas follow
        and parameter.dtype == reduced.dtype
        and parameter.grad is None
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        for parameter in _own_parameters(unit)
        if parameter.requires_grad
    )


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are gathered together with `module`."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


class AllGatherAhead(Allocator):
    """Gloo's all-gather, which is a ring, without the wait; for FSDP2's `set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Begin to fill `output_tensor` with the `input_tensor` of every rank; FSDP2 waits for it at the first use.

        Shapes: R ranks; input (C,) -> output (R * C,).
        """
        work = _compat.all_gather_flat(output_tensor, input_tensor, group=group, async_op=True)
        assert work is not None
        return work


def use_rings(
    units: Sequence[Any], replicas: dist.ProcessGroup | None = None, *, is_behind_backward: bool = True
) -> None:
    """Give FSDP2 modules on CPU the collectives of [Note: The strongest baseline].

    `units` are all modules that were given to FSDP2's `fully_shard`, in the order in which their forwards begin. With
    `replicas`, the ranks that have the same shards, gradients are averaged over these, too: HSDP, for units that are
    sharded on a mesh of one axis, and not for gradients that are reduced in float16. A schedule of a pipeline reduces
    when its last backward has ended: then `is_behind_backward` is False.
    """
    reductions = Reductions()
    for unit in units:
        ring = RingBehindBackward(unit, reductions) if is_behind_backward else RingReduceScatter()
        unit.set_custom_reduce_scatter(ring)
        unit.set_custom_all_gather(AllGatherAhead())
        if replicas is not None:
            unit.set_all_reduce_hook(MeanOverReplicas(unit, reductions, replicas))
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
