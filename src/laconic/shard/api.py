"""`fully_shard` and the class that it gives a module: FSDP2's call and FSDP2's method names."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.nn.parameter import is_lazy

from laconic import _compat
from laconic.comm.cluster import Cluster, default_mesh
from laconic.comm.traffic import Traffic
from laconic.layout.granularity import Blocks, Granularity, resolve
from laconic.layout.planner import plan_unit, warn_if_wasteful
from laconic.ragged.parts import slice_of_parameter
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket, ManagedParameter, compute_dtype_of
from laconic.shard.cache import Cache, Where
from laconic.shard.ledger import Ledger
from laconic.shard.unit import Unit, unit_of, units_below

_Modules = TypeVar("_Modules", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    cache: Cache | Where = "none",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    granularity: Granularity | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
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
        cache: where the node shard stays while the parameters do not change: "none", "host", "device", or a `Cache`.
        reshard_after_forward: False keeps the unit gathered until its backward. None means False for the root, which
            backward needs first, and True for other units. FSDP2's integer, the number of ranks per node, keeps the
            node shard on the device until backward.
        shard_placement_fn: FSDP2's. A result with a mesh, `ShardPlacementResult`, cuts the parameter over the ranks of
            that mesh, such as experts. A dim to cut is not honoured, with a warning: laconic cuts at block borders.
        mp_policy: torch's own. Without `reduce_dtype`, gradients are reduced in `param_dtype`, on every torch release.
        offload_policy: torch's own. With `CPUOffloadPolicy` parameters, gradients and so the optimizer's states rest in
            host memory. Before each gather this rank's shard is copied to the device.
        granularity: the blocks that must stay on one rank: `laconic.rows(k)`, `elements(n)` or `whole()` for all
            parameters, a mapping of name patterns to these, or a function of (name in the unit, parameter) to elements
            per block. The planner then splits the unit into up to four buckets per kind where that saves padding.
            Default: one row, or no blocks at all if whole rows take more than 0.5 % more.
        ignored_params: parameters to leave alone.

    Raises:
        ValueError: a module is no module or has no forward; a parameter is complex, is on another device than the mesh,
            is not initialised yet (a lazy module), or is tied to a parameter of another unit; the mesh, cache,
            granularity or integer is not valid.
        AssertionError: a module is sharded already.
        NotImplementedError: a parameter is not contiguous, or converts itself before FSDP2's gather.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    _check_modules(modules)
    policy = Cache.of(cache)
    precision = mp_policy or MixedPrecisionPolicy()
    if mesh is None:
        mesh = default_mesh(_device_type(modules))
    cluster, reshards, policy = _resolve_reshard(mesh, reshard_after_forward, policy)
    managed = _find_parameters(modules, set(ignored_params or ()), _place_by(shard_placement_fn, cluster))
    blocks = resolve(granularity, [(item.name, item.local) for item in managed])
    offload = offload_policy or OffloadPolicy()
    _check_parameters(managed, offload)
    may_shrink = granularity is None
    buckets = [
        bucket
        for group in _group_by_kind(managed)
        for bucket in _make_buckets(group, blocks, precision, offload, may_shrink=may_shrink)
    ]
    for item in managed:
        item.parameter._laconic_home = item.name  # type: ignore[attr-defined]  # recognises tied weights later
    unit = Unit(modules=modules, buckets=buckets, blocks=blocks, cluster=cluster, cache=policy, precision=precision)
    unit.reshard_after_forward = reshards
    for each in modules:
        _compat.register_as_sharded(each)
        each._laconic_unit = unit  # type: ignore[assignment]
        each.__class__ = _sharded_class(type(each))  # type: ignore[arg-type]  # classes are hashable
    return module


def _device_type(modules: Sequence[nn.Module]) -> str | None:
    """The device type of the parameters; None if all are on the meta device."""
    return next((p.device.type for each in modules for p in each.parameters() if not p.is_meta), None)


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
            home = getattr(parameter, "_laconic_home", None)
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
        if hasattr(item.local, "fsdp_pre_all_gather"):
            raise NotImplementedError(
                f"{item.name} is a {type(item.local).__name__}, whose fsdp_pre_all_gather converts it before FSDP2's "
                "gather; laconic gathers parameters as they are. Turn that conversion off (torchao: "
                "enable_fsdp_float8_all_gather=False), or give the parameter in ignored_params"
            )
        if parameter.is_complex():
            raise ValueError(f"{item.name} is complex ({parameter.dtype}); laconic shards real parameters")
        rests_on_host = isinstance(offload, CPUOffloadPolicy) and parameter.device.type == "cpu"
        if not parameter.is_meta and not rests_on_host and parameter.device.type != cluster.device_type:
            raise ValueError(
                f"{item.name} is on {parameter.device}, but the mesh is for {cluster.device_type}: move the model with "
                f".to({cluster.device_type!r}), or build it on the meta device"
            )
        if parameter.is_cuda and parameter.device != cluster.device:
            raise ValueError(
                f"{item.name} is on {parameter.device}, but this rank computes on {cluster.device}: call init_mesh, "
                "which chooses the device, before building the model, or build it on the meta device"
            )


def _group_by_kind(managed: list[ManagedParameter]) -> list[list[ManagedParameter]]:
    """Group parameters of one mesh, dtype and trainability, in order of appearance. A LoRA block has two groups.

    Each slice of partial updates is a group of its own, trained or not, so that all islands have the same buckets.
    """
    groups: dict[Any, list[ManagedParameter]] = {}
    for item in managed:
        parameter = item.parameter
        kind = parameter.dtype, parameter.requires_grad, parameter.device, slice_of_parameter(*item.places[0])
        groups.setdefault((item.cluster, *kind), []).append(item)
    return list(groups.values())


def _make_buckets(
    group: list[ManagedParameter],
    blocks: Blocks,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    *,
    may_shrink: bool,
) -> list[Bucket]:
    numels = dict(zip(blocks.names, blocks.numels, strict=True))
    dtype = group[0].parameter.dtype
    compute_dtype = compute_dtype_of(dtype, precision)
    reduce_dtype = precision.reduce_dtype or compute_dtype
    plan = plan_unit(
        [item.name for item in group],
        [tuple(item.local.shape) for item in group],
        [numels[item.name] for item in group],
        num_shards=group[0].cluster.size,
        itemsize=min(each.itemsize for each in (dtype, compute_dtype, reduce_dtype)),
        may_shrink=may_shrink,
    )
    warn_if_wasteful(plan, dtype.itemsize)
    return [
        Bucket([group[index] for index in members], layout, precision=precision, offload=offload)
        for members, layout in zip(plan.members, plan.buckets, strict=True)
    ]


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    # The module's name too: transformers knows its own models by it, and initialises custom ones differently.
    return type(f"Sharded{cls.__name__}", (ShardedModule, cls), {"__module__": cls.__module__})


@dataclass(frozen=True)
class UnshardHandle:
    """The handle of a gather that `unshard(async_op=True)` began."""

    wait: Callable[[], None]
    """Finish the gather and show the gathered parameters in the module."""


class ShardedModule(FSDPModule, nn.Module):
    """A module after `fully_shard`, with FSDP2's methods. Setters with `recurse` also set all sharded modules below.

    It is an instance of torch's `FSDPModule`. A method of `FSDPModule` that is not here raises NotImplementedError.
    """

    _laconic_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: a container builds a new one of its own class for a slice, such as `model[:2]`."""
        plain: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        module = plain.__new__(plain)
        module.__init__(*args, **kwargs)  # Python does not, as the new module is not an instance of `cls`
        return module

    @property
    def traffic(self) -> Traffic:
        """The byte counters of this rank in this module's mesh."""
        return self._laconic_unit.cluster.traffic

    def memory(self) -> Ledger:
        """Return the bytes that the engine holds for this root module on this rank."""
        ledger = self._laconic_unit.ledger
        if ledger is None:  # it has not run yet
            ledger = Ledger()
            ledger.hold(sum(bucket.shard.nbytes for unit in self._units() for bucket in unit.buckets))
        return replace(ledger)

    def reset_peak_memory(self) -> None:
        """Set `device_peak_bytes` of `memory()` to the bytes that are held now."""
        if self._laconic_unit.ledger is not None:
            self._laconic_unit.ledger.reset_peak()

    def note_weights_changed(self, *, recurse: bool = True) -> None:
        """Say that parameters changed behind autograd's back, so that cached and gathered copies are stale.

        Changes of parameters and of `to_local()` are noticed. Those through `.data`, a raw pointer or another process
        are not. Call it on every rank alike.
        """
        for unit in self._units(recurse):
            for bucket in unit.buckets:
                bucket.note_change()

    def _units(self, recurse: bool = True) -> list[Unit]:
        return units_below(self) if recurse else [self._laconic_unit]

    def _get_fsdp_state(self) -> Any:
        """The object whose `_pre_forward` and `_post_forward` torch's `register_fsdp_forward_method` calls."""
        return self._laconic_unit

    # -- gathering -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's parameters. Collective over the mesh's node and local axes.

        With `async_op` it returns at once, with a handle whose `wait()` finishes the gather.
        """
        if async_op:
            self._laconic_unit.gather.begin()
            return UnshardHandle(self._laconic_unit.unshard)
        self._laconic_unit.unshard()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters and show the sharded ones.

        Raises:
            RuntimeError: a gathered parameter was edited in place; the edit would be lost.
        """
        self._laconic_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed after forward. False saves the gather in backward and costs their memory.

        Raises:
            ValueError: the argument is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward. With False they are gathered again only when they change."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's parameters.

        False is for modules such as an embedding, whose backward does not need them.
        """
        self._laconic_unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to gather when this forward begins. Default: those that came next in the last forward.

        Raises:
            ValueError: a module is not sharded by laconic.
        """
        self._laconic_unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to gather when this backward begins. Default: those that came before this one in forward.

        Raises:
            ValueError: a module is not sharded by laconic.
        """
        self._laconic_unit.backward_prefetch = _units_of(modules)

    # -- reducing ------------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward sends gradients across the nodes. For gradient accumulation.

        Set it to False for all micro-batches of an optimizer step but the last. Backward then sums gradients inside the
        node only, and a rank keeps one node shard of sums, in the reduce dtype, until a backward with sync sends them.
        """
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward sums gradients over the islands, the replicas of HSDP.

        With False, each rank keeps the sums of its island until a backward sums them over the islands.
        """
        for unit in self._units(recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_reduce_once_per_backward(self, reduce_once: bool, *, recurse: bool = True) -> None:
        """Set whether a backward through several forwards reduces gradients once, at the last, or once per forward.

        Once per forward is the default, as in FSDP2: it takes the memory of one forward. Once per backward sends each
        gradient once, but keeps the weights and the unreduced gradients of the whole model until then.
        """
        for unit in self._units(recurse):
            unit.reduce_once_per_backward = reduce_once

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward of this root is the last one of its step.

        With False, its last reduction may still be under way when it returns, and `.grad` is complete only after a
        backward that is the last.
        """
        self._laconic_unit.context.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of this module's summed gradients; modules below keep theirs.

        The default is the number of ranks whose gradients are summed: those of the mesh, or of this island if
        `LocalSteps` trains islands on their own.

        Raises:
            ValueError: `factor` is not positive or not finite.
        """
        if not factor > 0 or math.isinf(factor):
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor}")
        for bucket in self._laconic_unit.buckets:
            bucket.divide_by = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """See `set_gradient_divide_factor`, the present name of FSDP2's older method."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Set a function that gets each reduced shard of this module, divided and in the reduce dtype, and may edit it.

        Raises:
            NotImplementedError: `stream` is given; the function runs on laconic's own stream for reductions.
        """
        if stream is not None:
            raise NotImplementedError("set_all_reduce_hook(stream=): laconic runs the hook on its own stream")
        for bucket in self._laconic_unit.buckets:
            bucket.reduced_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event that the next forward of this root waits for before it gathers. The forward discards it."""
        self._laconic_unit.context.post_optim_event = event

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward. Gradients of the failed iteration are lost.

        Raises:
            RuntimeError: this module is not the root.
        """
        unit = self._laconic_unit
        if unit.ledger is not None and not unit.is_root:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        unit.context.end_forward()
        unit.abandon_iteration()

    # -- settings that laconic fixes -----------------------------------------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Change nothing: laconic always sums and divides afterwards."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Change nothing: laconic always reduces unused parameters of a used unit with zeros."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accept the number, but keep one reduction in flight, as by default.

        Raises:
            TypeError: the number is no integer.
            ValueError: the number is not positive.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        if max_input_buffers > 1:
            warnings.warn("laconic keeps one reduction in flight, whatever max_input_buffers says", stacklevel=2)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accept True: laconic's reductions always have process groups of their own.

        Raises:
            NotImplementedError: `enable` is False.
        """
        if not enable:
            raise NotImplementedError(
                "set_separate_reduce_scatter_group(False): laconic's reductions always have process groups of their own"
            )

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `nn.Module.zero_grad`. Also zeroes the sharded parameters of units that are gathered now."""
        super().zero_grad(set_to_none)
        for parameter in (sharded for unit in self._units() for bucket in unit.buckets for sharded in bucket.sharded):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError(  # FSDP2's type
            f"{type(self).__name__} cannot be deep-copied, as its units and process groups exist once; copy the model "
            "before fully_shard, or keep copies of the parameters (copy.deepcopy(param) works)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # FSDP2's own _apply is skipped: it would convert the parameters one by one.
        self._laconic_unit.apply(fn, functools.partial(super(FSDPModule, self)._apply, fn, recurse))
        return self


def _units_of(modules: Sequence[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"expected modules of laconic.fully_shard, got {type(module).__name__}")
    return [module._laconic_unit for module in modules]  # type: ignore[attr-defined]


_REFUSED = {
    "set_custom_all_gather": "laconic gathers along two levels, with transfers and buffers of its own",
    "set_custom_reduce_scatter": "laconic reduces along two levels, with transfers and buffers of its own",
    "set_allocate_memory_from_process_group_for_comm": "laconic's collectives read and write its own buckets",
    "set_symm_mem_for_comm": "laconic's collectives read and write its own buckets",
}
"""FSDP2's methods that laconic does not have, with the reason."""


def _refuse(name: str, reason: str) -> None:
    def refuse(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not supported: {reason}")

    refuse.__doc__ = f"Raise NotImplementedError: {reason}."
    setattr(ShardedModule, name, refuse)


for _name in vars(FSDPModule):
    if not _name.startswith("_") and _name not in vars(ShardedModule):
        _refuse(_name, _REFUSED.get(_name, "this method of FSDP2 is not known to laconic"))
