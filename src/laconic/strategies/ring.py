"""FSDP2 on Gloo with the collectives that NCCL gives it: a true ring reduce-scatter, and gathers ahead of their use.

[Note: The strongest baseline]
Gloo runs a reduce-scatter as an all-reduce, which moves twice the bytes. And FSDP2 waits for each gather on CPU, where
it has no streams to run them on. Neither belongs to FSDP2: on NCCL it has both a ring and overlap. So the baselines
here get them through FSDP2's public interface, `set_custom_reduce_scatter`, `set_custom_all_gather` and
`set_modules_to_forward_prefetch`. Gloo's all-gather is a ring already, so only its wait moves to the first use.

A ring in rank order is also the flat collective that crosses the wire least. One rank of a node sends to another node,
so (R - 1) / R of the buffer leaves each node, however many of the R ranks are on it. If every rank sent to every other
at once, as comm/collectives.py does on one level, L ranks of a node would send to L ranks of every other: on 2 nodes of
2 ranks a third more. On nodes of one rank both move the same bytes, and the ring was as fast or faster.

FSDP2 needs the result of a reduction when the call returns, so reductions do not overlap with compute. A gather that
runs ahead fills the wire meanwhile.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat

_SEGMENTS = 4
"""The messages per part: one is on its way while another is added. Measured: 1 leaves gaps, more cost time each."""


class _Allocator:
    """The part of FSDP2's interface that makes buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make an uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class RingReduceScatter(_Allocator):
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


def _segments(part: Tensor) -> tuple[Tensor, ...]:
    """Cut a part into messages, none of them empty."""
    return part.tensor_split(min(_SEGMENTS, max(1, part.numel())))


class AllGatherAhead(_Allocator):
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


def use_rings(units: Sequence[Any]) -> None:
    """Give FSDP2 modules on CPU the collectives of [Note: The strongest baseline].

    `units` are all modules that were given to FSDP2's `fully_shard`, in the order in which their forwards begin.
    """
    for unit in units:
        unit.set_custom_reduce_scatter(RingReduceScatter())
        unit.set_custom_all_gather(AllGatherAhead())
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
