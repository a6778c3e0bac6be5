"""The accelerators with which accelerate's scripts run."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from laconic.integrations import LaconicArguments
from laconic.integrations.accelerate import LaconicAccelerator


class FSDP2Accelerator(Accelerator):
    """accelerate's own with its plugin for FSDP2, also on the CPU, where accelerate does not look at the plugin."""

    def __init__(self, **settings: Any) -> None:
        """Start as `Accelerator` does; the settings are its own."""
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        super().__init__(fsdp_plugin=plugin, **settings)
        if self.distributed_type is DistributedType.MULTI_CPU:
            PartialState().distributed_type = self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = plugin


class AutocastAccelerator(LaconicAccelerator):
    """Ours with DDP's mixed precision: autocast casts what operations read, and parameters stay in float32."""

    def __init__(self, **settings: Any) -> None:
        """Start as `LaconicAccelerator` does; the settings are those of accelerate."""
        super().__init__(LaconicArguments(param_dtype="float32"), **settings)
