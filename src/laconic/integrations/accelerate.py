"""`LaconicAccelerator`: an accelerate loop whose `prepare` shards the model with laconic. Needs the extra `accelerate`.

```python
accelerator = LaconicAccelerator()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
```

The rest of the loop stays as accelerate's users write it. Checked with accelerate 1.15.

[Note: In place of FSDP2]
accelerate calls FSDP2 at one place, the function `fsdp2_prepare_model` of its module `accelerator`. `prepare` calls
laconic there instead. All the rest is accelerate's code for FSDP2, which needs only what laconic has, too: modules with
FSDP2's methods, parameters that are DTensors, and torch's functions for state dicts. So the optimizer gets the sharded
parameters, `no_sync` and `accumulate` send nothing over the network, `clip_grad_norm_` has the norm over all ranks,
and `save_state` writes folders of `torch.distributed.checkpoint`, or whole files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import accelerate.accelerator
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, convert_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import SGD, Optimizer

from laconic.integrations.options import ArgumentError, LaconicArguments
from laconic.integrations.sharding import mesh_for, shard_model
from laconic.ragged.optimizer_state import move_state

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class LaconicAccelerator(Accelerator):
    """accelerate's `Accelerator` for one model that laconic shards; see [Note: In place of FSDP2].

    As with accelerate's FSDP2, `prepare` takes an optimizer together with its model; a model without an optimizer may
    come alone. In a single process it is a plain `Accelerator`, and nothing is sharded.
    """

    def __init__(
        self, arguments: LaconicArguments | None = None, *, state_dict_type: str | None = None, **settings: Any
    ) -> None:
        """Start the ranks as `Accelerator` does.

        Args:
            arguments: laconic's options. `param_dtype` is by default that of `mixed_precision`: parameters are cast,
                as under FSDP2. With "float32" operations are, by autocast, as under DDP.
            state_dict_type: `save_state` writes sharded folders with "SHARDED_STATE_DICT", and whole files with
                "FULL_STATE_DICT"; the name is that of accelerate's FSDP plugin. Default: sharded folders.
            settings: those of `Accelerator`. `cpu` is by default True on a machine without an accelerator: accelerate
                itself would let each rank train on its own there.

        Raises:
            ArgumentError: a setting asks for another way to shard, `mixed_precision` is fp8, `local_steps` or
                `audit_every` is set, or another Accelerator has chosen another strategy for this process before.
        """
        self.arguments = arguments if arguments is not None else LaconicArguments()
        _check_settings(self.arguments, settings)
        plugin = _plugin(self.arguments, state_dict_type)
        settings.setdefault("cpu", not torch.accelerator.is_available())
        is_first = not AcceleratorState._shared_state
        if is_first:
            _restore_partial_state()
        super().__init__(fsdp_plugin=plugin, **settings)
        if self.mixed_precision not in _DTYPES:
            raise ArgumentError(f"mixed_precision={self.mixed_precision!r} is not known; use one of {list(_DTYPES)}")
        if self.distributed_type is DistributedType.MULTI_CPU and is_first:
            # accelerate looks at the plugin on accelerators only; PartialState holds what all its states show
            PartialState().distributed_type = self.state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = plugin
        if self.distributed_type not in (DistributedType.FSDP, DistributedType.NO):
            raise ArgumentError(
                f"accelerate has chosen {self.distributed_type} before: make the LaconicAccelerator before any other "
                "Accelerator of this process, and unset ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_MEGATRON_LM"
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See `Accelerator.prepare`. Shards the model over all ranks. Collective."""
        models = [each for each in args if isinstance(each, nn.Module)]
        is_sharded = self.distributed_type is DistributedType.FSDP
        comes_alone = is_sharded and len(models) == 1 and not any(isinstance(each, Optimizer) for each in args)
        with _in_place_of_fsdp2(self), _state_moved(args):
            if not comes_alone:
                return super().prepare(*args, device_placement=device_placement)
            # accelerate's code for FSDP2 asks for an optimizer, which it has to give the sharded parameters
            placement = None if device_placement is None else [*device_placement, None]
            *prepared, _ = super().prepare(*args, SGD(models[0].parameters()), device_placement=placement)
            self._optimizers.pop()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place and return it; `prepare` calls this. Collective over all ranks."""
        module = getattr(model, "_orig_mod", model)  # torch.compile wraps the module
        dtype = _DTYPES[self.mixed_precision]
        if dtype is not None:
            for parameter in module.parameters():  # as accelerate does for FSDP2: the optimizer works in fp32
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        mesh = mesh_for(self.arguments, self.device.type)
        shard_model(
            module,
            self.arguments,
            mesh=mesh,
            mp_policy=self.arguments.policy.precision.mp_policy(autocast=dtype),
            broadcast_buffers=self.ddp_handler is None or self.ddp_handler.broadcast_buffers,
        )
        if dtype is not None and self.arguments.param_dtype == "float32" and self.native_amp:  # as accelerate with DDP
            autocast: Any = get_mixed_precision_context_manager(self.native_amp, self.autocast_handler)
            module.forward = autocast(module.forward)
        if dtype is not None:  # accelerate does so with DDP: the loss is computed in fp32
            module.register_forward_hook(lambda module, inputs, outputs: convert_to_fp32(outputs))
        return model


_OTHERS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
"""The arguments of `Accelerator` that choose another way to shard."""


def _check_settings(arguments: LaconicArguments, settings: dict[str, Any]) -> None:
    if not isinstance(arguments, LaconicArguments):
        raise ArgumentError(
            f"LaconicAccelerator takes LaconicArguments first, got {type(arguments).__name__}; give the settings of "
            "accelerate by name"
        )
    for key in _OTHERS:
        if settings.get(key) is not None:
            raise ArgumentError(
                f"{key} asks for another way to shard; leave it out, and set laconic's options with "
                "LaconicAccelerator(LaconicArguments(...))"
            )
    arguments.refuse_trainers_own("an accelerate loop")


def _plugin(arguments: LaconicArguments, state_dict_type: str | None) -> FullyShardedDataParallelPlugin:
    """Return the plugin that makes accelerate run its code for FSDP2. `accelerate launch` may have set its fields."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type)
    refused = {
        "offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "activation_checkpointing": plugin.activation_checkpointing,
        "ignored_modules": plugin.ignored_modules,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ArgumentError(
                f"FSDP_{key.upper()} is set in the environment, by `accelerate launch` or its config file; laconic has "
                "no such option here, so remove it (for activation checkpointing, use the model's own)"
            )
    if plugin.cpu_ram_efficient_loading and not arguments.broadcast:
        raise ArgumentError(
            "FSDP_CPU_RAM_EFFICIENT_LOADING loads weights on the first rank only, so it needs broadcast=True in "
            "LaconicArguments"
        )
    return plugin


def _restore_partial_state() -> None:
    """Give accelerate's `PartialState` the type that it had at first, if an earlier Accelerator has left FSDP there.

    accelerate writes its choice there, too, and `AcceleratorState._reset_state()` does not clear it. accelerate would
    take the choice for made and leave the plugin out.
    """
    if PartialState._shared_state.get("distributed_type") is DistributedType.FSDP:
        state = PartialState()
        state.distributed_type = state._prepare_backend(state._cpu, backend=state.backend)[1]


@contextmanager
def _state_moved(objects: Sequence[Any]) -> Iterator[None]:
    """Let optimizers keep their state while accelerate puts the sharded parameters in place of the model's.

    accelerate moves the parameters alone. Those without state are not held here, so their memory is free meanwhile.

    Raises:
        ArgumentError: the state of an optimizer cannot be cut.
    """
    held = {
        each: [
            (number, index, parameter)
            for number, group in enumerate(each.param_groups)  # accelerate loads the state anew, which makes new groups
            for index, parameter in enumerate(group["params"])
            if each.state.get(parameter)
        ]
        for each in objects
        if isinstance(each, Optimizer)
    }
    yield
    for optimizer, places in held.items():
        pairs = [(old, optimizer.param_groups[number]["params"][index]) for number, index, old in places]
        try:
            move_state(optimizer, [(old, new) for old, new in pairs if old is not new])
        except ValueError as error:
            raise ArgumentError(str(error)) from None


@contextmanager
def _in_place_of_fsdp2(accelerator: LaconicAccelerator) -> Iterator[None]:
    """Let accelerate call laconic inside this context: [Note: In place of FSDP2]."""
    module: Any = accelerate.accelerator
    fsdp2 = module.fsdp2_prepare_model
    module.fsdp2_prepare_model = lambda _, model: accelerator.shard(model)
    try:
        yield
    finally:
        module.fsdp2_prepare_model = fsdp2
