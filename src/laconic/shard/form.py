"""The form in which a bucket's weights are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.layout.geometry import Geometry
from laconic.ragged.conversion import Conversion, Conversions
from laconic.ragged.packing import ShardPacking
from laconic.shard.buffer import Counted
from laconic.shard.stored import StoredWeights


class Form:
    """The form in which one bucket's weights are gathered: in the dtype of forward, or as its parameters convert them.

    If they convert themselves, the first use of most of this is collective: [Note: Conversion] in ragged/conversion.py.
    """

    def __init__(
        self,
        stored: StoredWeights,
        precision: MixedPrecisionPolicy,
        conversions: Sequence[Conversion],
        *,
        keeps_weights: bool,
    ) -> None:
        """Take one conversion for each parameter, or none. `keeps_weights` says that the wire does not change them."""
        self._stored, self.cluster, self.precision = stored, stored.cluster, precision
        self._keeps_weights = keeps_weights
        self._decoded = Counted(0, stored.ledger)  # what was decoded from the full buffer
        self.set_conversions(conversions)

    def set_conversions(self, conversions: Sequence[Conversion]) -> None:
        """Convert so from now on."""
        self._conversions = Conversions(self._stored.cluster, conversions)
        self.conversions = conversions
        """One for each parameter, or none."""
        self.converts = len(conversions) > 0
        """True if parameters convert themselves."""
        self.has_own_bits = self._keeps_weights and not self.converts
        """True if gathered weights are the shards' elements, maybe in another dtype, but not coded or converted."""
        self._unbind()

    def _unbind(self) -> None:
        """Find anew what hangs on the form and the dtype: what is collective, at the next use."""
        self.compute_dtype = compute_dtype_of(self._stored.shard.dtype, self.precision)
        """The dtype of gathered parameters."""
        for name in ("dtype", "geometry", "is_packed"):
            vars(self).pop(name, None)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements that a gather sends."""
        return self.packing.dtype if self.converts else self.compute_dtype

    @cached_property
    def geometry(self) -> Geometry:
        """Where shards lie as a gather sends them: packed ones are equal."""
        stored = self._stored
        if not self.is_packed:
            return stored.geometry
        packed = replace(stored.layout, shard_numel=self.packing.shard_nbytes, stops=())
        return Geometry.of(packed, shard=stored.cluster.shard_index, num_nodes=stored.cluster.num_nodes)

    def own_part(self, node_shard: Tensor) -> Tensor:
        """This rank's shard within its node shard, (N * C,): [Note: A bucket's order]."""
        return node_shard[self.geometry.own_in_node]

    def shards_of(self, full: Tensor) -> Sequence[Tensor] | Tensor:
        """The shards in a full buffer, in order: rows, if they are equal."""
        layout = self._stored.layout
        if self.is_packed or not layout.stops:
            return full.view(layout.num_shards, -1)
        return [full[layout.start(each) : layout.start(each + 1)] for each in range(layout.num_shards)]

    def peers_of(self, node_shard: Tensor) -> Sequence[Tensor] | Tensor:
        """The shards in a node shard, in the order of nodes: rows, if they are equal."""
        numels = self.geometry.numels_on["node"]
        return node_shard.view(len(self.geometry.peers), -1) if numels is None else node_shard.split(numels)

    @cached_property
    def is_packed(self) -> bool:
        """True if shards cross as bytes in sections: [Note: Packed conversions]."""
        return self.converts and not self.packing.is_elements

    def most_node_bytes(self) -> int:
        """The most bytes that a node shard takes on any rank, alike on all ranks."""
        return self.geometry.most_node_numel * self.dtype.itemsize

    def empty_node_shard(self) -> Tensor:
        """New memory for this rank's node shard as a gather sends it, (N * C,)."""
        with torch.inference_mode(False):  # it has versions: it may become a frozen shard
            return torch.empty(self.geometry.node_numel, dtype=self.dtype, device=self.cluster.device)

    @property
    def packing(self) -> ShardPacking:
        """The form in which converting parameters cross."""
        stored, conversions = self._stored, self._conversions
        if conversions.packing is None:
            elements = stored.parts(stored.shard.to(stored.cluster.device))
            conversions.agree(elements, stored.layout.numels_by_shard(), self.compute_dtype)
        assert conversions.packing is not None
        return conversions.packing

    def as_stored(self, like: Tensor) -> Tensor | None:
        """The shard, (C,), if a gather sends it as it is, in the dtype and from the device of `like`; else None."""
        shard = self._stored.shard
        is_sent = not self.converts and shard.dtype is like.dtype and shard.device == like.device
        return shard if is_sent else None

    def write(self, own: Tensor) -> None:
        """Write this rank's shard as a gather sends it, (C,)."""
        stored = self._stored
        if self.converts:
            elements = stored.parts(stored.shard.to(own.device, non_blocking=True))
            places = [] if self.is_packed else stored.parts(own)
            self._conversions.write(own, places, elements, self.compute_dtype)
        else:
            shard = stored.shard
            if shard.device != own.device:  # the host would cast into memory that is not page-locked, and wait
                shard = shard.to(own.device, non_blocking=True)
            own.copy_(shard, non_blocking=True)

    def decode(self, full: Tensor, views: Callable[[], list[Tensor]]) -> list[nn.Parameter]:
        """Make the parameters for forward, the same objects each time, out of a full buffer that is complete.

        `views` returns the views of it that stay, one for each parameter.
        """
        with torch.inference_mode(False):
            decoded = self._conversions.decode(full, [] if self.is_packed else views(), self.compute_dtype)
        self._decoded = Counted(self._conversions.nbytes, self._stored.ledger)
        return decoded

    def free(self) -> None:
        """Free what was decoded from the full buffer."""
        if self.converts:
            self._conversions.free()
            self._decoded.free()

    def forget(self) -> None:
        """Forget the decoded parameters: the full buffer that they were made from is gone."""
        self._conversions.forget()
        self._unbind()


def compute_dtype_of(dtype: torch.dtype, precision: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype of gathered parameters: that of the policy, if the sharded ones are real numbers, else their own."""
    return (precision.param_dtype if dtype.is_floating_point else None) or dtype
