"""One flat buffer of a unit: shard, node shard, full buffer, and the parameters that are views of them.

[Note: A bucket's order]
Of the N * L shards of a bucket, rank (n, l) owns shard l * N + n. The gather across the nodes joins the shards of ranks
(0, l) ... (N - 1, l): shards l * N ... l * N + N - 1, contiguous, which are node shard l. The gather inside a node
joins node shards 0 ... L - 1: the bucket, in order. Both land in place, so parameters are permanent views of the full
buffer. Reduction takes the same way back, first inside the node, then across the nodes. (If rank (n, l) owned shard
n * L + l, as in MiCS, a strided copy would be needed between the levels.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.layout.bucket import BucketLayout
from laconic.ragged.conversion import Conversion, converts, first_inner, held_elements, is_patched
from laconic.ragged.dtensor import DTensorShard
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.steps import HOME, attend_steps
from laconic.shard import extension
from laconic.shard.cache import NodeShard
from laconic.shard.form import Form
from laconic.shard.full import FullBuffer, ParameterPlaces
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Wire
from laconic.shard.stored import StoredWeights


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
        return held_elements(self.parameter)


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
        attend_steps()
        self.layout, self.cluster = layout, managed[0].cluster
        self.offload, self.wire = offload, wire
        """The policy, and the bits of this bucket's crossings: `BucketKind.wire`."""
        self.unit_name = ""
        """For messages; the root sets it."""
        self.replicas_diverge = False
        """True once `LocalSteps` trains islands on their own. Otherwise they sum their gradients in every step."""
        self.divide_by: float | None = None
        """The divisor of summed gradients that the user has set; None stands for the number of ranks."""
        self.reduced_hook: Callable[[Tensor], None] | None = None
        self.places = ParameterPlaces([item.places for item in managed], [slot.name for slot in layout.slots])
        specs = [
            RaggedSpec(cluster=p.cluster, layout=layout, index=i, dtensor=DTensorShard.of(p.parameter, p.cluster))
            for i, p in enumerate(managed)
        ]
        whole, dtype = [item.local for item in managed], managed[0].parameter.dtype
        trains = [item.parameter.requires_grad for item in managed]
        self.stored = StoredWeights(whole, specs, layout, dtype=dtype, trains=trains, offload=offload)
        self.geometry, self.ledger = self.stored.geometry, self.stored.ledger
        self.sharded = self.stored.parameters
        """The sharded parameters, in the order of the layout."""
        conversions = [
            Conversion(
                p.name, p.places[0][0], self.cluster.shard_mesh, precision, p.parameter, block_numel=spec.slot.block,
                first_element=0 if spec.extent is None else spec.extent.start, shard=spec.dtensor,
            )
            for p, spec in zip(managed, specs, strict=True)
            if converts(p.parameter)
        ]  # fmt: skip
        self.form = Form(self.stored, precision, conversions, keeps_weights=wire.keeps_weights)
        self.full = FullBuffer(self.stored, self.form, self.places)
        self.node_shard = NodeShard(self.form, self.full, self.ledger)
        self._set_dtype(dtype)
        for item, sharded in zip(managed, self.sharded, strict=True):
            _keep_attributes(item.parameter, sharded)
        self._offered_to, self._version_offered = offered_to, self.stored.version
        self._managed = [] if offered_to is None else list(managed)
        self.places.show(self.sharded)
        extension.observer_class().cut(self, whole)

    @property
    def shard(self) -> Tensor:
        """This rank's shard, (C,)."""
        return self.stored.shard

    def _set_dtype(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.reduce_dtype = self.form.precision.reduce_dtype or self.form.compute_dtype
        """The dtype in which gradients are reduced."""
        self.waiting_dtype = torch.promote_types(self.reduce_dtype, torch.float32)
        """The dtype of sums that wait for a later backward: [Note: Gradients that wait] in shard/reduce.py."""

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function`, such as a move from the meta device, to the shard; parameters keep their identity.

        Raises:
            ValueError: `function` changes the dtype of a bucket whose cache has memory already.
        """
        self.stored.restore()
        shard = function(self.shard)
        if shard is self.shard:
            return
        if shard.dtype != self.dtype and self.node_shard.is_kept:
            raise ValueError(
                f"cannot change sharded parameters from {self.dtype} to {shard.dtype} after the first forward, as "
                "the cache has memory for them: call .to(dtype) before, or compute in another dtype with "
                "MixedPrecisionPolicy(param_dtype=...)"
            )
        self.stored.become(shard)
        self.full.drop()
        self._set_dtype(shard.dtype)

    @property
    def may_drop_shard(self) -> bool:
        """True if a copy that rests elsewhere can stand for the frozen shard, as it has the parameters' own bits.

        It has not under mixed precision, if parameters convert themselves, and if weights cross in few bits.
        """
        is_own_form = self.form.compute_dtype == self.dtype and self.form.has_own_bits
        return is_own_form and self.stored.is_frozen and not self.stored.is_offloaded

    def drop_shard(self) -> bool:
        """Free the memory of a frozen shard and use its copy inside the cached node shard. Returns whether it did.

        It does nothing if the node shard goes after backward, or cannot stand for the shard.
        """
        stays = self.node_shard.is_kept and self.node_shard.until == "change"
        if not stays or not self.may_drop_shard or self.stored.is_dropped:
            return False
        self.stored.borrow(self.form.own_part(self.node_shard.buffer()))
        return True

    def find_hooks(self) -> None:
        """Convert from now on if methods were put on the `_local_tensor` of sharded parameters: [Note: Conversion].

        Raises:
            RuntimeError: the bucket was gathered without them before.
            NotImplementedError: its weights cross between nodes in few bits.
        """
        for each in self.sharded:  # at each gather, so without calls
            if hasattr(each._local_tensor, "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
                self._take_hooks()
                return

    def _take_hooks(self) -> None:
        before: list[Conversion | None] = [*self.form.conversions] or [None for _ in self.sharded]
        new = {
            index: slot.name
            for index, (slot, old) in enumerate(zip(self.layout.slots, before, strict=True))
            if is_patched(self.sharded[index]) and not (old is not None and old.is_patched)
        }
        if not new:
            return
        which = f"fsdp_pre_all_gather was put on the _local_tensor of {', '.join(new.values())}"
        if not self.wire.keeps_weights:
            raise NotImplementedError(
                f"{which}, but these weights cross as Wire(weights={self.wire.weights!r}); use weights='exact' "
                "or 'lossless' for the unit, as a conversion makes its own bits"
            )
        if self.full.memory is not None or self.node_shard.is_kept:
            raise RuntimeError(f"{which} after the first forward; put it there before, behind to_empty() and the like")
        self.form.set_conversions(
            [
                old if old is not None and index not in new else self._patched_conversion(index)
                for index, old in enumerate(before)
            ]
        )

    def _patched_conversion(self, index: int) -> Conversion:
        name, module = self.layout.slots[index].name, self.places.each[index][0][0]
        return Conversion(name, module, self.cluster.shard_mesh, self.form.precision, self.sharded[index])

    def divisors(self) -> tuple[float, float]:
        """The divisors of gradients before they are summed, and after, as in FSDP2.

        Their product is what the user has set, or else the number of ranks whose gradients are summed. The first is 1
        but in float16, which a sum could overflow: there it is about the square root of the product.
        """
        divisor, before = self.divide_by, 1.0
        if divisor is None:
            divisor = self.cluster.size * (1 if self.replicas_diverge else self.cluster.num_islands)
        while self.reduce_dtype is torch.float16 and divisor % before == 0 and divisor > before**2:
            before *= 2
        return before, divisor / before

    def open_account(self, ledger: Ledger) -> None:
        """Count this bucket's memory in `ledger` from now on."""
        self.ledger = self.stored.ledger = ledger
        self.node_shard = NodeShard(self.form, self.full, ledger)
        self.stored.count()

    def close_account(self) -> None:
        """Free all memory but the shard; another ledger will count it."""
        self.full.drop()
        self.stored.restore()

    def is_offered_to(self, policies: object) -> bool:
        """True if an outer unit with these policies may take the parameters: nobody has used or changed them."""
        is_unchanged = self.stored.version == self._version_offered
        return self._offered_to is not None and self._offered_to == policies and is_unchanged

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
        self.node_shard = NodeShard(self.form, self.full, self.ledger)

    def part_of_gradient(self, index: int, gradient: Tensor) -> Tensor:
        """This rank's part of a gathered parameter's gradient, in the shape of its slot."""
        dtensor = self.stored.specs[index].dtensor
        if dtensor is not None:
            return dtensor.part_of_gradient(gradient, self.reduce_dtype)
        return first_inner(gradient) if self.form.converts else gradient


def _keep_attributes(given: nn.Parameter, sharded: nn.Parameter) -> None:
    """Let a sharded parameter have what a user has put on the given one: attributes, and hooks on its sums."""
    if not converts(given):  # the attributes of other classes are their own
        vars(sharded).update({name: value for name, value in vars(given).items() if name != HOME})
    _compat.share_post_accumulate_hooks(given, sharded)
