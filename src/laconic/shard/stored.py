"""The weights of a bucket at rest: this rank's shard, and the sharded parameters, which are views of it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from laconic.layout.bucket import BucketLayout
from laconic.layout.geometry import Geometry
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.ledger import Ledger

_requires_grad = attrgetter("requires_grad")


class StoredWeights:
    """A bucket's weights at rest: this rank's shard, (C,), and the sharded parameters, which are views of it."""

    def __init__(
        self,
        whole: Sequence[Tensor],
        specs: Sequence[RaggedSpec],
        layout: BucketLayout,
        *,
        dtype: torch.dtype,
        trains: Sequence[bool],
        offload: OffloadPolicy,
    ) -> None:
        """Copy this rank's shard, of `dtype`, out of whole parameters. `trains` says which require gradients."""
        self.specs, self.layout, self.cluster, self._offload = specs, layout, specs[0].cluster, offload
        self.is_offloaded = isinstance(offload, CPUOffloadPolicy)
        """True if the shard and the gradients of the sharded parameters rest in host memory."""
        self.geometry = Geometry.of(layout, shard=self.cluster.shard_index, num_nodes=self.cluster.num_nodes)
        """Of the elements of the layout; `Form.geometry` is that of what a gather sends."""
        self.ledger = Ledger()
        self.epoch = 0
        self.is_dropped = False
        """True while the shard has no memory of its own: see `borrow`."""
        self.shard = self._at_rest(self._cut(whole, dtype))
        self._device = self.shard.device
        self.parameters = [nn.Parameter(self._ragged(index), requires_grad=each) for index, each in enumerate(trains)]

    def __deepcopy__(self, memo: dict[int, object]) -> StoredWeights:
        return self  # an asynchronous checkpoint copies tensors with their attributes; copies belong to this shard

    @property
    def version(self) -> int:
        """A number that every change of the parameters increases: [Note: Versions] in ragged/tensor.py."""
        return self.epoch + self.shard._version

    @property
    def is_frozen(self) -> bool:
        """True if no parameter requires a gradient now."""
        return not any(map(_requires_grad, self.parameters))

    def part(self, buffer: Tensor, index: int) -> Tensor:
        """The elements of parameter `index` in a buffer: flat, possibly empty, a view.

        Shapes: `buffer` is this rank's shard, (C,), its node shard, (N * C,), or the full buffer, (L * N * C,). With
            unequal shards these are the elements of one, of N and of all: [Note: Unequal shards] in layout/shares.py.
        """
        return buffer[self.geometry.slices[buffer.numel()][index]]

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """The elements of each parameter in a buffer: see `part`."""
        return [buffer[part] for part in self.geometry.slices[buffer.numel()]]

    def host_copy(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Copy a tensor to host memory, page-locked if the policy says so; one that is there already stays.

        With `non_blocking`, the copy is complete when the current stream has come so far.
        """
        pins = getattr(self._offload, "pin_memory", False) and self.cluster.device.type != "cpu"
        if tensor.device.type == "cpu" and (tensor.is_pinned() or not pins):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
        return copy.copy_(tensor, non_blocking=non_blocking)

    @torch.no_grad()  # the local part of a DTensor has a graph
    def _cut(self, whole: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        shard = torch.zeros(self.geometry.numel, dtype=dtype, device=whole[0].device)
        if not shard.is_meta:
            for spec, part, parameter in zip(self.specs, self.parts(shard), whole, strict=True):
                extent = spec.held
                part.copy_(parameter.reshape(-1)[extent.start : extent.stop])
        return shard

    def _at_rest(self, shard: Tensor) -> Tensor:
        """Move a shard to host memory if the policy says so."""
        return self.host_copy(shard) if self.is_offloaded and not shard.is_meta else shard

    def _ragged(self, index: int) -> RaggedTensor:
        view = self.part(self.shard, index)
        return RaggedTensor(view, self.specs[index], device=self._device, bump=self.note_change)

    def count(self) -> None:
        """Count the shard's memory in the ledger, unless it has none of its own."""
        if not self.is_dropped:
            self.ledger.hold_until_freed(self.shard, on_host=self.is_offloaded)

    def note_change(self) -> None:
        """Count a change of the parameters that autograd did not see: [Note: Versions] in ragged/tensor.py."""
        torch.autograd.graph.increment_version(self.shard)

    def become(self, shard: Tensor) -> None:
        """Rest in `shard`, a converted or moved copy, from now on; parameters keep their identity."""
        shard = self._at_rest(shard)
        self._device = shard.device
        self._move(shard.detach(), self.version + 1)

    def borrow(self, copy: Tensor) -> None:
        """Free the memory of the frozen shard, and use that of a copy, (C,), until `restore`."""
        self.is_dropped = True
        # `.data` is an alias with its own version counter: a gather into the node shard is no edit.
        self._move(copy.data, self.version)

    def restore(self) -> None:
        """Give the shard memory of its own again: its parameters are about to train or to move."""
        if self.is_dropped:
            self.is_dropped = False
            self._move(self.shard.to(self._device, copy=True), self.version)

    def _move(self, shard: Tensor, version: int) -> None:
        self.shard, self.epoch = shard, version - shard._version
        self.count()
        for index, old in enumerate(self.parameters):
            new = nn.Parameter(self._ragged(index), requires_grad=old.requires_grad)
            if (old.device, old.dtype) == (new.device, new.dtype):
                old.move_to(new._local_tensor)  # type: ignore[attr-defined]
            else:
                torch.utils.swap_tensors(old, new)
                _take_over(old, new)


def _take_over(parameter: Any, before: Any) -> None:
    """Give a parameter that was swapped for another the gradient and attributes of the old one. It has the hooks."""
    if before.grad is not None:
        parameter.grad = before.grad.like(before.grad._local_tensor.to(parameter.device, parameter.dtype))
    for name, value in vars(before).items():
        if name not in vars(parameter):
            setattr(parameter, name, value)
