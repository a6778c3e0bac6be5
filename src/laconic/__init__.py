"""Data-parallel training for PyTorch that says little on the wire."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from laconic.codec.linear import quantize_
from laconic.comm.cluster import Cluster, default_mesh, init_mesh
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.islands.local_steps import LocalSteps
from laconic.islands.membership import Membership
from laconic.islands.outer_optimizer import outer_sgd
from laconic.layout.granularity import Block, elements, rows, whole
from laconic.optim.ema import EMA
from laconic.partial.updates import assign_slice, partial_updates, unsliced, unsliced_state_dict
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.api import fully_shard
from laconic.shard.audit import audit
from laconic.shard.cache import Cache
from laconic.shard.checks import Checks, CorruptionError
from laconic.shard.sharded_module import ShardedModule, overrides
from laconic.shard.wire import Wire

if TYPE_CHECKING:
    from laconic.hf.safetensors_folder import load_safetensors, save_safetensors

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "Block",
    "Cache",
    "Checks",
    "Cluster",
    "CorruptionError",
    "CyclicDataParallel",
    "LocalSteps",
    "Membership",
    "RaggedTensor",
    "ShardedModule",
    "Wire",
    "assign_slice",
    "audit",
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

_LAZY = {
    "load_safetensors": "laconic.hf.safetensors_folder",
    "save_safetensors": "laconic.hf.safetensors_folder",
}
"""Names that need packages besides torch, with their modules: `import laconic` needs torch alone."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def _save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
    """Save a sharded transformers or peft model; see `laconic.hf.saving.save_pretrained`. Collective."""
    return import_module("laconic.hf.saving").save_pretrained(model, *args, **options)


def _push_to_hub(model: Any, *args: Any, **options: Any) -> Any:
    """Push a sharded transformers or peft model; see `laconic.hf.saving.push_to_hub`. Collective."""
    return import_module("laconic.hf.saving").push_to_hub(model, *args, **options)


overrides.update(save_pretrained=_save_pretrained, push_to_hub=_push_to_hub)
