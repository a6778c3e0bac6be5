"""`fully_shard`: FSDP2's call; and the kinds of a unit's parameters, each of which has buckets of its own.

[Note: Small buckets]
The adapters of a LoRA are small, and each unit has some. Cut over all ranks, they would be gathered every step, their
gradients reduced, and the parts of their norm added: six messages on two levels, which take no time but their latency.
So small trained parameters beside frozen ones are not cut. Each rank is a replica that holds all of them with their
optimizer states, and one sum of gradients is all that moves, as under DDP. A bucket is small if its bytes take about as
long as the latencies: 64 KiB take 2.6 ms at 200 Mbit/s. Larger ones are cut, and cross with their unit.

An inner unit leaves its small bucket to the next outer unit, and in the end to the root: there all of them make one
bucket. The root's gradients are reduced at the end of backward. That costs overlap: what crosses at the end hides
behind nothing.

The outer call cuts the parameters anew, from the values that it was given. So nothing moves that was edited after the
inner call, nor after the first forward; nor where the two calls have other policies. Small buckets cross exactly,
whatever the wire. They are cut where the job has ranks beyond the mesh, or islands.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.nn.parameter import is_lazy

from laconic import _compat
from laconic.codec.kernels import coder_on
from laconic.codec.lossless_gradients import CODED_DTYPES
from laconic.comm.cluster import Cluster, default_mesh
from laconic.comm.collectives import share_first
from laconic.layout.bucket import BucketLayout, row_block
from laconic.layout.granularity import Blocks, Granularity, resolve
from laconic.layout.packing import SHARD_ALIGNMENT_BYTES, plan_unit, warn_if_wasteful
from laconic.layout.shares import Shares, plan_by_shares, warn_if_uneven
from laconic.ragged.conversion import check_convertible, converts, holder_of, needs_equal_chunks, uncut_numel
from laconic.ragged.dtensor import check_dtensor, uneven_cut
from laconic.ragged.parts import slice_of_parameter
from laconic.ragged.steps import HOME
from laconic.ragged.tensor import RaggedTensor
from laconic.shard import extension
from laconic.shard.bucket import Bucket, ManagedParameter
from laconic.shard.form import compute_dtype_of
from laconic.shard.policies import Cache, CacheName, Checks, Prefetch, ShardPolicy, Wire, WireName
from laconic.shard.sharded_module import sharded_class
from laconic.shard.unit import Origin, Unit, unit_of, units_below

_SMALL_BYTES = 1 << 16
_SMALL_SHARE = 8
"""A trained bucket is small with at most so many bytes and so small a share of the unit's frozen ones."""
_Modules = TypeVar("_Modules", bound=nn.Module | list[nn.Module])
_Parameter = TypeVar("_Parameter")


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    cache: Cache | CacheName = "none",
    wire: Wire | WireName = "exact",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    granularity: Granularity | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    broadcast: bool = False,
    broadcast_buffers: bool = False,
    checks: Checks | None = None,
    prefetch: Prefetch | None = None,
    shares: Sequence[float] | None = None,
) -> _Modules:
    """Shard `module`'s parameters over the mesh, in place, and return it. It is one unit, gathered and freed together.

    Call it bottom up: on each block first, on the whole model last. Parameters that an inner call sharded stay as they
    are. The module's class becomes a `ShardedModule`, its parameters become `RaggedTensor`s, and their names stay.

    Args:
        module: the module to shard, or a list of modules that make one unit, such as an embedding and the head that
            shares its weight. It may be on the meta device; then call `to_empty` and initialise it afterwards.
        mesh: axes (island, node, local) or (node, local), or FSDP2's meshes of one axis, or of two axes of which the
            first replicates (HSDP); see `Cluster`. Default: all ranks, on the device of the parameters, or on the
            accelerator if they are on the meta device.
        cache: where weights stay while they do not change: nowhere ("none"), as a node shard ("host", "device"), whole
            on each rank ("rank"), or where that saves most in the memory that there is ("auto"); or a `Cache`.
        wire: the bits in which weights and gradients cross between nodes: "exact", "8bit", "4bit", "lossless",
            "lossless-4bit", "lossless-2bit", or a `Wire`. Weights in few bits need a cache.
        reshard_after_forward: False keeps the unit gathered until its backward. None means False for the root, which
            backward needs first, and for `cache="rank"`; for other units it means True. FSDP2's integer, the number of
            ranks per node, keeps the node shard on the device until backward.
        shard_placement_fn: FSDP2's. A result with a mesh, `ShardPlacementResult`, cuts the parameter over the ranks of
            that mesh, such as experts. A dim to cut is not honoured, with a warning: laconic cuts at block borders.
        mp_policy: torch's own. Without `reduce_dtype`, gradients are reduced in `param_dtype`, on every torch release.
        offload_policy: torch's own. With `CPUOffloadPolicy` parameters, gradients and so the optimizer's states rest in
            host memory. Before each gather this rank's shard is copied to the device.
        granularity: the blocks that must stay on one rank: `laconic.rows(k)`, `elements(n)` or `whole()` for all
            parameters, a mapping of name patterns to these, or a function of (name in the unit, parameter) to elements
            per block. The planner then splits the unit into up to four buckets per kind where that saves padding.
            Default: one row, or no blocks at all if whole rows take more than 0.5 % more; and for a weight in a scaled
            format, such as `convert_to_scaled_training` makes, the rows of its blocks.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: torch's `DataParallelMeshDims`, or any object with its attributes. `mesh` then has further axes,
            such as one for tensor parallelism. `shard` names the axes to cut over, and `replicate`, if given, those
            that replicate; a tuple of names stands for one axis. Parameters may be DTensors over the whole of `mesh`,
            with Replicate() on these axes, or over other axes, or plain.
        broadcast: give every rank the weights of the mesh's first rank before they are cut. Without it, ranks must
            begin with equal weights, or load a state dict before the first forward.
        broadcast_buffers: give all ranks the first rank's buffers below `module`, such as BatchNorm's statistics, at
            the start of a forward of the root, when DDP does: [Note: Buffers] in shard/buffers.py. Without it each
            rank has its own, as under FSDP2.
        checks: how often the unit compares checksums of what crosses and of what rests in its cache. None: never.
        prefetch: how many units are gathered ahead while this one computes. None: as their sizes say; see `Prefetch`.
        shares: the memory of each rank of an island, in the order of ranks, such as [24, 24, 12, 12] GB. Only the ratio
            counts: shards of parameters, gradients and the optimizer's states are in proportion, to a block of each
            unit; gathers and reductions have parts of other lengths. None: equal shards.

    Raises:
        ValueError: a module is no module, has no forward, or holds a module that DDP or FSDP has wrapped or sharded; a
            parameter is complex, is on another device than the mesh,
            is not initialised yet (a lazy module), or is tied to a parameter of another unit; a DTensor parameter has a
            placement other than Shard or Replicate, or is cut over the same axes; the mesh, its named axes, the cache,
            wire, granularity, integer or a share is not valid; or `shares` has not one number for each rank.
        AssertionError: a module is sharded already.
        NotImplementedError: a parameter is not contiguous; or it converts itself before the gather and is a DTensor or
            wraps several tensors ([Note: Conversion] in ragged/conversion.py); or `dp_mesh_dims` names no axis to cut
            over; or `mp_policy` has a field that laconic does not know.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    _check_modules(modules)
    policy = Cache.of(cache)
    precision = mp_policy or MixedPrecisionPolicy()
    _check_precision(precision)
    if mesh is None:
        mesh = default_mesh(_device_type(modules))
    whole_mesh = None if dp_mesh_dims is None else mesh
    if dp_mesh_dims is not None:
        mesh = _named_axes(mesh, dp_mesh_dims)
    cluster, reshards, policy = _resolve_reshard(mesh, reshard_after_forward, policy)
    given = ShardPolicy(cache=policy, reshard_after_forward=reshards, shares=cast(Any, shares))  # refuses what is wrong
    by_shard = _by_shard(given.shares, cluster)
    ignored = set(ignored_params or ())
    offload, coding = offload_policy or OffloadPolicy(), Wire.of(wire)
    own = _Policies(
        cluster=cluster, precision=precision, offload=offload, wire=coding, has_granularity=granularity is not None,
        shares=by_shard,
    )  # fmt: skip
    kind_of = partial(_kind_of, precision=precision, granularity=granularity)
    found = _find_parameters(modules, ignored, _place_by(shard_placement_fn, cluster))
    taken = list(_take_small(modules, own))
    for item in (*found, *taken):
        check_dtensor(item.parameter, item.name, item.cluster, whole_mesh=whole_mesh)
    _check_parameters([*found, *taken], offload)
    if by_shard is not None:
        _check_cuts(found, cluster)
    managed = [*_with_small(found, own, kind_of), *taken]
    if broadcast:
        extension.observer_class().broadcasting(modules[0], managed)
        for item in managed:
            share_first(item.cluster, item.local)
    coding = _resolve_wire(coding, policy, managed, precision)
    blocks = _blocks(managed, granularity)
    buckets = [
        bucket
        for kind, group in group_by_kind(managed, kind_of).items()
        for bucket in _make_buckets(
            kind,
            group,
            blocks,
            precision,
            offload,
            coding,
            shares=by_shard,
            may_shrink=granularity is None and not any(uncut_numel(item.parameter) for item in group),
            offered_to=own if kind.is_small else None,
        )
    ]
    for item in managed:
        setattr(item.parameter, HOME, item.name)  # recognises tied weights later, and optimizers of replaced parameters
    origin = Origin(ignored)
    unit = Unit(
        modules=modules, buckets=buckets, blocks=blocks, cluster=cluster, cache=policy, precision=precision,
        origin=origin, reshard_after_forward=reshards, checks=checks,
        prefetch=prefetch or Prefetch(), broadcast_buffers=broadcast_buffers,
    )  # fmt: skip
    for each in modules:
        _compat.register_as_sharded(each, unit)
        each._laconic_unit = unit  # type: ignore[assignment]
        each.__class__ = sharded_class(type(each))
    return module


def _device_type(modules: Sequence[nn.Module]) -> str | None:
    """The device type of the parameters; None if all are on the meta device."""
    return next((p.device.type for each in modules for p in each.parameters() if not p.is_meta), None)


def _named_axes(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Select the axes of `mesh` that torch's `DataParallelMeshDims` names: one that shards, or two (HSDP)."""
    given = dims.replicate, dims.shard
    replicate, shard = [(names,) if isinstance(names, str) else tuple(names or ()) for names in given]
    if not shard:
        raise NotImplementedError(
            f"dp_mesh_dims={dims} names no axis to cut over; name one in shard, or replicate the model with "
            "DistributedDataParallel"
        )
    found = mesh.mesh_dim_names or ()
    if len({*replicate, *shard}.intersection(found)) != len(replicate + shard):
        raise ValueError(f"dp_mesh_dims={dims} must name axes of the mesh, each once; its axes are {found}")
    return _compat.axes_of(mesh, *([replicate] if replicate else []), shard)


