"""FSDP2 whose collectives go on two levels, between nodes and inside each, through its public interface.

[Note: FSDP2 on two levels]
FSDP2 gathers and reduces along one flat group. A ring of R ranks on N nodes brings (R - 1) / R of a buffer over the
wire of each node. On two levels it is (N - 1) / N: first ranks with the same place in all nodes gather, and then those
of each node, so that a slice enters a machine once. A reduce-scatter goes the other way, inside the nodes first. On 2
nodes of 2 ranks that is 2 / 3 of the bytes. torchcomms builds such gathers below FSDP2 (its pull request 4192); a user
of today makes them of two groups, `set_custom_all_gather` and `set_custom_reduce_scatter`.

After the first gather the slices of one place lie side by side. So rank (n, l) owns slice l * N + n, as in
[Note: A bucket's order], and FSDP2 gets a group of all ranks in this order, for which it asks no more than a place.
Then both gathers land where it looks for them, and both reductions read what lies together: nobody copies.

On an accelerator both collectives are on FSDP2's stream for them. On CPU a thread gathers ahead, as Gloo does by itself
on one level, and the rings of [Note: The strongest baseline] reduce.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic import _compat
from laconic.comm.cluster import make_mesh
from laconic.comm.groups import new_group
from laconic.hf.layers import layers_to_shard
from laconic.strategies import parallelize
from laconic.strategies.ring import Allocator, Reductions, RingBehindBackward, RingReduceScatter
from laconic.strategies.stepper import Setup


class TwoLevelGather(Allocator):
    """An all-gather on two levels, for FSDP2's `set_custom_all_gather`."""

    def __init__(self, across: dist.ProcessGroup, inside: dist.ProcessGroup) -> None:
        """Take the ranks with this rank's place in all nodes, and those of its node."""
        self._across, self._inside = across, inside

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` with the `input_tensor` of every rank, in the order of slices.

        Shapes: N nodes of L ranks; input (C,) -> output (L * N * C,).
        Cost: (N - 1) * C elements leave this rank over the wire, and (L - 1) * N * C inside the node. No memory.
        """
        of_place = output_tensor.view(self._inside.size(), -1)[self._inside.rank()]
        _compat.all_gather_flat(of_place, input_tensor, group=self._across, async_op=False)
        _compat.all_gather_flat(output_tensor, of_place, group=self._inside, async_op=False)
        return None


class TwoLevelGatherAhead(TwoLevelGather):
    """The same in a thread, on CPU; FSDP2 waits for it at the first use."""

    def __init__(self, across: dist.ProcessGroup, inside: dist.ProcessGroup) -> None:
        """See `TwoLevelGather`."""
        super().__init__(across, inside)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-gather")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """See `TwoLevelGather`."""
        return _Job(self._thread.submit(super().__call__, output_tensor, input_tensor, group))


class _Job(dist.Work):
    """The work of a thread."""

    def __init__(self, job: Future[Any]) -> None:
        super().__init__()
        self._job = job

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for its end."""
        self._job.result()
        return True


class TwoLevelReduceScatter(Allocator):
    """A reduce-scatter on two levels, for FSDP2's `set_custom_reduce_scatter`."""

    def __init__(self, across: dist.ProcessGroup, inside: dist.ProcessGroup) -> None:
        """See `TwoLevelGather`."""
        self._across, self._inside = across, inside

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum `input_tensor` over the ranks, or average it, and leave this rank's slice in `output_tensor`.

        Shapes: N nodes of L ranks; input (L * N * C,), in the order of slices -> output (C,).
        Cost: (L - 1) * N * C elements leave this rank inside the node, and (N - 1) * C over the wire; N * C of memory.
        """
        of_place = torch.empty_like(input_tensor.view(self._inside.size(), -1)[0])
        _reduce_scatter(of_place, input_tensor, self._inside, op)
        _reduce_scatter(output_tensor, of_place, self._across, op)


def _reduce_scatter(output: Tensor, given: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    if given.device.type == "cpu":
        RingReduceScatter()(output, given, group, op)
        return
    work = _compat.bound_reduce_scatter(group, async_op=False, op=op)(output, given)
    if work is not None:  # else the stream orders it
        work.wait()


def use_two_levels(units: Sequence[Any], across: dist.ProcessGroup, inside: dist.ProcessGroup) -> None:
    """Give FSDP2 modules, sharded in the order of slices, the collectives of [Note: FSDP2 on two levels]."""
    gather: TwoLevelGather = TwoLevelGather(across, inside)
    reduce_scatter: Any = TwoLevelReduceScatter(across, inside)
    reductions = None
    if next(units[0].parameters()).device_mesh.device_type == "cpu":
        gather, reductions = TwoLevelGatherAhead(across, inside), Reductions(reduce_scatter)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce_scatter if reductions is None else RingBehindBackward(unit, reductions))


def mesh_of_slices(device_type: str, nodes: int, local: int) -> DeviceMesh:
    """A mesh of one axis with all ranks in the order of slices. Collective."""
    ranks = torch.arange(nodes * local).view(nodes, local).T.flatten().tolist()
    return DeviceMesh.from_group(new_group(ranks, None, sorts=False), device_type, mesh_dim_names=("shard",))


def fsdp2_two_level(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """FSDP2 of [Note: FSDP2 on two levels]: see `parallelize`. On one node it is FSDP2."""
    nodes, local, device_type = setup.ranks.num_nodes, setup.ranks.num_local, setup.device.type
    if nodes == 1:
        return parallelize.fsdp2(model, setup)
    levels = make_mesh(device_type, (nodes, local), ("node", "local"))
    parallelize.shard_by_fsdp2(model, setup, mesh_of_slices(device_type, nodes, local))
    use_two_levels([model, *layers_to_shard(model)], levels["node"].get_group(), levels["local"].get_group())
    return model, None
