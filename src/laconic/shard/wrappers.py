"""Modules of torch that train a model data-parallel themselves: they and sharded modules refuse each other."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from laconic.ragged.tensor import RaggedTensor
from laconic.shard.unit import unit_of, units_below

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)


def check_unwrapped(module: nn.Module) -> None:
    """Check that nothing in a module that is about to be sharded trains data-parallel already.

    Raises:
        ValueError: a module is a wrapper of torch's, or FSDP2 has sharded it.
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


def _refuse_inside_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse a sharded module that becomes the child of a wrapper. The constructors of wrappers come here."""
    if isinstance(parent, _WRAPPERS) and child is not None and _is_sharded(child):
        raise TypeError(
            f"{type(parent).__name__} cannot wrap a model that laconic.fully_shard has sharded. Use the sharded model "
            "as it is: laconic runs it data-parallel and sums the gradients itself"
        )


def _is_sharded(module: nn.Module) -> bool:
    return bool(units_below(module)) or any(isinstance(parameter, RaggedTensor) for parameter in module.parameters())


_hook: Any = _refuse_inside_wrapper
register_module_module_registration_hook(_hook)
