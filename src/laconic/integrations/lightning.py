"""`LaconicStrategy`: Lightning's Trainer with laconic; `LaconicFabricStrategy`: Fabric. Needs the extra `lightning`.

```python
trainer = Trainer(strategy=LaconicStrategy())
fabric = Fabric(strategy=LaconicFabricStrategy())
```

Checked with Lightning 2.6.

[Note: In place of ModelParallelStrategy]
Lightning runs FSDP2 with its `ModelParallelStrategy`, in which the user shards the model himself. `LaconicStrategy` is
one: it starts the ranks and saves checkpoints with that class's code, which needs only what laconic has, too. It
replaces the mesh, shards the model unless `configure_model` has done it, keeps gradients off the network while they
accumulate, and loads whole files itself.

Lightning calls `training_step`, not the module's `forward`. So the modules in the LightningModule are sharded, each
with the layers below it, and not the LightningModule itself.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import laconic
from laconic.comm.agreement import RankGroup
from laconic.hf.layers import layers_to_shard
from laconic.integrations.options import ArgumentError, LaconicArguments
from laconic.integrations.sharding import find_units, mesh_for, shard_model

_MIXED = {"bf16-mixed": torch.bfloat16}


_Base: Any = object  # the mixin goes before a strategy of Lightning, whose attributes it uses


class _OnMesh(_Base):
    """The base of the strategies of the Trainer and of Fabric: their options, and the mesh of the launch."""

    _device_mesh: Any

    def __init__(self, arguments: LaconicArguments | None, **settings: Any) -> None:
        self.arguments = arguments if arguments is not None else LaconicArguments()
        self.arguments.refuse_trainers_own("Lightning")
        super().__init__(**settings)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh.

        Raises:
            ArgumentError: `devices` and `num_nodes` do not make the ranks of the launch.
        """
        devices, nodes, world = self.num_processes, self.num_nodes, self.world_size
        if nodes * devices != world:
            raise ArgumentError(
                f"devices={devices} and num_nodes={nodes} make {nodes * devices} ranks, but the launch has {world}: "
                "give Lightning the numbers of torchrun's --nproc-per-node and --nnodes"
            )
        # for the mesh; Lightning's own launcher sets a part of torchrun's names only
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(devices))
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        super().setup_environment()
        self._device_mesh = mesh_for(self.arguments, self.root_device.type)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks draw other data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _mp_policy(self, precision: str) -> MixedPrecisionPolicy:
        """The mixed precision of the options, or by default that of the Trainer or of Fabric."""
        return self.arguments.policy.precision.mp_policy(autocast=_MIXED.get(precision))