_PRECISIONS = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}


def _check_precision(policy: MixedPrecisionPolicy) -> None:
    """Refuse fields that a later torch, or a class of somebody's own, has added."""
    for field in dataclasses.fields(policy):
        if field.name not in _PRECISIONS and getattr(policy, field.name) != field.default:
            raise NotImplementedError(
                f"{type(policy).__name__}({field.name}={getattr(policy, field.name)!r}): laconic does not know this "
                f"field; it has {', '.join(sorted(_PRECISIONS))}. Gradients are reduced in reduce_dtype, and have the "
                "dtype of their parameters"
            )


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard takes a module or a list of modules, got an empty list")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard takes a module or a list of modules, got {type(module).__name__}")
        has_forward = type(module).forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not has_forward:
            raise ValueError(
                f"{type(module).__name__} has no forward, so nothing would ever gather it: fully_shard does not "
                "support containers that do not implement forward; call it on the modules in it, or on a list of them"
            )
        if unit_of(module) is not None:
            raise AssertionError(f"{type(module).__name__} is sharded already; call fully_shard once per module")
        extension.observer_class().sharding(module)


def _resolve_reshard(
    mesh: DeviceMesh, reshard_after_forward: bool | int | None, policy: Cache
) -> tuple[Cluster, bool | None, Cache]:
    """Turn FSDP2's integer, the number of ranks that still hold the parameters after forward, into a cache policy.

    The ranks of a node hold them. Where the mesh does not say which ranks are on a node, the integer does.
    """
    cluster = Cluster.of(mesh)
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return cluster, reshard_after_forward, policy
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward!r}"
        )
    if reshard_after_forward < 1 or cluster.size % reshard_after_forward:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {cluster.size}, not "
            f"{reshard_after_forward}"
        )
    if reshard_after_forward == 1:
        return cluster, False, policy
    if reshard_after_forward == cluster.size:
        return cluster, True, policy
    if cluster.num_local == 1 and "node" not in (mesh.mesh_dim_names or ()):
        cluster = Cluster.of(mesh, num_local=reshard_after_forward)
    if reshard_after_forward != cluster.num_local:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: laconic keeps parameters among the {cluster.num_local} "
            f"ranks of a node, so pass {cluster.num_local}, True or False, or a mesh with axes (node, local) whose "
            f"local axis has {reshard_after_forward} ranks"
        )
    return cluster, True, Cache(where="device") if policy.where == "none" else policy


