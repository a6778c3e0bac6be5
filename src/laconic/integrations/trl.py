"""TRL's trainers with a sharded model: import them from here in place of `trl`.

Each takes one argument more, `laconic=LaconicArguments(...)`. Adapters, and a reference model if there is one, are
sharded as well. Any other trainer of TRL works in the same way: `class MyTrainer(LaconicMixin, trl.KTOTrainer)`.
"""

import trl

from laconic.integrations.transformers import LaconicArguments, LaconicMixin

__all__ = ["DPOTrainer", "GRPOTrainer", "LaconicArguments", "RewardTrainer", "SFTTrainer"]


class SFTTrainer(LaconicMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with a sharded model; see `LaconicMixin`."""


class DPOTrainer(LaconicMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with a sharded model and a sharded reference model; see `LaconicMixin`."""


class GRPOTrainer(LaconicMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with a sharded model and a sharded reference model; see `LaconicMixin`.

    Without `rollout_func` all ranks generate with the sharded model, and gather each layer for each token. With it they
    take completions from where you like, such as a sampler that reads published versions: `examples/grpo.py`.
    """


class RewardTrainer(LaconicMixin, trl.RewardTrainer):
    """`trl.RewardTrainer` with a sharded model; see `LaconicMixin`."""
