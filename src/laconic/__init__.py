"""Data-parallel training for PyTorch that says little on the wire."""

from laconic.comm.cluster import Cluster, default_mesh, init_mesh
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.islands.local_steps import LocalSteps
from laconic.layout.granularity import Block, elements, rows, whole
from laconic.partial.updates import assign_slice, partial_updates, unsliced, unsliced_state_dict
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.api import fully_shard
from laconic.shard.cache import Cache
from laconic.shard.sharded_module import ShardedModule

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
    "default_mesh",
    "elements",
    "fully_shard",
    "init_mesh",
    "partial_updates",
    "rows",
    "unsliced",
    "unsliced_state_dict",
    "whole",
]