def _place_by(function: Callable[[nn.Parameter], Any] | None, default: Cluster) -> Callable[[nn.Parameter], Cluster]:
    """Return the function that finds the cluster of a parameter, from FSDP2's function of placements."""

    def find(parameter: nn.Parameter) -> Cluster:
        result = None if function is None else function(parameter)
        mesh_info, placement = getattr(result, "mesh_info", None), getattr(result, "placement", result)
        if placement is not None and not isinstance(placement, Shard):
            raise ValueError(f"shard_placement_fn must return a Shard, a ShardPlacementResult or None, got {result!r}")
        if placement is not None and not -parameter.ndim <= placement.dim < parameter.ndim:
            raise AssertionError(f"{placement} does not fit a parameter of shape {tuple(parameter.shape)}")
        if placement is not None and placement.dim not in (0, -parameter.ndim):
            warnings.warn(
                f"shard_placement_fn asks to cut a parameter of shape {tuple(parameter.shape)} along dim "
                f"{placement.dim}; laconic cuts it at block borders in memory order instead, which trains the same",
                stacklevel=4,
            )
        return default if mesh_info is None else Cluster.of(mesh_info.mesh)

    return find


def _find_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], cluster_of: Callable[[nn.Parameter], Cluster]
) -> list[ManagedParameter]:
    """Find the parameters below `modules` that no inner unit has, each once, with all places that show it."""
    found: dict[nn.Parameter, ManagedParameter] = {}
    for prefix, child in _named_modules(modules):
        for name, parameter in child._parameters.items():
            if parameter is None or parameter in ignored or isinstance(parameter, RaggedTensor):
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if is_lazy(parameter):
                raise ValueError(
                    f"{full_name} of {type(child).__name__} is not initialised yet; run one forward of the model "
                    "with a sample input before fully_shard, so that its shape is known"
                )
            home = getattr(parameter, HOME, None)
            if home is not None:
                raise ValueError(
                    f"{full_name} is tied to {home}, which an inner unit shards already. Tied weights must be in one "
                    "unit: do not call fully_shard on the module that holds the other one, so that this call takes "
                    "both, call fully_shard([module, other]) on both, or untie them"
                )
            if parameter not in found:
                cluster = cluster_of(parameter)
                found[parameter] = ManagedParameter(name=full_name, parameter=parameter, cluster=cluster)
            found[parameter].places.append((child, name))
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class _Policies:
    """The policies that two units must share, so that parameters of one may join the other's."""

    cluster: Cluster
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    wire: Wire
    has_granularity: bool
    shares: Shares | None


