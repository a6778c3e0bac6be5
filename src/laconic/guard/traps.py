"""Mistakes that would train nothing, or something else: found in the first forward of a root, and named.

[Note: Traps]
`fully_shard` replaces parameters. An optimizer that was built before holds the old ones, and trains nothing. A
parameter that was added afterwards, such as an adapter, is in no unit: each rank trains its own copy. And each rank
keeps its part of the weights that it began with: if the ranks began with different ones, the model is a mixture of
them. None of these raises an error by itself, so a root looks for them in its first forward. That costs one pass over
the weights when they are cut, and one small message. Later, a forward looks for added parameters only if modules or
parameters were registered somewhere since the forward before. An optimizer's first step looks at its parameters: its
wrapper may still exchange them until then.

[Note: Replaced parameters]
`load_state_dict(assign=True)` replaces parameters, and so does code such as `module.weight = nn.Parameter(...)`. The
sharded parameters take the values of those that took their places, and go on to train.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel

from laconic.comm.agreement import ranks_or_self
from laconic.comm.cluster import Cluster
from laconic.errors import RanksDifferError
from laconic.guard.checksum import digest_of
from laconic.guard.reporting import by_cluster
from laconic.ragged.steps import HOME, OptimizerStep, before_step
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket, ManagedParameter
from laconic.shard.full import refuse_transform
from laconic.shard.unit import Origin, is_left_alone, unit_of, units_below

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
"""Modules of torch that train a model data-parallel themselves: they and sharded modules refuse each other."""
_ADAPTED = "base_layer"
"""The name that peft's adapters give to the layer that they adapt."""
_STATES_OF_TORCHAO = "_new_buffer"
"""The method by which torchao's optimizers make states in few bits."""
_SHOWN = 3
"""The names in a message."""
_LOOKED = "_laconic_looked"
"""The attribute of the optimizers whose parameters were looked at."""


class Strays:
    """The trainable parameters below one root that no unit has: [Note: Traps]."""

    def __init__(self, modules: Sequence[nn.Module], origins: Sequence[Origin], buckets: Sequence[Bucket]) -> None:
        """Look for them, and warn."""
        self._modules, self._origins, self._buckets = modules, origins, buckets
        self._num_strays, self._registered = 0, -1
        self.look_again()

    def look_again(self) -> None:
        """Warn if there are more than at the last look. It takes a microsecond if nothing was registered since then."""
        if self._registered == _registrations.count:
            return
        self._registered = _registrations.count
        known = {identity for origin in self._origins for identity in origin.ignored()}
        known |= {id(parameter) for bucket in self._buckets for parameter in bucket.full.parameters}
        strays = [
            name
            for module in self._modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, RaggedTensor) and id(parameter) not in known
        ]
        if len(strays) > self._num_strays:
            warnings.warn(
                f"{len(strays)} trainable parameters, such as {strays[0]}, were added after fully_shard: no unit has "
                "them, and each rank trains a copy of its own. Add them before fully_shard, or give them in "
                "ignored_params and sum their gradients over the ranks yourself",
                stacklevel=2,
            )
        self._num_strays = len(strays)


class _Registrations:
    """Counts the modules and parameters that are registered anywhere in this process, but for sharded modules.

    All below a sharded module is known, and a slice of a `ModuleList`, which the models of transformers take in each
    forward, registers its layers again.
    """

    count = 0

    def __call__(self, module: nn.Module, name: str, registered: Any) -> None:
        if not isinstance(registered, nn.Module) or unit_of(registered) is None:
            self.count += 1


_registrations = _Registrations()
register_module_module_registration_hook(_registrations)
register_module_parameter_registration_hook(_registrations)


@before_step
def _look_at_optimizer(step: OptimizerStep) -> None:
    """Refuse parameters that `fully_shard` has replaced, and states that nobody can cut, at the first step."""
    optimizer = step.optimizer
    if hasattr(optimizer, _LOOKED):
        return
    # LBFGS steps those of `_params`, although others may be in its group now
    parameters = [*step.parameters, *getattr(optimizer, "_params", [])]
    names = [name for parameter in parameters if (name := getattr(parameter, HOME, None)) is not None]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(names)} parameters that fully_shard has replaced, such as "
            f"{names[0]}: it trains nothing. Build the optimizer after fully_shard, from model.parameters()"
        )
    if hasattr(optimizer, _STATES_OF_TORCHAO) and step.ragged:
        raise TypeError(
            f"{type(optimizer).__name__} of torchao keeps its states as DTensors of torch, which are not cut inside "
            "rows: use laconic.optim.AdamW8bit"
        )
    _warn_of_copies(optimizer, parameters)
    if step.ragged and not step.has_closure and all(parameter.grad is None for parameter in step.parameters):
        warnings.warn(
            f"the first step of {type(optimizer).__name__} trains nothing, as no parameter has a .grad: call "
            "backward() before it, in a micro-batch that syncs, without inputs=, which reaches no sharded parameter",
            stacklevel=2,
        )
    setattr(optimizer, _LOOKED, True)


