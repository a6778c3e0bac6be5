"""`fully_shard` and the class it gives a module: FSDP2's call, FSDP2's method names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.comm.cluster import Cluster, init_mesh
from laconic.comm.traffic import Traffic
from laconic.layout.granularity import Blocks, Granularity, resolve
from laconic.layout.planner import plan_unit, warn_if_wasteful
from laconic.ragged.dtensor import local_part
from laconic.ragged.parts import slice_of_parameter
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket, Managed
from laconic.shard.cache import Cache, Where
from laconic.shard.ledger import MemoryReport
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
    """Shard `module`'s parameters over the mesh, in place; it becomes one unit, gathered and freed as one.

    Call it bottom up: on each block first, on the whole model last. Parameters that an inner call has taken are left to
    it. The module's class becomes a `ShardedModule`; parameter names stay; parameters become `RaggedTensor`s.

    Args:
        module: the module to shard; may be on the meta device (then `to_empty` and initialise it afterwards).
        mesh: (island, node, local), (node, local), or one axis, which is one level. Default: `init_mesh` for the device
            of the parameters. Pass the same object to every call.
        cache: where the unit's slice rests between forward and backward, and between steps while its parameters stay
            the same: "none", "host", "device", or a `Cache`.
        reshard_after_forward: False keeps the unit gathered until its backward. None means True, but False for the
            root, which backward needs first. FSDP2's integer is `cache="device"`.
        mp_policy: torch's own. Without `reduce_dtype`, gradients are reduced in `param_dtype`, on every torch release.
        granularity: what must not be cut: `laconic.rows(k)`, `elements(n)` or `whole()` for all parameters, a mapping
            of name patterns to these, or a function of (name in the unit, parameter) to elements per block. The planner
            then splits the unit into up to four buckets where that saves padding. Default: one row, and anywhere if
            whole rows would take more than 0.5 % more.
        ignored_params: parameters to leave alone.

    Returns:
        `module`.

    Raises:
        ValueError: the module is sharded already; a parameter is not contiguous, or on another device than the mesh, or
            tied to a parameter of another unit; a bad mesh, cache or granularity.
    """
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
            "keeps a slice on the device, is cache='device' (and cache='host' keeps it in host memory instead)"
        )
    if unit_of(module) is not None:
        raise ValueError(f"{type(module).__name__} is sharded already; call fully_shard once per module")
    policy = Cache.of(cache)
    precision = mp_policy or MixedPrecisionPolicy()
    if mesh is None:
        mesh = init_mesh("cuda" if any(p.is_cuda for p in module.parameters()) else "cpu")
    cluster = Cluster.of(mesh)
    managed, blocks = _managed_parameters(module, set(ignored_params), granularity)
    _check(managed, cluster)
    buckets = [
        Bucket(part, cluster=cluster, compute_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
        for group in _by_kind(managed)
        for part in _planned(group, cluster, precision, may_shrink=granularity is None)
    ]
    for item in managed:
        item.parameter._laconic_home = item.name  # type: ignore[attr-defined]  # recognises tied weights later
    unit = Unit(
        module,
        type(module).__name__,
        buckets,
        cluster=cluster,
        cache=policy,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
    )
    module._laconic_unit = unit  # type: ignore[assignment]
    module._laconic_blocks = blocks  # type: ignore[assignment]
    module.__class__ = _sharded_class(type(module))
    return module


def _managed_parameters(
    module: nn.Module, ignored: set[nn.Parameter], granularity: Granularity | None
) -> tuple[list[Managed], Blocks]:
    """The parameters below `module` that no inner unit has, each once, with all the places that show it."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
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
            places.setdefault(parameter, []).append((child, name, full_name))
    blocks = resolve(granularity, [(shown[0][2], local_part(parameter)) for parameter, shown in places.items()])
    managed = [
        Managed(name=name, parameter=parameter, block=block, places=tuple((child, key) for child, key, _ in shown))
        for name, block, (parameter, shown) in zip(blocks.names, blocks.numels, places.items(), strict=True)
    ]
    return managed, blocks


def _check(managed: list[Managed], cluster: Cluster) -> None:
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