def _with_small(
    found: Sequence[ManagedParameter], own: _Policies, kind_of: Callable[[ManagedParameter], BucketKind]
) -> Iterator[ManagedParameter]:
    """Give the small trained parameters beside frozen ones to replicas: [Note: Small buckets]."""
    groups = group_by_kind(found, kind_of)
    nbytes = {kind: _gathered_bytes(group, own.precision) for kind, group in groups.items()}
    frozen_bytes = sum(nbytes[kind] for kind in groups if not kind.is_trained)
    most_bytes = min(_SMALL_BYTES, frozen_bytes / _SMALL_SHARE)
    # islands train different slices, and must cut alike
    are_special = own.has_granularity or any(kind.part is not None for kind in groups)
    for item in found:
        kind = kind_of(item)
        is_special = are_special or kind.converted or item.cluster is not own.cluster
        if kind.is_trained and nbytes[kind] <= most_bytes and not is_special:
            yield dataclasses.replace(item, cluster=own.cluster.replicas or own.cluster, is_small=True)
        else:
            yield item


def _gathered_bytes(group: Iterable[ManagedParameter], precision: MixedPrecisionPolicy) -> int:
    return sum(item.local.numel() * compute_dtype_of(item.parameter.dtype, precision).itemsize for item in group)


def _take_small(modules: Sequence[nn.Module], own: _Policies) -> Iterator[ManagedParameter]:
    """Take the small buckets that inner units offer, with the names that their parameters have below `modules`."""
    offered: dict[tuple[nn.Module, str], ManagedParameter] = {}
    for unit in dict.fromkeys(unit for module in modules for unit in units_below(module)):
        for bucket in [bucket for bucket in unit.buckets if bucket.is_offered_to(own)]:
            offered |= {item.places[0]: item for item in bucket.take_back()}
            unit.buckets.remove(bucket)
    for prefix, child in _named_modules(modules) if offered else ():
        for name in child._parameters:
            if (item := offered.get((child, name))) is not None:
                yield dataclasses.replace(item, name=f"{prefix}.{name}" if prefix else name)