class LaconicStrategy(_OnMesh, ModelParallelStrategy):
    """Shards the modules of a LightningModule; see [Note: In place of ModelParallelStrategy].

    Sharding goes by the layers that a module names (`_no_split_modules`), or by its longest ModuleList, or by
    `arguments.units`. `configure_model` may call `laconic.fully_shard` itself, with `self.device_mesh`; a module that
    is sharded already stays as it is. `configure_optimizers` runs after sharding.
    """

    def __init__(
        self,
        arguments: LaconicArguments | None = None,
        *,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Set the options; the ranks start with the Trainer's run.

        Args:
            arguments: laconic's options. `param_dtype` is by default that of `precision="bf16-mixed"`.
            save_distributed_checkpoint: True writes a folder of `torch.distributed.checkpoint`, to which each rank adds
                its shards. False writes one whole file, which Lightning without laconic loads, too. Both load.
            process_group_backend: the backend. Default: that of the device.
            timeout: the time that a collective may take.

        Raises:
            ArgumentError: `local_steps` or `audit_every` is set.
        """
        super().__init__(
            arguments,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def __repr__(self) -> str:
        """What Fabric shows of a strategy that is not its own."""
        return "LaconicStrategy(), which is for Lightning's Trainer; use LaconicFabricStrategy() for Fabric"

    def setup_environment(self) -> None:
        """See `_OnMesh.setup_environment`. The LightningModule shows the mesh as `device_mesh`."""
        super().setup_environment()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then make the optimizers. Collective."""
        super(ModelParallelStrategy, self).setup(trainer)  # skips its demand for a `configure_model`

    def model_to_device(self) -> None:
        """Shard the modules of the LightningModule, and move the rest to this rank's device. Collective.

        Raises:
            ArgumentError: the LightningModule has parameters of its own, or no layers are found in it.
        """
        module = self.lightning_module
        assert module is not None
        policy = self._mp_policy(self.precision_plugin.precision)
        for part, layers in _parts(module, self.arguments.units):
            shard_model(part, self.arguments, mesh=self.device_mesh, mp_policy=policy, layers=layers)
        _materialize_distributed_module(module, self.root_device)
        module.to(self.root_device)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards, or one whole file, which Lightning may have written with any strategy. Collective.

        Args:
            checkpoint_path: the folder or the file; the path of the first rank counts.
            weights_only: see `torch.load`.

        Returns:
            all that is not weights and optimizer states.
        """
        path, module = Path(RankGroup().broadcast(str(checkpoint_path))), self.lightning_module
        if not path.is_file():
            return super().load_checkpoint(path, weights_only)
        assert module is not None
        checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=module.strict_loading)
        set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
        states = checkpoint.pop("optimizer_states", [])  # Lightning refuses to resume from weights alone
        for optimizer, state in zip(self.optimizers, states, strict=False):
            set_optimizer_state_dict(module, optimizer, _by_name(state, optimizer, module), options=options)
        return checkpoint

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Keep gradients off the network in this context; Lightning enters it for all micro-batches but the last."""
        assert self.lightning_module is not None
        sharded = [module for module in self.lightning_module.modules() if isinstance(module, laconic.ShardedModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


class LaconicFabricStrategy(_OnMesh, FabricModelParallelStrategy):
    """Shards the module that `fabric.setup_module` gets. Make the optimizer afterwards, as for Fabric's FSDP2.

    `fabric.no_backward_sync` keeps gradients off the network, `fabric.clip_gradients` has the norm over all ranks, and
    `fabric.save` and `fabric.load` write and read as `save_distributed_checkpoint` says.
    """

    def __init__(self, arguments: LaconicArguments | None = None, *, save_distributed_checkpoint: bool = True) -> None:
        """Set the options.

        Args:
            arguments: laconic's options. `param_dtype` is by default that of `precision="bf16-mixed"`.
            save_distributed_checkpoint: see `LaconicStrategy`.

        Raises:
            ArgumentError: `local_steps` or `audit_every` is set.
        """
        super().__init__(arguments, parallelize_fn=self._shard, save_distributed_checkpoint=save_distributed_checkpoint)

    def __repr__(self) -> str:
        """What the Trainer shows of a strategy that is not its own."""
        return "LaconicFabricStrategy(), which is for Fabric; use LaconicStrategy() for Lightning's Trainer"

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return shard_model(module, self.arguments, mesh=mesh, mp_policy=self._mp_policy(self.precision.precision))


def _by_name(state: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with names of parameters in place of numbers.

    An optimizer numbers parameters in the order of its groups. Lightning's own code for this takes the order of the
    module, and so mixes up the states of optimizers with several groups.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    saved = [number for group in state["param_groups"] for number in group["params"]]
    now = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    name_of = dict(zip(saved, now, strict=True))
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {name_of[number]: each for number, each in state["state"].items()}, "param_groups": groups}


def _parts(module: LightningModule, units: list[str] | None) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the modules to shard, each with the layers in it that are sharded one by one."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ArgumentError(
            f"{type(module).__name__} has parameters of its own ({', '.join(own)}). Lightning calls its training_step, "
            "not its forward, so nothing would gather them: put them into a module of their own"
        )
    parts = [part for part in _callable_children(module) if next(part.parameters(), None) is not None]
    if all(isinstance(part, laconic.ShardedModule) for part in parts):
        return []
    if units is not None:
        found = find_units(module, units)
        return [(part, [layer for layer in found if layer is not part and layer in part.modules()]) for part in parts]
    by_part = [(part, layers_to_shard(part)) for part in parts]
    if not any(layers for _, layers in by_part):
        find_units(module)  # says that each part is one unit
    return by_part


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below `module` that have a forward and are not below one that has."""
    for child in module.children():
        if type(child).forward is nn.Module.forward or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child)
        else:
            yield child
