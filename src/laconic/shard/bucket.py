"""One flat buffer of a unit: shard, node shard, full buffer, and the parameters that are views of them.

[Note: A bucket's order]
Of the N * L shards of a bucket, rank (n, l) owns shard l * N + n. The gather across the nodes joins the shards of ranks
(0, l) ... (N - 1, l): shards l * N ... l * N + N - 1, contiguous, which are node shard l. The gather inside a node
joins node shards 0 ... L - 1: the bucket, in order. Both land in place, so parameters are permanent views of the full
buffer. Reduction takes the same way back, first inside the node, then across the nodes. (If rank (n, l) owned shard
n * L + l, as in MiCS, a strided copy would be needed between the levels.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from laconic.comm.cluster import Cluster
from laconic.layout.bucket import BucketLayout, Extent
from laconic.layout.geometry import Geometry
from laconic.ragged.conversion import Conversion, Conversions, converts, first_inner, is_patched, plain_elements
from laconic.ragged.dtensor import DTensorShard, local_part
from laconic.ragged.packing import ShardPacking
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from laconic.shard import extension
from laconic.shard.cache import NodeShard
from laconic.shard.ledger import Ledger
from laconic.shard.linear import GradientSink, set_sink, write_gradient_in_place
from laconic.shard.policies import Wire

_TINY_NUMEL = 1 << 12
"""A gradient of so many elements is copied sooner than a function in Python has written it in place."""
_requires_grad = attrgetter("requires_grad")
HOME = "_laconic_home"
"""The attribute of the parameters that `fully_shard` has replaced: their names."""


@dataclass(frozen=True, kw_only=True)
class ManagedParameter:
    """A parameter that a unit is about to shard."""

    name: str
    """The qualified name within the unit, of the first place."""
    parameter: nn.Parameter
    cluster: Cluster
    """The ranks that the parameter is cut over."""
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Every (module, attribute) that shows the parameter; a tied weight has several."""
    is_small: bool = False
    """True if it is not cut, and an outer unit may take it: [Note: Small buckets] in shard/api.py."""

    @property
    def local(self) -> Tensor:
        """The elements that this rank holds now: [Note: Two parallelisms, two meshes] in ragged/dtensor.py."""
        return plain_elements(self.parameter) if converts(self.parameter) else local_part(self.parameter)