def _named_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below `modules` once. Names begin with the place in the list if there are several."""
    seen: set[nn.Module] = set()
    for index, module in enumerate(modules):
        yield from module.named_modules(memo=seen, prefix=str(index) if len(modules) > 1 else "")


def _check_parameters(managed: list[ManagedParameter], offload: OffloadPolicy) -> None:
    for item in managed:
        parameter, cluster = item.parameter, item.cluster
        if not parameter.is_contiguous():
            raise NotImplementedError(
                f"{item.name} of shape {tuple(parameter.shape)} is not contiguous (strides {parameter.stride()}); set "
                "it to nn.Parameter(param.contiguous()) before fully_shard"
            )
        check_convertible(parameter, item.name)
        if parameter.is_complex():
            raise ValueError(f"{item.name} is complex ({parameter.dtype}); laconic shards real parameters")
        if parameter._backward_hooks:
            raise ValueError(
                f"{item.name} has a hook of Tensor.register_hook, which would never run, as gradients of sharded "
                "parameters come from a reduction: remove it, and use register_post_accumulate_grad_hook, which "
                "fully_shard keeps"
            )
        rests_on_host = isinstance(offload, CPUOffloadPolicy) and parameter.device.type == "cpu"
        if not parameter.is_meta and not rests_on_host and parameter.device.type != cluster.device_type:
            raise ValueError(
                f"{item.name} is on {parameter.device}, but the mesh is for {cluster.device_type}: move the model with "
                f".to({cluster.device_type!r}), or build it on the meta device"
            )
        is_on_accelerator = parameter.device.type == cluster.device_type != "cpu"
        if is_on_accelerator and parameter.device != cluster.device:
            raise ValueError(
                f"{item.name} is on {parameter.device}, but this rank computes on {cluster.device}: call init_mesh, "
                "which chooses the device, before building the model, or build it on the meta device"
            )


def _by_shard(shares: Shares | None, cluster: Cluster) -> Shares | None:
    """The shares of ranks in the order of their shards; None if all are equal.

    Raises:
        ValueError: there is not one share for each rank of the island.
    """
    if shares is None:
        return None
    if len(shares) != cluster.size:
        raise ValueError(
            f"shares={list(shares)} must have one number for each of the {cluster.size} ranks of "
            f"{'an island' if cluster.num_islands > 1 else 'the mesh'} that share the parameters, in the order of ranks"
        )
    order = [cluster.global_rank(shard) for shard in range(cluster.size)]
    by_rank = dict(zip(sorted(order), shares, strict=True))
    return None if len(set(shares)) == 1 else tuple(by_rank[rank] for rank in order)


def _check_cuts(managed: Sequence[ManagedParameter], cluster: Cluster) -> None:
    """Refuse parameters that are cut over other ranks than those that have shares.

    Raises:
        ValueError: `shard_placement_fn` has given one a mesh of its own.
    """
    for item in managed:
        if item.cluster is not cluster:
            raise ValueError(
                f"shares= are those of the ranks of the mesh, but shard_placement_fn cuts {item.name} over "
                f"{item.cluster.size} ranks of another mesh; leave shares out, or cut it over the same ranks"
            )


def _resolve_wire(wire: Wire, cache: Cache, managed: list[ManagedParameter], precision: MixedPrecisionPolicy) -> Wire:
    """Return the policy of crossings that can be followed.

    Raises:
        ValueError: differences are to cross, but no cache keeps what they are differences to, or weights of 32 bits
            would cross as lossless ones, or gradients of a dtype without a code.
    """
    coded = [item for item in managed if not item.is_small]
    if wire.is_exact or not coded:
        return wire
    if wire.gradients == "lossless":
        _check_lossless_gradients(coded, precision)
    if all(item.cluster.num_nodes == 1 for item in coded):
        if wire.gradients == "exact" or all(item.cluster.num_islands == 1 for item in coded):
            remedy = "give a mesh whose axis 'node' has them (laconic.init_mesh under torchrun)"
            wire.warn_of_one_node("all ranks that share the parameters", remedy)
        return wire
    if wire.weights == "lossless":
        _check_lossless(coded, precision)
    return ShardPolicy(cache=cache, wire=wire).wire


def _check_lossless(managed: Iterable[ManagedParameter], precision: MixedPrecisionPolicy) -> None:
    """Refuse lossless crossings of matrices that are gathered in more than 16 bits, or that nothing here codes.

    Raises:
        ValueError: there is one.
        ModuleNotFoundError: see `coder_on`.
    """
    for item in managed:
        parameter = item.parameter
        dtype = compute_dtype_of(parameter.dtype, precision)
        is_coded = parameter.requires_grad and parameter.ndim > 1 and not converts(parameter)
        if is_coded and dtype.itemsize > 2:
            raise ValueError(
                f"wire='lossless' sends patterns of 16 bits or fewer, but {item.name} is gathered in {dtype}, most of "
                "whose bits change in every step; pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32) (in a job: shard.param_dtype = \"bfloat16\"), or wire='exact' or '4bit'"
            )
        if is_coded:
            coder_on(item.cluster.device_type, "lossless")


def _check_lossless_gradients(managed: Iterable[ManagedParameter], precision: MixedPrecisionPolicy) -> None:
    """Refuse lossless crossings of gradients that are reduced in a dtype without a code, or that nothing here codes.

    Raises:
        ValueError: there is one.
        ModuleNotFoundError: see `coder_on`.
    """
    for item in managed:
        parameter = item.parameter
        dtype = precision.reduce_dtype or compute_dtype_of(parameter.dtype, precision)
        crosses = max(item.cluster.num_nodes, item.cluster.num_islands) > 1
        if not (crosses and parameter.requires_grad and parameter.ndim > 1):
            continue
        coder_on(item.cluster.device_type, "lossless_gradients")
        if dtype not in CODED_DTYPES:
            raise ValueError(
                f"Wire(gradients='lossless') codes gradients of {', '.join(map(str, CODED_DTYPES))}, but that of "
                f"{item.name} is reduced in {dtype}; pass mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32) "
                "(in a job: shard.reduce_dtype = \"float32\"), or gradients='exact'"
            )


@dataclass(frozen=True, kw_only=True)
class BucketKind:
    """The properties that all parameters of a bucket share. A LoRA block has parameters of two kinds."""

    dtype: torch.dtype
    """The dtype of shards."""
    is_trained: bool
    part: Hashable = None
    """The slice of partial updates. Each has buckets of its own, trained or not, so that all islands have the same."""
    place: Hashable = None
    """The ranks and the device that hold the parameters."""
    converted: type | None = None
    """The class of parameters that convert themselves: [Note: Conversion] in ragged/conversion.py."""
    chunk: Hashable = None
    """The name of a parameter whose conversion needs FSDP2's equal chunks; it has a bucket of its own."""
    cut: Hashable = None
    """The way in which DTensors are cut into unequal shards; see `uneven_cut` in ragged/dtensor.py."""
    is_small: bool = False
    """True for parameters that are not cut: [Note: Small buckets]."""

    def wire(self, policy: Wire, layout: BucketLayout, *, num_nodes: int, num_islands: int) -> Wire:
        """The policy of a bucket of this kind: exact if it is small, has vectors alone, or is frozen.

        The policy may have frozen weights coded, too. Weights cross between nodes only, and those that convert
        themselves as they do, or without loss; gradients cross between islands, too.
        """
        may_be_coded = (self.is_trained or (policy.frozen and not self.converted)) and self.dtype.is_floating_point
        has_matrix = any(len(slot.shape) > 1 for slot in layout.slots)
        if self.is_small or not (may_be_coded and has_matrix and max(num_nodes, num_islands) > 1):
            return Wire()
        if num_nodes > 1 and (not self.converted or policy.keeps_weights):
            return policy
        return policy.for_exact_weights()


