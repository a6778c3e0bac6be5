"""Data-parallel training for PyTorch that says little on the wire."""

from laconic.cluster import Cluster, init_mesh
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.islands.local_steps import LocalSteps
from laconic.islands.partial import assign_slice, partial_updates, unsliced, unsliced_state_dict
from laconic.shard.api import ShardedModule, fully_shard
from laconic.shard.cache import Cache
from laconic.shard.granularity import Block, elements, rows, whole
from laconic.shard.tensor import RaggedTensor

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Cache",
    "Cluster",
    "CyclicDataParallel",
    "LocalSteps",
    "RaggedTensor",
    "ShardedModule",
    "assign_slice",
    "elements",
    "fully_shard",
    "init_mesh",
    "partial_updates",
    "rows",
    "unsliced",
    "unsliced_state_dict",
    "whole",
]