def _by_kind(managed: list[Managed]) -> list[list[Managed]]:
    """Buckets: tensors of one dtype and trainability, in order of appearance. A LoRA block has two.

    Slices of partial updates are told apart whether they train or not, so that all islands have the same buckets.
    """
    groups: dict[tuple[torch.dtype, bool, bool, int | None], list[Managed]] = {}
    for item in managed:
        parameter = item.parameter
        slice = slice_of_parameter(*item.places[0])
        kind = parameter.dtype, parameter.requires_grad, parameter.is_meta, slice
        groups.setdefault(kind, []).append(item)
    return list(groups.values())


def _planned(
    group: list[Managed], cluster: Cluster, precision: MixedPrecisionPolicy, *, may_shrink: bool
) -> list[list[Managed]]:
    """The parameters of each bucket, in order, with the blocks they were planned with."""
    dtype = group[0].parameter.dtype
    dtypes = [dtype, precision.param_dtype, precision.reduce_dtype] if dtype.is_floating_point else [dtype]
    plan = plan_unit(
        [item.name for item in group],
        [item.shape for item in group],
        [item.block for item in group],
        num_shards=cluster.size,
        itemsize=min(each.itemsize for each in dtypes if each is not None),
        may_shrink=may_shrink,
    )
    warn_if_wasteful(plan, dtype.itemsize)
    return [
        [replace(group[index], block=slot.block) for index, slot in zip(part, bucket.slots, strict=True)]
        for part, bucket in zip(plan.members, plan.buckets, strict=True)
    ]


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _SHARDED_CLASSES:
        # The module's name too: transformers knows its own models by it, and initialises custom ones differently.
        names = {"__module__": cls.__module__}
        _SHARDED_CLASSES[cls] = type(f"Sharded{cls.__name__}", (ShardedModule, cls), names)
    return _SHARDED_CLASSES[cls]


_SHARDED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class UnshardHandle:
    """A gather under way, from `unshard(async_op=True)`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return with the parameters gathered."""
        self._unit.unshard()


class ShardedModule(nn.Module):
    """What `fully_shard` makes of a module's class. Setters with `recurse` apply to all units below as well."""

    _laconic_unit: Unit
    _laconic_blocks: Blocks

    @property
    def traffic(self) -> Traffic:
        """The byte counters of this rank in this module's mesh."""
        return self._laconic_unit.cluster.traffic

    def memory(self) -> MemoryReport:
        """What the engine holds for this root module, on this rank."""
        context = self._laconic_unit.context
        if context is None:
            shards = sum(bucket.shard.nbytes for unit in self._units() for bucket in unit.buckets)
            return MemoryReport(device_bytes=shards, device_peak_bytes=shards, host_bytes=0)
        return context.ledger.report()

    def reset_peak_memory(self) -> None:
        """Start a new `device_peak_bytes` from what is held now."""
        if self._laconic_unit.context is not None:
            self._laconic_unit.context.ledger.reset_peak()

    def _units(self, recurse: bool = True) -> list[Unit]:
        if not recurse:
            return [self._laconic_unit]
        return units_below(self)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters, and with `async_op` return at once a handle to wait on. Collective."""
        if async_op:
            self._laconic_unit.gather.begin()
            return UnshardHandle(self._laconic_unit)
        self._laconic_unit.unshard()
        return None

    def reshard(self) -> None:
        """Give this unit's gathered parameters' memory back."""
        self._laconic_unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, backward sums gradients inside the node only; the next one with True sends the sums across nodes.

        Set it to False for all micro-batches of an optimizer step but the last. Costs one slice of the gradients, in
        the reduce dtype, between the micro-batches.
        """
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """With False, keep units gathered between forward and backward: no second gather, at the cost of their
        memory."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """With False, keep units gathered from one micro-batch to the next; they are gathered anew when they change."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Gather these units while this one computes forward, instead of the one that followed last time."""
        self._laconic_unit.forward_prefetch = [module._laconic_unit for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Gather these units while this one computes backward, instead of the one that ran before it in forward."""
        self._laconic_unit.backward_prefetch = [module._laconic_unit for module in modules]

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Divide summed gradients by `factor` instead of the number of ranks."""
        if not factor > 0 or math.isinf(factor):
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor}")
        for unit in self._units(recurse):
            for bucket in unit.buckets:
                bucket.divide_by = factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`, also while units are kept gathered and `parameters()` are not the trained ones."""
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
        self._laconic_unit.apply(fn, partial(super()._apply, fn, recurse))
        return self


__all__ = ["Cache", "ShardedModule", "UnshardHandle", "fully_shard"]