class Bucket:
    """Parameters of one unit that share dtype and trainability, in one flat buffer."""

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        layout: BucketLayout,
        *,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        wire: Wire,
        offered_to: object = None,
    ) -> None:
        """Copy this rank's shard of `managed`, the parameters of `layout` in its order, and show sharded parameters.

        An outer unit whose policies equal `offered_to` may take the parameters: [Note: Small buckets] in shard/api.py.
        """
        self.layout, self.cluster = layout, managed[0].cluster
        self.wire = wire
        """The bits of this bucket's crossings: `BucketKind.wire`."""
        self.unit_name = ""
        """For messages; the root sets it."""
        self.is_around = False
        """True if other units run while the unit's weights are gathered; the root sets it."""
        self._precision, self.offload = precision, offload
        self.set_dtype(managed[0].parameter.dtype)
        self.geometry = Geometry.of(layout, shard=self.cluster.shard_index, num_nodes=self.cluster.num_nodes)
        """Of the elements of the layout; `Form.geometry` is that of what a gather sends."""
        self.replicas_diverge = False
        """True once `LocalSteps` trains islands on their own. Otherwise they sum their gradients in every step."""
        self.divide_by: float | None = None
        """The divisor of summed gradients that the user has set; None stands for the number of ranks."""
        self.reduced_hook: Callable[[Tensor], None] | None = None
        self.ledger = Ledger()
        self._slices: dict[int, list[slice]] = {}
        self.places = [item.places for item in managed]
        """Every (module, attribute) that shows each parameter."""
        self.specs = [
            RaggedSpec(
                cluster=p.cluster, layout=layout, index=i, dtensor=DTensorShard.of(p.parameter, p.name, p.cluster)
            )
            for i, p in enumerate(managed)
        ]
        self.form = Form(
            self,
            [
                Conversion(
                    p.name,
                    p.places[0][0],
                    self.cluster.shard_mesh,
                    precision,
                    like=p.parameter,
                    block_numel=slot.block,
                    of_class=p.parameter,
                )
                for p, slot in zip(managed, layout.slots, strict=True)
                if converts(p.parameter)
            ],
        )
        self.full, self.node_shard = FullBuffer(self), NodeShard(self)
        whole = [item.local for item in managed]
        self.stored = StoredWeights(self, whole, [item.parameter.requires_grad for item in managed])
        self.sharded = self.stored.parameters
        """The sharded parameters, in the order of the layout."""
        self._offered_to, self._version_offered = offered_to, self.version
        self._managed = [] if offered_to is None else list(managed)
        self.show(self.sharded)
        extension.observer_class().cut(self, whole)

    def __deepcopy__(self, memo: dict[int, object]) -> Bucket:
        return self  # an asynchronous checkpoint copies tensors with their attributes; copies belong to this bucket

    @property
    def shard(self) -> Tensor:
        """This rank's shard, (C,)."""
        return self.stored.shard

    @property
    def version(self) -> int:
        """A number that every change of the parameters increases: [Note: Versions] in ragged/tensor.py."""
        stored = self.stored
        return stored.epoch + stored.shard._version

    @property
    def is_offloaded(self) -> bool:
        """True if the shard and the gradients of the sharded parameters rest in host memory: `CPUOffloadPolicy`."""
        return isinstance(self.offload, CPUOffloadPolicy)

    def host_copy(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Copy a tensor to host memory, page-locked if the policy says so; one that is there already stays.

        With `non_blocking`, the copy is complete when the current stream has come so far.
        """
        pins = getattr(self.offload, "pin_memory", False) and self.cluster.device.type != "cpu"
        if tensor.device.type == "cpu" and (tensor.is_pinned() or not pins):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
        return copy.copy_(tensor, non_blocking=non_blocking)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Hold the parameters in `dtype` from now on."""
        self.dtype = dtype
        self.compute_dtype = compute_dtype_of(dtype, self._precision)
        """The dtype of gathered parameters."""
        self.reduce_dtype = self._precision.reduce_dtype or self.compute_dtype
        """The dtype in which gradients are reduced."""
        self.waiting_dtype = torch.promote_types(self.reduce_dtype, torch.float32)
        """The dtype of sums that wait for a later backward: [Note: Gradients that wait] in shard/reduce.py."""

    def part(self, buffer: Tensor, index: int) -> Tensor:
        """The elements of parameter `index` in a buffer: flat, possibly empty, a view.

        Shapes: `buffer` is this rank's shard, (C,), its node shard, (N * C,), or the full buffer, (L * N * C,). With
            unequal shards these are the elements of one, of N and of all: [Note: Unequal shards] in layout/shares.py.
        """
        return buffer[self._slices_of(buffer.numel())[index]]

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """The elements of each parameter in a buffer: see `part`."""
        return [buffer[part] for part in self._slices_of(buffer.numel())]

    def _slices_of(self, numel: int) -> list[slice]:
        """The elements of each parameter in the buffer of `numel` elements: see `part`."""
        if numel not in self._slices:
            geometry, own = self.geometry, self.cluster.shard_index
            first = own if numel == geometry.numel else geometry.peers.start if numel < geometry.whole_numel else 0
            begin = self.layout.start(first)
            self._slices[numel] = [
                slice(max(0, slot.offset - begin), max(0, slot.offset + slot.numel - begin))
                for slot in self.layout.slots
            ]
        return self._slices[numel]

    @property
    def divide_before(self) -> float:
        """The divisor of gradients before they are summed, as in FSDP2.

        In float16, which a sum could overflow, it is about the square root of `divisor`; otherwise 1.
        """
        before = 1.0
        while self.reduce_dtype is torch.float16 and self.divisor % before == 0 and self.divisor > before**2:
            before *= 2
        return before

    @property
    def divisor(self) -> float:
        """The divisor of summed gradients: the number of ranks whose gradients are summed, unless the user set it."""
        if self.divide_by is not None:
            return self.divide_by
        return self.cluster.size * (1 if self.replicas_diverge else self.cluster.num_islands)

    @property
    def gathers_own_bits(self) -> bool:
        """True if the full buffer has the shards' elements, maybe in another dtype, but not coded or converted."""
        return self.wire.keeps_weights and not self.form.converts

    def open_account(self, ledger: Ledger) -> None:
        """Count this bucket's memory in `ledger` from now on."""
        self.ledger = ledger
        self.stored.count()

    def close_account(self) -> None:
        """Free all memory but the shard; another ledger will count it."""
        self.full.drop()
        self.stored.restore()
        self.node_shard = NodeShard(self)

    def is_offered_to(self, policies: object) -> bool:
        """True if an outer unit with these policies may take the parameters: nobody has used or changed them."""
        return self._offered_to is not None and self._offered_to == policies and self.version == self._version_offered

    def take_back(self) -> list[ManagedParameter]:
        """The parameters as they were given. The bucket is of no more use."""
        for item, sharded in zip(self._managed, self.sharded, strict=True):
            setattr(sharded, HOME, item.name)  # an optimizer that has them already refuses them
        return self._managed

    def keep(self) -> None:
        """Keep the parameters from now on."""
        self._offered_to, self._managed = None, []

    def rest_nowhere(self) -> None:
        """Free the weights that stay between uses, and let none stay from now on. No gather is under way."""
        self.stored.restore()
        self.node_shard.free()
        self.full.free()
        self.node_shard = NodeShard(self)

    def part_of_gradient(self, index: int, gradient: Tensor) -> Tensor:
        """This rank's part of a gathered parameter's gradient, in the shape of its slot."""
        dtensor = self.specs[index].dtensor
        if dtensor is not None:
            return dtensor.part_of_gradient(gradient, self.reduce_dtype)
        return first_inner(gradient) if self.form.converts else gradient

    @property
    def is_frozen(self) -> bool:
        """True if no parameter of the bucket requires a gradient now."""
        return not any(map(_requires_grad, self.sharded))

    def own_part(self, node_shard: Tensor) -> Tensor:
        """This rank's shard within its node shard, (N * C,): [Note: A bucket's order]."""
        return node_shard[self.form.geometry.own_in_node]

    def show(self, parameters: Sequence[nn.Parameter | None], *, instead_of: Sequence[nn.Parameter] = ()) -> None:
        """Show `parameters` in the modules; None hides one from `nn.Module._apply`, which must not see it.

        Raises:
            RuntimeError: a module has another parameter than the one of `instead_of`.
        """
        for places, shown, slot in zip(self.places, instead_of, self.layout.slots, strict=False):
            for module, name in places:  # at each gather and release: a generator would double what it takes
                if module._parameters.get(name) is not shown:
                    raise RuntimeError(
                        f"parameter {slot.name} is no longer the one fully_shard made: it was replaced. Copy into it "
                        "instead (param.copy_(value) under torch.no_grad()), or call load_state_dict of the sharded "
                        "module"
                    )
        for places, parameter in zip(self.places, parameters, strict=True):
            for module, name in places:
                module._parameters[name] = parameter


class StoredWeights:
    """A bucket's weights at rest: this rank's shard, (C,), and the sharded parameters, which are views of it."""

    def __init__(self, bucket: Bucket, whole: Sequence[Tensor], trains: Sequence[bool]) -> None:
        """Copy this rank's shard out of whole parameters. `trains` says which of them require gradients."""
        self._bucket = bucket
        self.epoch = 0
        self.is_dropped = False
        """True while the shard has no memory of its own: see `drop`."""
        self.shard = self._at_rest(self._cut(whole))
        self._device = self.shard.device
        self.parameters = [nn.Parameter(self._ragged(index), requires_grad=each) for index, each in enumerate(trains)]

    @torch.no_grad()  # the local part of a DTensor has a graph
    def _cut(self, whole: Sequence[Tensor]) -> Tensor:
        bucket = self._bucket
        numel = bucket.layout.size(bucket.cluster.shard_index)
        shard = torch.zeros(numel, dtype=bucket.dtype, device=whole[0].device)
        if not shard.is_meta:
            for spec, part, parameter in zip(bucket.specs, bucket.parts(shard), whole, strict=True):
                extent = spec.extent or Extent(0, 0)
                part.copy_(parameter.reshape(-1)[extent.start : extent.stop])
        return shard

    def _at_rest(self, shard: Tensor) -> Tensor:
        """Move a shard to host memory if the policy says so."""
        return self._bucket.host_copy(shard) if self._bucket.is_offloaded and not shard.is_meta else shard

    def _ragged(self, index: int) -> RaggedTensor:
        bucket = self._bucket
        view = bucket.part(self.shard, index)
        return RaggedTensor(view, bucket.specs[index], device=self._device, bump=self.note_change)

    def count(self) -> None:
        """Count the shard's memory in the bucket's ledger, unless it has none of its own."""
        if not self.is_dropped:
            self._bucket.ledger.hold_until_freed(self.shard, on_host=self._bucket.is_offloaded)

    def note_change(self) -> None:
        """Count a change of the parameters that autograd did not see: [Note: Versions] in ragged/tensor.py."""
        torch.autograd.graph.increment_version(self.shard)

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function`, such as a move from the meta device, to the shard; parameters keep their identity.

        Raises:
            ValueError: `function` changes the dtype of a bucket whose cache has memory already.
        """
        self.restore()
        bucket, shard = self._bucket, function(self.shard)
        if shard is self.shard:
            return
        if shard.dtype != bucket.dtype and bucket.node_shard.is_kept:
            raise ValueError(
                f"cannot change sharded parameters from {bucket.dtype} to {shard.dtype} after the first forward, as "
                "the cache has memory for them: call .to(dtype) before, or compute in another dtype with "
                "MixedPrecisionPolicy(param_dtype=...)"
            )
        shard = self._at_rest(shard)
        bucket.full.drop()
        bucket.set_dtype(shard.dtype)
        self._device = shard.device
        self._move(shard.detach(), bucket.version + 1)

    @property
    def may_drop(self) -> bool:
        """True if a copy that rests elsewhere can stand for the frozen shard, as it has the parameters' own bits.

        It has not under mixed precision, if parameters convert themselves, and if weights cross in few bits.
        """
        bucket = self._bucket
        is_own_form = bucket.compute_dtype == bucket.dtype and bucket.gathers_own_bits
        return is_own_form and bucket.is_frozen and not bucket.is_offloaded

    def drop(self) -> bool:
        """Free the memory of a frozen shard and use its copy inside the cached node shard. Returns whether it did.

        It does nothing if the node shard goes after backward, or cannot stand for the shard.
        """
        bucket, kept = self._bucket, self._bucket.node_shard
        if not kept.outlives_backward or not self.may_drop or self.is_dropped:
            return False
        self.is_dropped = True
        # `.data` is an alias with its own version counter: a gather into the node shard is no edit.
        self._move(bucket.own_part(kept.buffer()).data, bucket.version)
        return True

    def restore(self) -> None:
        """Give the shard memory of its own again: its parameters are about to train or to move."""
        if self.is_dropped:
            self.is_dropped = False
            self._move(self.shard.to(self._device, copy=True), self._bucket.version)

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


class Form:
    """The form in which one bucket's weights are gathered: in the dtype of forward, or as its parameters convert them.

    If they convert themselves, the first use of most of this is collective: [Note: Conversion] in ragged/conversion.py.
    """

    def __init__(self, bucket: Bucket, conversions: Sequence[Conversion]) -> None:
        """Take one conversion for each parameter, or none."""
        self._bucket = bucket
        self._set_conversions(conversions)
        self._decoded_bytes = 0

    def _set_conversions(self, conversions: Sequence[Conversion]) -> None:
        self._conversions = Conversions(self._bucket.cluster, conversions)
        self.converts = len(conversions) > 0
        """True if parameters convert themselves."""
        self._unbind()

    def _unbind(self) -> None:
        """Find anew what hangs on the form and the dtype, at the next use."""
        for name in ("dtype", "geometry", "is_packed"):
            vars(self).pop(name, None)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements that a gather sends."""
        return self.packing.dtype if self.converts else self._bucket.compute_dtype

    @cached_property
    def geometry(self) -> Geometry:
        """Where shards lie as a gather sends them: packed ones are equal."""
        bucket = self._bucket
        if not self.is_packed:
            return bucket.geometry
        packed = replace(bucket.layout, shard_numel=self.packing.shard_nbytes, stops=())
        return Geometry.of(packed, shard=bucket.cluster.shard_index, num_nodes=bucket.cluster.num_nodes)

    def shards_of(self, full: Tensor) -> Sequence[Tensor] | Tensor:
        """The shards in a full buffer, in order: rows, if they are equal."""
        layout = self._bucket.layout
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

    @property
    def packing(self) -> ShardPacking:
        """The form in which converting parameters cross."""
        bucket, conversions = self._bucket, self._conversions
        if conversions.packing is None:
            elements = bucket.parts(bucket.shard.to(bucket.cluster.device))
            conversions.agree(elements, bucket.layout.numels_by_shard(), bucket.compute_dtype)
        assert conversions.packing is not None
        return conversions.packing

    def find_hooks(self) -> None:
        """Convert from now on if methods were put on the `_local_tensor` of sharded parameters: [Note: Conversion].

        Raises:
            RuntimeError: the bucket was gathered without them before.
            NotImplementedError: its weights cross between nodes in few bits.
        """
        for each in self._bucket.sharded:  # at each gather, so without calls
            if hasattr(each._local_tensor, "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
                self._take_hooks()
                return

    def _take_hooks(self) -> None:
        bucket = self._bucket
        before: list[Conversion | None] = [*self._conversions.each] or [None for _ in bucket.sharded]
        new = {
            index: slot.name
            for index, (slot, old) in enumerate(zip(bucket.layout.slots, before, strict=True))
            if is_patched(bucket.sharded[index]) and not (old is not None and old.is_patched)
        }
        if not new:
            return
        which = f"fsdp_pre_all_gather was put on the _local_tensor of {', '.join(new.values())}"
        if not bucket.wire.keeps_weights:
            raise NotImplementedError(
                f"{which}, but these weights cross as Wire(weights={bucket.wire.weights!r}); use weights='exact' "
                "or 'lossless' for the unit, as a conversion makes its own bits"
            )
        if bucket.full.is_made or bucket.node_shard.is_kept:
            raise RuntimeError(f"{which} after the first forward; put it there before, behind to_empty() and the like")
        each = [
            old if old is not None and index not in new else self._patched_conversion(index, is_hooked=index in new)
            for index, old in enumerate(before)
        ]
        self._set_conversions(each)

    def _patched_conversion(self, index: int, *, is_hooked: bool) -> Conversion:
        bucket, parameter = self._bucket, self._bucket.sharded[index]
        return Conversion(
            bucket.layout.slots[index].name, bucket.places[index][0][0], bucket.cluster.shard_mesh, bucket._precision,
            like=parameter, patched=parameter if is_hooked else None,
        )  # fmt: skip

    def sent(self, own: Tensor) -> Tensor:
        """This rank's shard as a gather sends it, (C,): itself, or else `own`, to which it is written."""
        shard = self._bucket.shard
        if not self.converts and (shard.dtype, shard.device) == (own.dtype, own.device):
            return shard
        self.write(own)
        return own

    def write(self, own: Tensor) -> None:
        """Write this rank's shard as a gather sends it, (C,)."""
        bucket = self._bucket
        if self.converts:
            elements = bucket.parts(bucket.shard.to(own.device, non_blocking=True))
            places = [] if self.is_packed else bucket.parts(own)
            self._conversions.write(own, places, elements, bucket.compute_dtype)
        else:
            shard = bucket.shard
            if shard.device != own.device:  # the host would cast into memory that is not page-locked, and wait
                shard = shard.to(own.device, non_blocking=True)
            own.copy_(shard, non_blocking=True)

    def decode(self, full: Tensor, views: Callable[[], list[Tensor]]) -> list[nn.Parameter]:
        """Make the parameters for forward, the same objects each time, out of a full buffer that is complete.

        `views` returns the views of it that stay, one for each parameter.
        """
        with torch.inference_mode(False):
            decoded = self._conversions.decode(full, [] if self.is_packed else views(), self._bucket.compute_dtype)
        self._decoded_bytes = self._conversions.nbytes
        self._bucket.ledger.hold(self._decoded_bytes)
        return decoded

    def free(self) -> None:
        """Free what was decoded from the full buffer."""
        if self.converts:
            self._conversions.free()
            self._bucket.ledger.hold(-self._decoded_bytes)
            self._decoded_bytes = 0

    def forget(self) -> None:
        """Forget the decoded parameters: the full buffer that they were made from is gone."""
        self._conversions.forget()
        self._unbind()


class FullBuffer:
    """The gathered weights of one bucket, (L * N * C,), and the gathered parameters that are views of them.

    [Note: Views that outlive their memory]
    Modules and autograd keep views of a bucket while its memory is freed. So `free` empties the storage in place,
    `allocate` fills it again, and the views never change. Autograd also remembers the version of every tensor that it
    saves, and a refill with the same values must not look like an edit. So the engine writes through an alias with its
    own version counter. Each gathered parameter has a counter of its own, too, as a parameter that is alone in its
    memory would: it counts only a user's edits, and only those of this parameter.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._tensor: Tensor | None = None
        self._alias: Tensor | None = None
        self.is_allocated = False
        """True while it has memory of its own."""
        self._is_shard = False
        self.parameters: list[nn.Parameter] = []
        """The gathered parameters, in the order of `Bucket.sharded`; empty before the first gather."""
        self._versions: list[int] = []
        self._trained: list[bool] = []
        """Of each gathered parameter when it was shown: its version, and whether it trained."""
        self._sink: GradientSink | None = None

    @property
    def is_made(self) -> bool:
        """True if parameters may be views of it."""
        return self._tensor is not None

    def allocate(self) -> Tensor:
        """Allocate its memory in the dtype of the wire, unless it is allocated already. Returns the engine's alias."""
        if self._tensor is None:
            self._make()
        elif not self.is_allocated and not self._is_shard:
            self._tensor.untyped_storage().resize_(self._tensor.nbytes)
            self._count(is_allocated=True)
        assert self._alias is not None
        return self._alias

    def _make(self) -> None:
        bucket, form = self._bucket, self._bucket.form
        # An inference tensor has no versions and could not be trained with later.
        with torch.inference_mode(False), torch.enable_grad():
            device = bucket.cluster.device if bucket.is_offloaded else bucket.shard.device
            is_whole = bucket.cluster.size == 1 and bucket.shard.device == device
            self._is_shard = is_whole and bucket.compute_dtype == bucket.dtype and not form.converts
            if self._is_shard:
                self._tensor = bucket.shard.data
            else:
                self._tensor = torch.empty(form.geometry.whole_numel, dtype=form.dtype, device=device)
                self._count(is_allocated=True)
            self._alias = self._tensor.data
            self.parameters = [] if form.converts else list(map(self._parameter, count(), self.views()))

    def _count(self, *, is_allocated: bool) -> None:
        assert self._tensor is not None
        self.is_allocated = is_allocated
        nbytes = self._tensor.nbytes if is_allocated else -self._tensor.nbytes
        self._bucket.ledger.hold_full(nbytes, is_around=self._bucket.is_around)

    def decode(self) -> None:
        """Make the gathered parameters out of a buffer that is complete, if they convert: [Note: Conversion]."""
        if self._bucket.form.converts:
            decoded = self._bucket.form.decode(self.allocate(), self.views)
            if not self.parameters:
                self.parameters = list(map(self._watched, count(), decoded))

    def node_shard(self) -> Tensor:
        """This rank's node shard within the buffer, which is allocated: (N * C,), a view."""
        return self.allocate()[self._bucket.form.geometry.node_in_whole]

    def free(self) -> None:
        """Free the memory, and what was decoded from it. Views stay."""
        if self._tensor is not None and self.is_allocated:
            self._tensor.untyped_storage().resize_(0)
            self._count(is_allocated=False)
            self._bucket.form.free()

    def drop(self) -> None:
        """Free the memory for good: the next gather makes another buffer, with other gathered parameters."""
        self.free()
        self._tensor = self._alias = None
        self._versions = []
        self._bucket.form.forget()

    def views(self) -> list[Tensor]:
        """The elements of each parameter, in its shape."""
        assert self._tensor is not None
        return [
            spec.assemble(self._tensor[spec.slot.offset : spec.slot.offset + spec.slot.numel])
            for spec in self._bucket.specs
        ]

    def _parameter(self, index: int, view: Tensor) -> nn.Parameter:
        if not view.is_floating_point():  # such as a quantised table: it can never train
            return nn.Parameter(view.data, requires_grad=False)
        parameter = nn.Parameter(view.data)
        spec = self._bucket.specs[index]
        if self._sink is not None and spec.dtensor is None and spec.slot.numel > _TINY_NUMEL:
            set_sink(parameter, self._sink, index)
        return self._watched(index, parameter)

    def _watched(self, index: int, parameter: nn.Parameter) -> nn.Parameter:
        """Send the gradients of a gathered parameter to the sink, if its sharded one trains."""
        if self._sink is not None:
            parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(self._sink), index))
        sharded = self._bucket.sharded[index]
        parameter.requires_grad_(sharded.requires_grad)
        # the user's hooks run on sums, also if they meet the gathered parameter
        parameter.register_post_accumulate_grad_hook = sharded.register_post_accumulate_grad_hook  # type: ignore[method-assign]
        return parameter

    def set_sink(self, sink: GradientSink) -> None:
        """Send the gradients of the gathered parameters to `sink`."""
        self._sink = sink
        for places in self._bucket.places:
            for module, name in places:
                if name == "weight":
                    write_gradient_in_place(module)

    def show(self) -> None:
        """Show the gathered parameters in the modules.

        Raises:
            RuntimeError: a module's sharded parameter was replaced; the replacement would be lost now.
        """
        assert self._tensor is not None
        self.follow_requires_grad()
        self._bucket.show(self.parameters, instead_of=self._bucket.sharded)
        self._versions = [parameter._version for parameter in self.parameters]

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze gathered parameters as the sharded ones, or these as the gathered ones.

        Users meet either, as the unit is gathered or not: the one that has changed since the last call is right.
        """
        differ = False
        for index, (sharded, gathered) in enumerate(zip(self._bucket.sharded, self.parameters, strict=True)):
            if gathered.requires_grad == sharded.requires_grad:
                continue
            differ = True
            if self._trained and gathered.requires_grad != self._trained[index]:
                sharded.requires_grad_(gathered.requires_grad)
            else:
                gathered.requires_grad_(sharded.requires_grad)
        if differ or not self._trained:
            self._trained = [parameter.requires_grad for parameter in self.parameters]

    def hide(self) -> None:
        """Show the sharded parameters in the modules again.

        Raises:
            RuntimeError: a gathered parameter was edited in place, or replaced; the edit would be lost.
        """
        self.follow_requires_grad()
        self._bucket.show(self._bucket.sharded, instead_of=self.parameters)
        now, before = [parameter._version for parameter in self.parameters], self._versions
        self._refuse_other_memory()
        if not before or now == before:
            return
        self._versions = now
        slots, changed = self._bucket.layout.slots, [index for index in range(len(now)) if now[index] != before[index]]
        edited = ", ".join(slots[index].name for index in changed if self._is_edited(index))
        if edited:
            raise RuntimeError(
                f"the gathered parameter {edited} was edited in place, which does not change the sharded parameter "
                "that trains. Edit the sharded parameter under torch.no_grad() while the module is resharded"
            )

    def _refuse_other_memory(self) -> None:
        """Refuse gathered parameters that have got other memory (`parameter.data = values`), and take it from them."""
        if self._tensor is None or self._bucket.form.converts:
            return
        home = self._tensor.untyped_storage()._cdata
        moved = [
            index
            for index, (each, spec) in enumerate(zip(self.parameters, self._bucket.specs, strict=True))
            if spec.dtensor is None and each.untyped_storage()._cdata != home
        ]
        if moved:
            views = self.views()
            for index in moved:
                self.parameters[index].data = views[index].data
            names = ", ".join(self._bucket.layout.slots[index].name for index in moved)
            raise RuntimeError(
                f"the .data of the gathered parameter {names} was replaced, which does not change the sharded "
                "parameter that trains. Edit the sharded parameter under torch.no_grad() while the module is resharded"
            )

    def _is_edited(self, index: int) -> bool:
        """True if a parameter with a new version has other elements, of this rank's own, than were gathered.

        A new version alone says little: torch's parametrizations, which peft registers in forward, call `set_` with the
        same memory. Where weights cross in few bits, there is nothing to compare with.
        """
        bucket, full = self._bucket, self.allocate()
        if not bucket.gathers_own_bits:
            return True
        own = bucket.part(bucket.form.shards_of(full)[bucket.cluster.shard_index], index)
        gathered = bucket.part(bucket.shard, index).to(full.device, full.dtype)
        return not torch.equal(own.view(torch.uint8), gathered.view(torch.uint8))  # a NaN is equal to itself


def compute_dtype_of(dtype: torch.dtype, precision: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype of gathered parameters: that of the policy, if the sharded ones are real numbers, else their own."""
    return (precision.param_dtype if dtype.is_floating_point else None) or dtype


def _take_over(parameter: Any, before: Any) -> None:
    """Give a parameter that was swapped for another the gradient and attributes of the old one. It has the hooks."""
    if before.grad is not None:
        parameter.grad = before.grad.like(before.grad._local_tensor.to(parameter.device, parameter.dtype))
    for name, value in vars(before).items():
        if name not in vars(parameter):
            setattr(parameter, name, value)


def _collect(sink: weakref.ref[GradientSink], index: int, parameter: nn.Parameter) -> None:
    """Collect a gradient. A strong reference to `sink`, held by the hook, would be a cycle that Python never frees."""
    if parameter.grad is None:  # it was written in place
        return
    target = sink()
    assert target is not None, "a gradient came for a model that is gone"
    target.collect(index, parameter)