def group_by_kind(
    parameters: Iterable[_Parameter], kind_of: Callable[[_Parameter], BucketKind]
) -> dict[BucketKind, list[_Parameter]]:
    """Group the parameters of a unit by kind. Kinds and their parameters stay in order of appearance."""
    groups: dict[BucketKind, list[_Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(kind_of(parameter), []).append(parameter)
    return groups


def _blocks(managed: Sequence[ManagedParameter], granularity: Granularity | None) -> Blocks:
    uncut = {item.name: numel for item in managed if (numel := uncut_numel(item.parameter))}
    return resolve(granularity, [(item.name, item.local) for item in managed], uncut)


def _kind_of(item: ManagedParameter, *, precision: MixedPrecisionPolicy, granularity: Granularity | None) -> BucketKind:
    parameter = item.parameter
    converted = type(holder_of(parameter)) if converts(parameter) else None
    alone = converted is not None and _needs_equal_chunks(item, precision, granularity)
    return BucketKind(
        chunk=item.name if alone else None,
        dtype=parameter.dtype,
        is_trained=parameter.requires_grad,
        part=slice_of_parameter(*item.places[0]),
        place=(item.cluster, parameter.device),
        converted=converted,
        cut=uneven_cut(parameter),
        is_small=item.is_small,
    )


def _needs_equal_chunks(
    item: ManagedParameter, precision: MixedPrecisionPolicy, granularity: Granularity | None
) -> bool:
    """See `needs_equal_chunks`.

    Raises:
        ValueError: a parameter needs them, and `granularity` asks for blocks.
    """
    (block_numel,) = _blocks([item], granularity).numels
    cluster, module = item.cluster, item.places[0][0]
    needs = needs_equal_chunks(
        item.parameter, module, cluster.shard_mesh, cluster.device, precision, block_numel=block_numel
    )
    if needs and block_numel > row_block(item.local.shape):
        raise ValueError(
            f"granularity asks for blocks of {block_numel} elements of {item.name}, but its fsdp_pre_all_gather fails "
            "on them, or means a number over all ranks, so it needs FSDP2's equal chunks; leave it out of granularity"
        )
    return needs


def _make_buckets(
    kind: BucketKind,
    group: list[ManagedParameter],
    blocks: Blocks,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    wire: Wire,
    *,
    shares: Shares | None,
    may_shrink: bool,
    offered_to: object,
) -> list[Bucket]:
    cluster, shapes = group[0].cluster, [tuple(item.local.shape) for item in group]
    numels, compute_dtype = dict(zip(blocks.names, blocks.numels, strict=True)), compute_dtype_of(kind.dtype, precision)
    block_numels = [numels[item.name] for item in group]
    itemsize = min(each.itemsize for each in (kind.dtype, compute_dtype, precision.reduce_dtype or compute_dtype))
    if kind.converted:
        itemsize = 1  # a conversion may make single bytes
    if kind.chunk is not None:  # shards are FSDP2's chunks, wherever they begin
        block_numels, itemsize, may_shrink = list(map(row_block, shapes)), SHARD_ALIGNMENT_BYTES, False
    names, keys = [item.name for item in group], cast(Any, {"itemsize": itemsize, "may_shrink": may_shrink})
    if shares is None or cluster.size == 1:  # a replica holds all: [Note: Small buckets]
        plan = plan_unit(names, shapes, block_numels, num_shards=cluster.size, **keys)
        warn_if_wasteful(plan, kind.dtype.itemsize)
    else:
        if kind.chunk is not None:
            raise NotImplementedError(
                f"shares= does not go with {kind.chunk}, whose conversion needs FSDP2's equal chunks; leave shares out "
                "for its unit, or give the parameter in ignored_params"
            )
        plan = plan_by_shares(names, shapes, block_numels, shares=shares, **keys)
        warn_if_uneven(plan, shares, kind.dtype.itemsize)
    num_nodes, num_islands = cluster.num_nodes, cluster.num_islands
    return [
        Bucket(
            [group[index] for index in members],
            layout,
            precision=precision,
            offload=offload,
            wire=kind.wire(wire, layout, num_nodes=num_nodes, num_islands=num_islands),
            offered_to=offered_to,
        )
        for members, layout in zip(plan.members, plan.buckets, strict=True)
    ]
