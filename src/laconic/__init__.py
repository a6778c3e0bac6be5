"""Data-parallel training for PyTorch that says little on the wire."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from laconic.shard import extension

if TYPE_CHECKING:  # at run time, `__getattr__` imports a name when it is first used
    from laconic.codec.linear import quantize_
    from laconic.codec.scaled import ScaledFormat
    from laconic.codec.scaled_linear import convert_to_scaled_training
    from laconic.comm.cluster import Cluster, default_mesh, init_mesh
    from laconic.cyclic.runtime import CyclicDataParallel
    from laconic.guard.audit import audit
    from laconic.guard.inspection import CorruptionError
    from laconic.hf.saving import load_safetensors, save_safetensors
    from laconic.islands.fragments import SyncSchedule
    from laconic.islands.local_steps import LocalSteps
    from laconic.islands.policies import Coding, Membership, OuterSGD, SyncPolicy, outer_sgd
    from laconic.layout.granularity import Block, elements, rows, whole
    from laconic.optim.ema import EMA
    from laconic.partial.updates import assign_slice, partial_updates, unsliced, unsliced_state_dict
    from laconic.ragged.tensor import RaggedTensor
    from laconic.shard.api import fully_shard
    from laconic.shard.policies import Cache, Checks, Placement, Prefetch, Wire
    from laconic.shard.sharded_module import ShardedModule

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "Block",
    "Cache",
    "Checks",
    "Cluster",
    "Coding",
    "CorruptionError",
    "CyclicDataParallel",
    "LocalSteps",
    "Membership",
    "OuterSGD",
    "Placement",
    "Prefetch",
    "RaggedTensor",
    "ScaledFormat",
    "ShardedModule",
    "SyncPolicy",
    "SyncSchedule",
    "Wire",
    "assign_slice",
    "audit",
    "convert_to_scaled_training",
    "default_mesh",
    "elements",
    "fully_shard",
    "init_mesh",
    "load_safetensors",
    "outer_sgd",
    "partial_updates",
    "quantize_",
    "rows",
    "save_safetensors",
    "unsliced",
    "unsliced_state_dict",
    "whole",
]

_HOMES = {
    "Block": "laconic.layout.granularity",
    "Cache": "laconic.shard.policies",
    "Checks": "laconic.shard.policies",
    "Cluster": "laconic.comm.cluster",
    "Coding": "laconic.islands.policies",
    "OuterSGD": "laconic.islands.policies",
    "SyncPolicy": "laconic.islands.policies",
    "SyncSchedule": "laconic.islands.fragments",
    "outer_sgd": "laconic.islands.policies",
    "CorruptionError": "laconic.guard.inspection",
    "CyclicDataParallel": "laconic.cyclic.runtime",
    "EMA": "laconic.optim.ema",
    "LocalSteps": "laconic.islands.local_steps",
    "Membership": "laconic.islands.policies",
    "Placement": "laconic.shard.policies",
    "Prefetch": "laconic.shard.policies",
    "RaggedTensor": "laconic.ragged.tensor",
    "ScaledFormat": "laconic.codec.scaled",
    "ShardedModule": "laconic.shard.sharded_module",
    "Wire": "laconic.shard.policies",
    "assign_slice": "laconic.partial.updates",
    "audit": "laconic.guard.audit",
    "convert_to_scaled_training": "laconic.codec.scaled_linear",
    "default_mesh": "laconic.comm.cluster",
    "elements": "laconic.layout.granularity",
    "fully_shard": "laconic.shard.api",
    "init_mesh": "laconic.comm.cluster",
    "load_safetensors": "laconic.hf.saving",
    "partial_updates": "laconic.partial.updates",
    "quantize_": "laconic.codec.linear",
    "rows": "laconic.layout.granularity",
    "save_safetensors": "laconic.hf.saving",
    "unsliced": "laconic.partial.updates",
    "unsliced_state_dict": "laconic.partial.updates",
    "whole": "laconic.layout.granularity",
}
"""The module of each public name. `import laconic` itself imports no torch: a command checks its arguments and its job
description first, and a mistake there is told at once. `load_safetensors` and `save_safetensors` need the package
safetensors; all other names need torch alone."""


def __getattr__(name: str) -> Any:
    """Import a public name, or a room, when it is first used."""
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"laconic.{name}") is not None:
        return import_module(f"laconic.{name}")
    raise AttributeError(f"module 'laconic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
    """Save a sharded transformers or peft model; see `laconic.hf.saving.save_pretrained`. Collective."""
    return import_module("laconic.hf.saving").save_pretrained(model, *args, **options)


def _push_to_hub(model: Any, *args: Any, **options: Any) -> Any:
    """Push a sharded transformers or peft model; see `laconic.hf.saving.push_to_hub`. Collective."""
    return import_module("laconic.hf.saving").push_to_hub(model, *args, **options)


extension.overrides.update(save_pretrained=_save_pretrained, push_to_hub=_push_to_hub)


def _guard() -> Any:
    """The observer of the engine: the engine does not know the room above it that looks for mistakes and damage."""
    return import_module("laconic.guard.guard").Guard


extension.observer_class = _guard
