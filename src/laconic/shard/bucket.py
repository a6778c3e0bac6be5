"""One flat buffer of a unit: shard, slice, full, and the parameters that are views of them.

[Note: A bucket's order]
A bucket of N x L shards is owned so that rank (n, l) has shard l * N + n. Then the gather across the nodes, over ranks
(0, l) ... (N - 1, l), yields shards l * N ... l * N + N - 1, which is slice l, contiguous; and the gather inside a
node, over slices 0 ... L - 1, yields the bucket in order. Both land in place, so parameters are permanent views and
nothing is copied in or out. Reduction mirrors it: inside the node first, which leaves slice l summed over the node,
then across the nodes, which leaves the shard. (Owning shard n * L + l, as MiCS does, needs a
strided copy between the levels.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from laconic.comm.cluster import Cluster
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import plan_bucket
from laconic.ragged.dtensor import OuterShard, local_part
from laconic.ragged.tensor import RaggedSpec, RaggedTensor
from laconic.shard.cache import RestingSlice
from laconic.shard.ledger import AliasBuffer, FlatBuffer, Ledger
from laconic.shard.linear import GradientSink, mark, write_gradient_in_place


@dataclass(frozen=True, kw_only=True)
class Managed:
    """A parameter of a unit before it is sharded, and every place in the module tree that shows it (tied weights)."""

    name: str
    """Fully qualified within the unit: its first place."""
    parameter: nn.Parameter
    block: int
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank holds of it before: [Note: Two parallelisms, two meshes] in ragged/dtensor.py."""
        return tuple(local_part(self.parameter).shape)


