"""The public names, each imported from its home: `laconic.__getattr__` reads this file, and so do type checkers."""

from laconic.comm.cluster import Cluster as Cluster
from laconic.comm.cluster import default_mesh as default_mesh
from laconic.comm.cluster import init_mesh as init_mesh
from laconic.cyclic.runtime import CyclicDataParallel as CyclicDataParallel
from laconic.guard.audit import audit as audit
from laconic.guard.reporting import CorruptionError as CorruptionError
from laconic.hf.saving import load_safetensors as load_safetensors
from laconic.hf.saving import save_safetensors as save_safetensors
from laconic.islands.fragments import SyncSchedule as SyncSchedule
from laconic.islands.local_steps import LocalSteps as LocalSteps
from laconic.islands.policies import Coding as Coding
from laconic.islands.policies import Membership as Membership
from laconic.islands.policies import OuterSGD as OuterSGD
from laconic.islands.policies import SyncPolicy as SyncPolicy
from laconic.islands.policies import outer_sgd as outer_sgd
from laconic.layers.linear import quantize_ as quantize_
from laconic.layers.scaled import ScaledFormat as ScaledFormat
from laconic.layers.scaled_training import convert_to_scaled_training as convert_to_scaled_training
from laconic.layout.granularity import Block as Block
from laconic.layout.granularity import elements as elements
from laconic.layout.granularity import rows as rows
from laconic.layout.granularity import whole as whole
from laconic.optim.ema import EMA as EMA
from laconic.partial.updates import assign_slice as assign_slice
from laconic.partial.updates import partial_updates as partial_updates
from laconic.partial.updates import unsliced as unsliced
from laconic.partial.updates import unsliced_state_dict as unsliced_state_dict
from laconic.ragged.tensor import RaggedTensor as RaggedTensor
from laconic.shard.api import fully_shard as fully_shard
from laconic.shard.policies import Cache as Cache
from laconic.shard.policies import Checks as Checks
from laconic.shard.policies import Placement as Placement
from laconic.shard.policies import Prefetch as Prefetch
from laconic.shard.policies import Wire as Wire
from laconic.shard.sharded_module import ShardedModule as ShardedModule

__version__: str
