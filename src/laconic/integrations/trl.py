"""TRL's trainers with a sharded model: import them from here in place of `trl`.

Each takes one argument more, `laconic=LaconicArguments(...)`. Adapters, and a reference model if there is one, are
sharded as well. Any other trainer of TRL works in the same way: `class MyTrainer(LaconicMixin, trl.KTOTrainer)`.
"""

import trl

from laconic.integrations.transformers import LaconicArguments, LaconicMixin

__all__ = ["DPOTrainer", "LaconicArguments", "RewardTrainer", "SFTTrainer"]


class SFTTrainer(LaconicMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with a sharded model; see `LaconicMixin`."""


class DPOTrainer(LaconicMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with a sharded model and a sharded reference model; see `LaconicMixin`."""


class RewardTrainer(LaconicMixin, trl.RewardTrainer):
    """`trl.RewardTrainer` with a sharded model; see `LaconicMixin`."""
