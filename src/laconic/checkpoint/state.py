"""A model and its optimizer as dicts of tensors by name; each rank sees its own part of every tensor.

Names are those of the plain model, without wrappers (DDP, activation checkpointing, torch.compile), so a checkpoint
moves between strategies. torch's `get_optimizer_state_dict` is not used: it steps the optimizer to create its state.

[Note: A model held in part]
A rank of a pipeline holds some stages of a model. It shows a checkpoint the whole model: tensors of other stages are on
the meta device, and the attribute `is_held_in_part` of the model says that this is meant. So each rank knows the names,
shapes and dtypes of all tensors, and a checkpoint is the same as without stages, as are its refusals. A rank writes and
reads only what it holds. The optimizer's groups list all parameters, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.storage import TensorMeta
from laconic.ragged.optimizer_state import cut_state
from laconic.ragged.parts import SlicedParameter, sliced_parts
from laconic.shard.sharded_module import ShardedModule

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# Each run chooses the kernels of its own optimizer, and they decide on which device `step` is.
_NOT_RESTORED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")

Places = dict[str, tuple[str, SlicedParameter, int]]
"""For every part of a sliced parameter by name: the whole's name, how it is cut, and the part's index."""

StateEntries = Mapping[str, Mapping[str, TensorMeta]]
"""The tensors of an optimizer's state in a folder: by parameter, then by key (`exp_avg`, `step`, ...)."""


# -- models ------------------------------------------------------------------------------------------------------------


def strip(name: str) -> str:
    """Return a parameter's name without the names of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name; a tied parameter once, under its first name."""
    return {strip(name): parameter for name, parameter in _plain(model).named_parameters()}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) for all buffers that a state dict has."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def places(model: nn.Module) -> Places:
    """Return the place of every part of a sliced parameter; empty if nothing is sliced."""
    return {
        strip(name): (strip(whole), sliced, index)
        for name, (whole, sliced, index) in sliced_parts(_plain(model)).items()
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter by its further names."""
    first = {id(parameter): name for name, parameter in named_parameters(model).items()}
    every = _plain(model).named_parameters(remove_duplicate=False)
    return {strip(name): first[id(p)] for name, p in every if strip(name) != first[id(p)]}


def is_held_in_part(model: nn.Module) -> bool:
    """Whether other ranks hold some of the model's tensors alone: [Note: A model held in part]."""
    return getattr(model, "is_held_in_part", False)


def elsewhere(model: nn.Module) -> set[str]:
    """Return the names of the tensors that other ranks hold alone: [Note: A model held in part]."""
    if not is_held_in_part(model):
        return set()
    tensors = {**named_parameters(model), **{strip(name): buffer for name, buffer in persistent_buffers(model)}}
    return {name for name, tensor in tensors.items() if tensor.is_meta}


def reshard(model: nn.Module) -> None:
    """Show sharded parameters in place of gathered ones, under laconic and FSDP2.

    Under laconic weights cross exactly next time, as in the run that goes on from them.
    """
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.forget_copies()
    show_sharded(model)


def show_sharded(model: nn.Module) -> None:
    """Show sharded parameters in place of gathered ones. What crosses next does not change."""
    for module in model.modules():
        # Outside a step a root may still hold its gathered parameters (FSDP2 after a forward without backward).
        own_reshard = getattr(module, "reshard", None)
        if callable(own_reshard) and hasattr(module, "unshard"):
            own_reshard()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied parameters once. Reshards gathered units."""
    reshard(model)
    return shown_tensors(model)


def shown_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return `model_tensors`, of gathered units the gathered parameters."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
    return tensors | {strip(name): buffer for name, buffer in persistent_buffers(_plain(model))}


def _plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


# -- optimizers: writing -----------------------------------------------------------------------------------------------


def optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters that this rank holds by name.

    Raises CheckpointError if one of the optimizer's is not in the model.
    """
    named, others = named_parameters(model), elsewhere(model)
    return {name: named[name] for names in _group_parts(model, optimizer) for name in names if name not in others}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's tensors and numbers: by parameter, then by key. State that was loaded whole is cut."""
    cut_state(optimizer)
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in optimized(model, optimizer).items()
        if optimizer.state.get(parameter)
    }