def _warn_of_copies(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Warn of plain parameters beside sharded ones: nobody sums their gradients, as no unit has them."""
    clusters = [parameter.spec.cluster for parameter in parameters if isinstance(parameter, RaggedTensor)]
    copies = [
        parameter
        for parameter in parameters
        if parameter.requires_grad and not isinstance(parameter, DTensor) and not is_left_alone(parameter)
    ]
    if copies and any(cluster.all_flag_group is not None for cluster in clusters):
        names = {
            id(parameter): name
            for group in optimizer.param_groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
        }
        which = ", ".join(names.get(id(each), f"one of shape {tuple(each.shape)}") for each in copies[:_SHOWN])
        warnings.warn(
            f"{type(optimizer).__name__} trains {len(copies)} parameters that no unit has, such as {which}, beside "
            "sharded ones: each rank trains a copy of its own, if nothing else sums their gradients. Call fully_shard "
            "on the module that contains all of them as well, or give them in ignored_params",
            stacklevel=2,
        )


_first_weights: WeakKeyDictionary[Bucket, tuple[int | None, int]] = WeakKeyDictionary()
"""The digest of the whole weights that this rank gave, None if they were on the meta device, and their version."""


def note_first_weights(bucket: Bucket, whole: Iterable[Tensor]) -> None:
    """Note the weights that this rank gave `fully_shard`."""
    _first_weights[bucket] = digest_of(whole), bucket.stored.version


def refuse_unequal_weights(buckets: Sequence[Bucket]) -> None:
    """Refuse weights that differed between ranks when they were cut, unless they were overwritten since. Collective.

    Raises:
        RanksDifferError: ranks gave `fully_shard` different weights; on all of them.
    """
    for cluster, members in by_cluster(buckets).items():
        digests = [
            digest if bucket.stored.version == version else None
            for bucket in members
            for digest, version in [_first_weights[bucket]]
        ]
        for bucket, by_rank in zip(members, _on_all_ranks(cluster, digests), strict=True):
            if None not in by_rank and len(set(by_rank)) > 1:
                numbers = dist.get_process_group_ranks(cluster.all_flag_group)
                other = next(place for place, digest in enumerate(by_rank) if digest != by_rank[0])
                raise RanksDifferError(
                    f"ranks gave fully_shard different weights: rank {numbers[other]} has others than rank "
                    f"{numbers[0]}, as of {bucket.layout.slots[0].name} of {bucket.unit_name}, and they would train a "
                    "mixture of them. Build the model from one seed on all ranks (torch.manual_seed), load a state "
                    "dict, or call fully_shard(..., broadcast=True)"
                )


def warn_of_overwritten_values(managed: Sequence[ManagedParameter]) -> None:
    """Name the parameters that are about to lose what this rank has, where others are equal on all ranks. Collective.

    Weights that came from one checkpoint are equal; those that differ beside them are either new ones, drawn by each
    rank, or experts of its own. What is drawn differs everywhere but in constants, which say nothing.
    """
    for cluster, members in by_cluster(managed).items():
        are_equal = [
            len(set(by_rank)) == 1 for by_rank in _on_all_ranks(cluster, [digest_of([item.local]) for item in members])
        ]
        differing = [item.name for item, is_equal in zip(members, are_equal, strict=True) if not is_equal]
        equal = [item for item, is_equal in zip(members, are_equal, strict=True) if is_equal]
        is_first = dist.get_rank() == min(cluster.ranks)
        if differing and is_first and not all(_is_constant(item.local) for item in equal):
            warnings.warn(
                f"broadcast=True gives all ranks the first rank's values of {len(differing)} parameters that differ "
                f"between ranks, such as {differing[0]}; {len(equal)} others are equal. If ranks hold parts of their "
                "own, such as experts, give these in ignored_params, or as DTensors on a mesh of their own",
                stacklevel=2,
            )


def _on_all_ranks(cluster: Cluster, digests: list[int | None]) -> list[tuple[int | None, ...]]:
    """Each digest as all ranks of all islands have it. Collective."""
    return list(zip(*ranks_or_self(cluster.all_flag_group).gather(digests), strict=True))


def _is_constant(value: Tensor) -> bool:
    flat = value.detach().reshape(-1)
    return value.is_meta or bool((flat == flat[:1]).all())


def check_modules(module: nn.Module) -> None:
    """Check that nothing in a module that is about to be sharded trains data-parallel already, or edits its weights.

    Raises:
        ValueError: a module is a wrapper of torch's, or FSDP2 has sharded it; or an embedding has `max_norm`.
    """
    for name, child in module.named_modules():
        where = f"{name}, a module of {type(module).__name__}," if name else "the module"
        if isinstance(child, _WRAPPERS):
            raise ValueError(
                f"fully_shard shards plain modules, but {where} is wrapped in {type(child).__name__}: take the wrapper "
                "away, as laconic sums the gradients itself"
            )
        if unit_of(child) is None and isinstance(child, FSDPModule):
            raise ValueError(
                f"fully_shard shards plain modules, but {where} was sharded by torch's own fully_shard: call one of "
                "the two on the whole model"
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            raise ValueError(
                f"{name or 'the module'} has max_norm={child.max_norm}: its forward edits the gathered weight, and the "
                "sharded one would stay as it is. Leave max_norm out, and scale the rows of the sharded weight under "
                "torch.no_grad() after the optimizer's step"
            )


def _refuse_as_child(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse a sharded module in a wrapper of torch's or in an adapter of peft's. Their constructors come here."""
    if isinstance(parent, _WRAPPERS) and child is not None and _is_sharded(child):
        raise TypeError(
            f"{type(parent).__name__} cannot wrap a model that laconic.fully_shard has sharded. Use the sharded model "
            "as it is: laconic runs it data-parallel and sums the gradients itself"
        )
    if name == _ADAPTED and child is not None and _is_sharded(child):
        raise TypeError(
            f"{type(parent).__name__} would adapt a layer that fully_shard has sharded, and no unit would have the "
            "adapter: add adapters before fully_shard"
        )


def _is_sharded(module: nn.Module) -> bool:
    return bool(units_below(module)) or any(isinstance(parameter, RaggedTensor) for parameter in module.parameters())


_hook: Any = _refuse_as_child
register_module_module_registration_hook(_hook)


@torch.no_grad()
def take_values(bucket: Bucket) -> list[str]:
    """Copy from the parameters that replaced sharded ones, and show the sharded ones again. Returns their names.

    Collective if a replacement is a DTensor.

    Raises:
        RuntimeError: a replacement has another shape or dtype, or is one of a torch.func transform; or the shard is on
            the meta device, and some parameters of the bucket have no replacement. The sharded parameters are shown.
    """
    new = _replacements(bucket)
    for places, sharded in zip(bucket.places.each, bucket.sharded, strict=True):
        for module, name in places:
            if module._parameters.get(name) is not None:
                module._parameters[name] = sharded
    names = {index: bucket.layout.slots[index].name for index in new}
    for index, parameter in new.items():
        refuse_transform(parameter, names[index])
        shape = bucket.sharded[index].shape
        if parameter.dtype != bucket.dtype or parameter.shape != shape:
            raise RuntimeError(
                f"{names[index]}, {bucket.dtype} of shape {tuple(shape)}, cannot become {parameter.dtype} of shape "
                f"{tuple(parameter.shape)} after fully_shard; convert the state dict"
            )
    new = {index: parameter for index, parameter in new.items() if not parameter.is_meta}
    if new and bucket.shard.is_meta:
        missing = [slot.name for index, slot in enumerate(bucket.layout.slots) if index not in new]
        if missing:
            raise RuntimeError(
                f"{', '.join(names.values())} got values, but not {', '.join(missing)}, which share a bucket on the "
                "meta device; call to_empty first, or load or assign them all at once"
            )
        bucket.convert(lambda shard: torch.zeros_like(shard, device=bucket.cluster.device))
    for index, parameter in new.items():
        bucket.sharded[index].copy_(parameter)
    return list(names.values())


def refuse_ties(buckets: Sequence[Bucket]) -> None:
    """Refuse a sharded parameter in the place of another one: they would train as two.

    Raises:
        RuntimeError: there is one.
    """
    names = {
        id(parameter): f"{slot.name} of {bucket.unit_name}"
        for bucket in buckets
        for parameter, slot in zip(bucket.sharded, bucket.layout.slots, strict=True)
    }
    for bucket in buckets:
        for index, other in _replacements(bucket).items():
            if id(other) in names:
                raise RuntimeError(
                    f"{bucket.layout.slots[index].name} of {bucket.unit_name} was tied to {names[id(other)]} after "
                    "fully_shard, and they would train as two parameters: tie them before fully_shard, both in one unit"
                )


def take_values_and_warn(bucket: Bucket) -> None:
    """Take the values of replacements that came without `load_state_dict`, and warn.

    Raises:
        RuntimeError: see `take_values`.
    """
    names = take_values(bucket)
    if names:
        warnings.warn(
            f"{', '.join(names)} replaced sharded parameters after fully_shard: their values were taken, and the "
            "sharded parameters train. An optimizer that holds the replacements trains nothing: build it from "
            "model.parameters() now, or copy with param.copy_(value) instead of replacing",
            stacklevel=2,
        )


def _replacements(bucket: Bucket) -> dict[int, nn.Parameter]:
    """The parameters that modules show in place of sharded ones, by index."""
    found = {}
    for index, (places, sharded) in enumerate(zip(bucket.places.each, bucket.sharded, strict=True)):
        shown = (module._parameters.get(name) for module, name in places)
        other = next((parameter for parameter in shown if parameter is not None and parameter is not sharded), None)
        if other is not None:
            found[index] = other
    return found
