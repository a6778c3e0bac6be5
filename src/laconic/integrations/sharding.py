"""`shard_model`: the one call of every integration that turns a trainer's model into a sharded one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic.comm.launch import RankInfo
from laconic.hf.layers import base_model, has_class, layers_of_classes, layers_to_shard
from laconic.integrations.options import ArgumentError, LaconicArguments
from laconic.ragged.tensor import RaggedTensor


def shard_model(
    model: nn.Module,
    arguments: LaconicArguments | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    layers: Sequence[nn.Module] | None = None,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """Shard `model` in place, layer by layer and then the rest, and return it. Collective over all ranks.

    The model may have peft's adapters. It may be on the CPU while the mesh is for an accelerator: each layer moves to
    the device only before it is cut, so a rank never holds the whole model there. Parameters on the meta device stay
    there; call `to_empty` and initialise them afterwards. What is sharded already stays as it is: a model, or a layer.

    Args:
        model: a transformers model, with or without peft's wrapper, or any module.
        arguments: the options. Default: those of `LaconicArguments()`.
        mesh: see `mesh_for`, which makes the default.
        mp_policy: the mixed precision. Default: that of the arguments, without a trainer's own.
        layers: the layers to shard one by one. Default: those of `find_units`.
        broadcast_buffers: what the trainer would tell DDP; the option of the same name goes before it.

    Raises:
        ArgumentError: no layer has a class that `arguments.units` names; or weights are in a quantised format.
        ValueError: see `laconic.fully_shard`.
    """
    arguments = arguments or LaconicArguments()
    if isinstance(model, laconic.ShardedModule):
        return model
    refuse_quantised(model)
    mesh = mesh if mesh is not None else mesh_for(arguments)
    device, policy = device_of(mesh), arguments.policy
    if arguments.broadcast_buffers is not None:
        broadcast_buffers = arguments.broadcast_buffers
    found = find_units(model, arguments.units) if layers is None else layers
    for module in [*(layer for layer in found if not _is_cut(layer)), model]:
        _move(module, device)
        laconic.fully_shard(
            module,
            mesh=mesh,
            mp_policy=mp_policy or policy.precision.mp_policy(),
            broadcast=arguments.broadcast,
            broadcast_buffers=broadcast_buffers,
            **policy.arguments(),
        )
    return model


def _is_cut(layer: nn.Module) -> bool:
    """True if the user's own code has sharded a layer, alone or with one around it."""
    return all(isinstance(parameter, RaggedTensor) for parameter in layer.parameters())


def mesh_for(arguments: LaconicArguments, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of all ranks, with an island axis if the arguments ask for local steps. Collective.

    Args:
        arguments: the options.
        device_type: "cpu" or the type of an accelerator. Default: the machine's accelerator, or else the CPU.

    Raises:
        ArgumentError: the islands do not divide the nodes, or an audit has no two ranks to compare.
        ValueError: see `laconic.init_mesh`.
    """
    if not arguments.local_steps:
        return laconic.default_mesh(device_type)
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if accelerator is None else accelerator.type
    ranks = RankInfo.from_environment()
    with arguments.in_own_words():
        islands = arguments.membership.count(ranks.num_nodes)
        arguments.policy.audits.check_ranks(ranks.world_size // islands)
    return laconic.init_mesh(device_type, islands=islands)


def find_units(model: nn.Module, names: list[str] | None = None) -> list[nn.Module]:
    """Return the layers to shard one by one, in forward order, without the model itself.

    A model in which no layer is found, or whose own class is named, has none: it is one unit. A warning says so unless
    `names` does.

    Args:
        model: the model, with or without peft's wrapper.
        names: class names of the layers. Default: the model's own `_no_split_modules`, or else the modules of its
            longest ModuleList.

    Raises:
        ArgumentError: no module has a class that `names` has.
    """
    if names is None:
        found = layers_to_shard(model)
        if not found:
            _say_one_unit(model)
        return found
    for name in names:
        if not has_class(model, name) and not layers_of_classes(model, [name]):
            raise ArgumentError(
                f"units={names}: no module of {type(base_model(model)).__name__} has the class {name!r}; its classes "
                f"are {', '.join(_classes(model)) or 'none'}"
            )
    return [layer for layer in layers_of_classes(model, names) if next(layer.parameters(), None) is not None]


def _say_one_unit(model: nn.Module) -> None:
    name = type(base_model(model)).__name__
    inner = [each for each in _classes(model) if each != name]
    advice = (
        ", whose parameters are gathered and freed together. To gather them layer by layer, pass units=[...] with "
        f"class names of its layers, which are {', '.join(inner)}"
    )
    warnings.warn(
        f"{name} names no layers (_no_split_modules) and has no ModuleList, so it is one unit{advice if inner else ''}",
        stacklevel=4,
    )


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank in `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def refuse_quantised(model: nn.Module) -> None:
    """Refuse a transformers model whose weights are in a quantised format, such as that of bitsandbytes.

    Raises:
        ArgumentError: the weights are quantised.
    """
    method = getattr(base_model(model), "quantization_method", None)
    if method is not None:
        name = getattr(method, "value", method)
        raise ArgumentError(
            f"the model's weights are quantised ({name}), in a format whose rows cannot be cut; load it without "
            "quantization_config, in bfloat16, and let laconic shard it"
        )


def _classes(model: nn.Module) -> list[str]:
    return sorted({type(module).__name__ for module in model.modules() if next(module.parameters(), None) is not None})


def _move(module: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers that are not sharded to `device`. Tied parameters stay tied."""
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None and not isinstance(parameter, RaggedTensor) and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta:
                child._buffers[name] = buffer.to(device)