def optimizer_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's values for JSON: its class, hyper-parameters by group, and the numbers in its state."""
    groups = []
    for names, group in zip(_group_names(model, optimizer), optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key not in _NOT_RESTORED}
        groups.append({"names": names, "settings": settings})
    numbers = {
        f"{name}.{key}": value
        for name, entries in optimizer_state(model, optimizer).items()
        for key, value in entries.items()
        if not isinstance(value, Tensor)
    }
    return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def param_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return groups as `torch.distributed.checkpoint.state_dict` has them: names in place of the parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": names}
        for names, group in zip(_group_names(model, optimizer), optimizer.param_groups, strict=True)
    ]


# -- optimizers: reading -----------------------------------------------------------------------------------------------


def settings_problem(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> str:
    """Say why `saved`, an `optimizer_settings`, does not fit an optimizer; empty if it fits. Its class may be None."""
    if saved["class"] not in (None, type(optimizer).__name__):
        return f"was written with {saved['class']}, this run uses {type(optimizer).__name__}"
    groups, saved_groups = _group_names(model, optimizer), [list(group["names"]) for group in saved["groups"]]
    if groups == saved_groups:
        return ""
    names, saved_names = ({name for group in each for name in group} for each in (groups, saved_groups))
    if differing := sorted(names ^ saved_names):
        return f"the checkpoint's and this run's train different parameters: {', '.join(differing)}"
    return "the checkpoint's and this run's group their parameters differently"


def restore_optimizer_groups(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the hyper-parameters in `saved`, an `optimizer_settings` with the same groups."""
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in saved_group["settings"].items():
            if key in _NOT_RESTORED:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            elif isinstance(value, Tensor) and value.numel() == 1:  # the learning rate of a step in a CUDA graph
                group[key] = value.item()
            else:  # JSON has no tuples, but `betas` is one
                group[key] = tuple(value) if isinstance(current, tuple) else value


def restore_optimizer_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the numbers in `saved`, an `optimizer_settings`, for parameters that have state."""
    parameters = optimized(model, optimizer)
    for full_key, value in saved["numbers"].items():
        name, _, key = full_key.rpartition(".")
        if name in parameters and optimizer.state.get(parameters[name]):
            optimizer.state[parameters[name]][key] = value


def prepare_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: StateEntries
) -> dict[str, dict[str, Tensor]]:
    """Give the optimizer empty state for the parameters in `saved`, and none for the others.

    An optimizer with `init_state(parameter)` makes its own state. For other optimizers the state has the entries in
    `saved`; a tensor with the parameter's shape is sharded like it. Returns the tensors, by parameter, then by key.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    init_state = getattr(optimizer, "init_state", None)
    room = {}
    for name, parameter in optimized(model, optimizer).items():
        optimizer.state.pop(parameter, None)
        if name not in saved:
            continue
        if init_state is not None:
            init_state(parameter)
        else:
            optimizer.state[parameter] = {
                key: _empty_state(key, entry, parameter, groups[id(parameter)]) for key, entry in saved[name].items()
            }
        room[name] = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
    return room


def _empty_state(key: str, entry: TensorMeta, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    if entry.shape == tuple(parameter.shape) and not (key == "step" and parameter.ndim == 0):
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    # torch's optimizers keep `step` on the host unless the step itself runs on the device.
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device if on_device else torch.device("cpu"))


# -- groups ------------------------------------------------------------------------------------------------------------


def _group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return, for each group, its parameters' names in the unsliced model, each once."""
    parts = places(model)
    return [
        list(dict.fromkeys(parts[name][0] if name in parts else name for name in group))
        for group in _group_parts(model, optimizer)
    ]


def _group_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return, for each group, its parameters' names in the model."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model; "
                "create the optimizer after sharding, from model.parameters()"
            )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
