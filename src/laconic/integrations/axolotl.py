"""A plugin for axolotl: its trainers with a sharded model.

In axolotl's YAML file:

    plugins: [laconic.integrations.axolotl.LaconicPlugin]
    laconic: {cache: host}            # the fields of LaconicArguments; may be left out

Written and tested against the interface that `axolotl.integrations.base.BasePlugin` of axolotl 0.19.0 declares. That
release pins older releases of transformers and TRL than laconic's tests run with, so no test runs axolotl itself.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from laconic.integrations.options import ArgumentError, LaconicArguments
from laconic.integrations.sharding import refuse_quantised
from laconic.integrations.transformers import laconic_trainer


class LaconicInput(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    laconic: dict[str, Any] | None = None
    """The fields of `LaconicArguments`."""


class LaconicPlugin(BasePlugin):
    """Lets axolotl train with laconic, started by `axolotl train --launcher torchrun`, without FSDP and DeepSpeed."""

    def get_input_args(self) -> str:
        """Return the dotted name of the configuration's new keys."""
        return f"{__name__}.LaconicInput"

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return axolotl's own trainer, or its reward trainer, with a sharded model.

        Raises:
            ArgumentError: the configuration asks for reinforcement learning, for whose trainers axolotl gives plugins
                no model, or for a value that `LaconicArguments` refuses.
        """
        if cfg.rl:
            raise ArgumentError(
                f"rl: {cfg.rl} does not work with the plugin, as axolotl passes no model to a plugin's trainer then; "
                "use laconic.integrations.trl in a script of your own"
            )
        from axolotl.core import trainers

        cls = trainers.AxolotlRewardTrainer if cfg.reward_model else trainers.AxolotlTrainer
        return laconic_trainer(cls, LaconicArguments(**dict(cfg.laconic or {})))

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Refuse quantised weights before axolotl prepares its data.

        Raises:
            ArgumentError: the weights are quantised.
        """
        refuse_quantised(model)