class Bucket:
    """Parameters of one unit that share dtype and trainability."""

    def __init__(
        self,
        managed: list[Managed],
        *,
        cluster: Cluster,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        dtype = managed[0].parameter.dtype
        self.cluster = cluster
        self.dtype = dtype
        self.compute_dtype = compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype
        self.reduce_dtype = reduce_dtype or self.compute_dtype
        smallest = min(dtype.itemsize, self.compute_dtype.itemsize, self.reduce_dtype.itemsize)
        self.layout: BucketLayout = plan_bucket(
            [item.name for item in managed],
            [item.shape for item in managed],
            [item.block for item in managed],
            num_shards=cluster.size,
            itemsize=smallest,
        )
        self.divide_by: float = cluster.size
        """What summed gradients are divided by."""
        self.ledger: Ledger | None = None
        self.resting: RestingSlice | None = None
        self._places = [item.places for item in managed]
        self._outer = [OuterShard.of(item.parameter, item.name, cluster) for item in managed]
        self._full: FlatBuffer | AliasBuffer | None = None
        self._gathered: list[nn.Parameter] = []
        self._full_version = 0
        self._sink: GradientSink | None = None
        self._epoch = 0
        self.is_shard_dropped = False
        self.shard = self._cut([local_part(item.parameter) for item in managed])
        self._device = self.shard.device
        self.sharded = [
            nn.Parameter(self._ragged(index), requires_grad=item.parameter.requires_grad)
            for index, item in enumerate(managed)
        ]
        self.show(self.sharded)

    def __deepcopy__(self, memo: dict[int, object]) -> Bucket:
        return (
            self  # copies of its tensors still belong to it: asynchronous checkpoints copy them with their attributes
        )

    # -- the shard, and the sharded parameters that are views of it ----------------------------------------------------

    def _cut(self, parameters: list[Tensor]) -> Tensor:
        """This rank's shard of the given whole parameters."""
        shard = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=parameters[0].device)
        if not shard.is_meta:
            for index, parameter in enumerate(parameters):
                extent = self.layout.extent(index, self.cluster.shard_index)
                if extent is not None:
                    begin = self.layout.offset_in_shard(index, self.cluster.shard_index)
                    part = parameter.reshape(-1)[extent.start : extent.stop]
                    shard[begin : begin + extent.numel].copy_(part)
        return shard

    def local_view(self, shard: Tensor, index: int) -> Tensor:
        """Tensor `index`'s part of `shard`, flat, possibly empty."""
        extent = self.layout.extent(index, self.cluster.shard_index)
        begin = self.layout.offset_in_shard(index, self.cluster.shard_index)
        return shard[begin : begin + (extent.numel if extent else 0)]

    def _ragged(self, index: int) -> RaggedTensor:
        spec = RaggedSpec(cluster=self.cluster, layout=self.layout, index=index, outer=self._outer[index])
        return RaggedTensor(self.local_view(self.shard, index), spec, device=self._device, bump=self._bump)

    def _bump(self) -> None:
        torch.autograd.graph.increment_version(self.shard)

    @property
    def version(self) -> int:
        """Counts every change of the parameters: [Note: Versions] in ragged/tensor.py."""
        return self._epoch + self.shard._version

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function`, such as a move from the meta device, to the shard; parameters keep their identity.

        Raises:
            ValueError: `function` changes the dtype, which buffers and plans were made for.
        """
        self.restore_shard()
        shard = function(self.shard)
        if shard is self.shard:
            return
        if shard.dtype != self.dtype:
            raise ValueError(
                f"cannot change sharded parameters from {self.dtype} to {shard.dtype}: call .to(dtype) before "
                "fully_shard, or compute in another dtype with MixedPrecisionPolicy(param_dtype=...)"
            )
        self.free_full()
        self._full = None
        self._device = shard.device
        self._move_shard(shard.detach(), self.version + 1)

    def account(self, ledger: Ledger) -> None:
        """Keep `ledger` from now on."""
        self.ledger = ledger
        ledger.hold(self.shard.nbytes)

    def close_account(self) -> None:
        """Forget the ledger, and all memory but the shard."""
        self.free_full()
        self.restore_shard()
        self._full = self.resting = self.ledger = None

    def _move_shard(self, shard: Tensor, version: int) -> None:
        self.shard = shard
        self._epoch = version - shard._version
        for index, old in enumerate(self.sharded):
            new = nn.Parameter(self._ragged(index), requires_grad=old.requires_grad)
            if old.device == new.device:
                old._local = new._local  # type: ignore[attr-defined]
            else:
                torch.utils.swap_tensors(old, new)

    # -- trainability --------------------------------------------------------------------------------------------------

    def part_of_gradient(self, index: int, gradient: Tensor) -> Tensor:
        """What this rank holds of a gathered parameter's gradient, in the slot's shape."""
        outer = self._outer[index]
        return gradient if outer is None else outer.part_of_gradient(gradient)

    @property
    def is_frozen(self) -> bool:
        """True if no parameter of the bucket wants a gradient now."""
        return not any(parameter.requires_grad for parameter in self.sharded)

    def drop_shard(self) -> bool:
        """Let a frozen shard live inside the resting slice, which contains it, and give its own memory back.

        Only without mixed precision: a slice in the compute dtype could not give the parameter's own bits back.
        """
        if self.resting is None or self.compute_dtype != self.dtype or self.is_shard_dropped:
            return False
        assert self.ledger is not None
        self.ledger.hold(-self.shard.nbytes)
        # `.data`: an alias with a version counter of its own, as gathers into the slice are no edits.
        self._move_shard(self.own_part(self.resting.buffer()).data, self.version)
        self.is_shard_dropped = True
        return True

    def restore_shard(self) -> None:
        """Give the shard memory of its own again: its parameters train from now on."""
        if self.is_shard_dropped:
            assert self.ledger is not None
            self._move_shard(self.shard.to(self._device, copy=True), self.version)
            self.ledger.hold(self.shard.nbytes)
            self.is_shard_dropped = False

    def own_part(self, slice_: Tensor) -> Tensor:
        """This rank's shard within its slice: [Note: A bucket's order]."""
        size = self.layout.shard_numel
        return slice_[self.cluster.node_rank * size : (self.cluster.node_rank + 1) * size]

    # -- full, and the gathered parameters that are views of it --------------------------------------------------------

    @property
    def slice_numel(self) -> int:
        """Elements of a slice: N shards."""
        return self.layout.shard_numel * self.cluster.num_nodes

    def allocate_full(self) -> Tensor:
        """Memory for the whole bucket, (L * N * C,), in the compute dtype."""
        if self._full is None:
            assert self.ledger is not None
            if self.cluster.size == 1 and self.compute_dtype == self.dtype:
                self._full = AliasBuffer(self.shard)  # the shard is the bucket: nothing to gather, nothing to free
            else:
                self._full = FlatBuffer(self.layout.numel, self.compute_dtype, self._device, self.ledger)
            with torch.inference_mode(False), torch.enable_grad():
                self._gathered = [self._gathered_parameter(index) for index in range(len(self.sharded))]
        return self._full.allocate()

    def slice_of_full(self) -> Tensor:
        """This rank's slice within the full buffer."""
        begin = self.cluster.local_rank * self.slice_numel
        return self.allocate_full()[begin : begin + self.slice_numel]

    def free_full(self) -> None:
        """Give the full buffer's memory back."""
        if self._full is not None:
            self._full.free()

    def _gathered_parameter(self, index: int) -> nn.Parameter:
        assert self._full is not None
        slot = self.layout.slots[index]
        view = self._full.tensor[slot.offset : slot.offset + slot.numel].view(slot.shape)
        outer = self._outer[index]
        if outer is not None:
            view = outer.wrap(view)
        if not view.is_floating_point():  # a quantised table, say: it can never train
            return nn.Parameter(view, requires_grad=False)
        parameter = nn.Parameter(view)
        if self._sink is not None:
            if outer is None:
                mark(parameter, self._sink, index)
            parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(self._sink), index))
        parameter.requires_grad_(self.sharded[index].requires_grad)
        return parameter

    def send_gradients_to(self, sink: GradientSink) -> None:
        """Let `sink` have the gradients of the gathered parameters."""
        self._sink = sink
        for places in self._places:
            for module, name in places:
                if name == "weight":
                    write_gradient_in_place(module)

    def show_gathered(self) -> None:
        """Let the modules see the gathered parameters.

        Raises:
            RuntimeError: somebody replaced a sharded parameter in a module, and would lose it now.
        """
        assert self._full is not None
        for places, sharded, gathered, slot in zip(
            self._places, self.sharded, self._gathered, self.layout.slots, strict=True
        ):
            if gathered.requires_grad != sharded.requires_grad:
                gathered.requires_grad_(sharded.requires_grad)
            for module, name in places:
                if module._parameters.get(name) is not sharded:
                    raise RuntimeError(
                        f"parameter {slot.name} is no longer the one fully_shard made: it was replaced, for instance "
                        "by load_state_dict(assign=True). Copy into it instead (load_state_dict without assign, or "
                        "param.copy_(value) under torch.no_grad())"
                    )
        self.show(self._gathered)
        self._full_version = self._full.tensor._version

    def show_sharded(self) -> None:
        """Let the modules see the sharded parameters again.

        Raises:
            RuntimeError: a gathered parameter was edited in place; the edit would be lost.
        """
        self.show(self.sharded)
        if self._full is not None and self._full.tensor._version != self._full_version:
            self._full_version = self._full.tensor._version
            names = ", ".join(slot.name for slot in self.layout.slots)
            raise RuntimeError(
                f"one of the gathered parameters {names} was edited in place, which does not change the parameter that "
                "is trained. Edit the sharded parameter under torch.no_grad() while the module is resharded"
            )

    def show(self, parameters: list[nn.Parameter]) -> None:
        """Put `parameters` in the modules' places."""
        for places, parameter in zip(self._places, parameters, strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    def hide(self) -> None:
        """Take the parameters out of the module tree, for the time of an `nn.Module._apply` that must not see them."""
        for places in self._places:
            for module, name in places:
                module._parameters[name] = None


def _collect(sink: weakref.ref[GradientSink], index: int, parameter: nn.Parameter) -> None:
    """The hook of a gathered parameter. Weak, as Python's collector cannot see through a post-accumulate hook, and the
    model would be part of a cycle that nobody can free."""
    alive = sink()
    assert alive is not None, "a gradient came for a model that is gone"
    alive.collect(index, parameter)
