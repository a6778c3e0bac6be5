"""`fully_shard` and the class that it gives a module: FSDP2's call and FSDP2's method names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.comm.cluster import Cluster, init_mesh
from laconic.comm.traffic import Traffic
from laconic.layout.granularity import Blocks, Granularity, resolve
from laconic.layout.planner import plan_unit, warn_if_wasteful
from laconic.ragged.parts import slice_of_parameter
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket, ManagedParameter
from laconic.shard.cache import Cache, Where
from laconic.shard.ledger import Ledger
from laconic.shard.unit import Unit, unit_of, units_below


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    cache: Cache | Where = "none",
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    granularity: Granularity | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> nn.Module:
    """Shard `module`'s parameters over the mesh, in place, and return it. It is one unit, gathered and freed together.

    Call it bottom up: on each block first, on the whole model last. Parameters that an inner call sharded stay as they
    are. The module's class becomes a `ShardedModule`, its parameters become `RaggedTensor`s, and their names stay.

    Args:
        module: the module to shard. It may be on the meta device; then call `to_empty` and initialise it afterwards.
        mesh: axes (island, node, local) or (node, local), or one axis, which is one level. Default: `init_mesh` for the
            device of the parameters. Pass the same object to every call.
        cache: where the node shard stays while the parameters do not change: "none", "host", "device", or a `Cache`.
        reshard_after_forward: False keeps the unit gathered until its backward. None means False for the root, which
            backward needs first, and True for other units. FSDP2's integer is `cache="device"`.
        mp_policy: torch's own. Without `reduce_dtype`, gradients are reduced in `param_dtype`, on every torch release.
        granularity: the blocks that must stay on one rank: `laconic.rows(k)`, `elements(n)` or `whole()` for all
            parameters, a mapping of name patterns to these, or a function of (name in the unit, parameter) to elements
            per block. The planner then splits the unit into up to four buckets per kind where that saves padding.
            Default: one row, or no blocks at all if whole rows take more than 0.5 % more.
        ignored_params: parameters to leave alone.

    Raises:
        ValueError: `module` is no module, has no forward or is sharded already; a parameter is complex or not
            contiguous, is on another device than the mesh, or is tied to a parameter of another unit; the mesh, cache
            or granularity is not valid.
    """
    _check_call(module, reshard_after_forward)
    policy = Cache.of(cache)
    precision = mp_policy or MixedPrecisionPolicy()
    if mesh is None:
        mesh = init_mesh("cuda" if any(p.is_cuda for p in module.parameters()) else "cpu")
    cluster = Cluster.of(mesh)
    managed = _find_parameters(module, set(ignored_params))
    blocks = resolve(granularity, [(item.name, item.local) for item in managed])
    _check_parameters(managed, cluster)
    may_shrink = granularity is None
    buckets = [
        bucket
        for group in _group_by_kind(managed)
        for bucket in _make_buckets(group, blocks, cluster, precision, may_shrink=may_shrink)
    ]
    for item in managed:
        item.parameter._laconic_home = item.name  # type: ignore[attr-defined]  # recognises tied weights later
    unit = Unit(modules=(module,), buckets=buckets, blocks=blocks, cluster=cluster, cache=policy, precision=precision)
    unit.reshard_after_forward = reshard_after_forward
    module._laconic_unit = unit  # type: ignore[assignment]
    module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    return module


def _check_call(module: nn.Module, reshard_after_forward: bool | None) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"fully_shard takes one module, got {type(module).__name__}; put modules that shall be gathered together "
            "under a parent module, or shard each"
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"{type(module).__name__} has no forward, so nothing would ever gather it; call fully_shard on the modules "
            "in it"
        )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: laconic takes True, False or None; FSDP2's integer, which "
            "keeps a part of each parameter on the device, is cache='device' (cache='host' keeps it in host memory)"
        )
    if unit_of(module) is not None:
        raise ValueError(f"{type(module).__name__} is sharded already; call fully_shard once per module")


def _find_parameters(module: nn.Module, ignored: set[nn.Parameter]) -> list[ManagedParameter]:
    """Find the parameters below `module` that no inner unit has, each once, with all places that show it."""
    found: dict[nn.Parameter, ManagedParameter] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is None or parameter in ignored or isinstance(parameter, RaggedTensor):
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            home = getattr(parameter, "_laconic_home", None)
            if home is not None:
                raise ValueError(
                    f"{full_name} is tied to {home}, which an inner unit shards already. Tied weights must be in one "
                    "unit: do not call fully_shard on the module that holds the other one, so that this call takes "
                    "both, or untie them"
                )
            managed = found.setdefault(parameter, ManagedParameter(name=full_name, parameter=parameter))
            managed.places.append((child, name))
    return list(found.values())


def _check_parameters(managed: list[ManagedParameter], cluster: Cluster) -> None:
    for item in managed:
        parameter = item.parameter
        if not parameter.is_contiguous():
            raise ValueError(
                f"{item.name} of shape {tuple(parameter.shape)} is not contiguous (strides {parameter.stride()}); set "
                "it to nn.Parameter(param.contiguous()) before fully_shard"
            )
        if parameter.is_complex():
            raise ValueError(f"{item.name} is complex ({parameter.dtype}); laconic shards real parameters")
        if not parameter.is_meta and parameter.device.type != cluster.device_type:
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
    """Group parameters of one dtype and trainability, in order of appearance. A LoRA block has two groups.

    Each slice of partial updates is a group of its own, trained or not, so that all islands have the same buckets.
    """
    groups: dict[tuple[torch.dtype, bool, bool, int | None], list[ManagedParameter]] = {}
    for item in managed:
        parameter = item.parameter
        kind = parameter.dtype, parameter.requires_grad, parameter.is_meta, slice_of_parameter(*item.places[0])
        groups.setdefault(kind, []).append(item)
    return list(groups.values())


def _make_buckets(
    group: list[ManagedParameter],
    blocks: Blocks,
    cluster: Cluster,
    precision: MixedPrecisionPolicy,
    *,
    may_shrink: bool,
) -> list[Bucket]:
    numels = dict(zip(blocks.names, blocks.numels, strict=True))
    dtype = group[0].parameter.dtype
    compute_dtype = (precision.param_dtype if dtype.is_floating_point else None) or dtype
    reduce_dtype = precision.reduce_dtype or compute_dtype
    plan = plan_unit(
        [item.name for item in group],
        [tuple(item.local.shape) for item in group],
        [numels[item.name] for item in group],
        num_shards=cluster.size,
        itemsize=min(each.itemsize for each in (dtype, compute_dtype, reduce_dtype)),
        may_shrink=may_shrink,
    )
    warn_if_wasteful(plan, dtype.itemsize)
    return [
        Bucket(
            [group[index] for index in members],
            layout,
            cluster=cluster,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
        )
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


class ShardedModule(nn.Module):
    """A module after `fully_shard`, with FSDP2's methods. Setters with `recurse` also set all sharded modules below."""

    _laconic_unit: Unit

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

    def _units(self, recurse: bool = True) -> list[Unit]:
        return units_below(self) if recurse else [self._laconic_unit]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
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

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward sends gradients across the nodes. For gradient accumulation.

        Set it to False for all micro-batches of an optimizer step but the last. Backward then sums gradients inside the
        node only, and a rank keeps one node shard of sums, in the reduce dtype, until a backward with sync sends them.
        """
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after forward. False saves the gather in backward and costs their memory."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward. With False they are gathered again only when they change."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_reduce_once_per_backward(self, reduce_once: bool, *, recurse: bool = True) -> None:
        """Set whether a backward through several forwards reduces gradients once, at the last, or once per forward.

        Once per forward is the default, as in FSDP2: it takes the memory of one forward. Once per backward sends each
        gradient once, but keeps the weights and the unreduced gradients of the whole model until then.
        """
        for unit in self._units(recurse):
            unit.reduce_once_per_backward = reduce_once

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set the modules to gather when this forward begins. Default: those that came next in the last forward."""
        self._laconic_unit.forward_prefetch = [module._laconic_unit for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set the modules to gather when this backward begins. Default: those that came before this one in forward."""
        self._laconic_unit.backward_prefetch = [module._laconic_unit for module in modules]

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Set the divisor of summed gradients. The default is the number of ranks in the mesh's node and local axes.

        Raises:
            ValueError: `factor` is not positive or not finite.
        """
        if not factor > 0 or math.isinf(factor):
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor}")
        for unit in self._units(recurse):
            for bucket in unit.buckets:
                bucket.divide_by = factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `nn.Module.zero_grad`. Also zeroes the sharded parameters of units that are gathered now."""
        super().zero_grad(set_to_none)
        for parameter in (sharded for unit in self._units() for bucket in unit.buckets for sharded in bucket.sharded):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied, as its units and process groups exist once; copy the model "
            "before fully_shard, or keep copies of the parameters (copy.deepcopy(param) works)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._laconic_unit.apply(fn, functools.partial(super()._apply, fn, recurse))
        return self
