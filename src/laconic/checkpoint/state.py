"""A model and its optimizer as one flat dict of tensors, keyed by name; each rank sees its own part of every tensor.

Keys are `model.NAME` and `optimizer.NAME.KEY` (`exp_avg`, `step`, ...), where NAME is the parameter's name in the plain
model: wrappers of DDP, activation checkpointing and torch.compile leave no trace, so that a checkpoint moves between
strategies. torch's own `get_optimizer_state_dict` is not used: it steps the optimizer to create its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from laconic.checkpoint.commit import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_NOT_RESTORED = ("params", "param_names")
_MAX_LISTED = 8


def plain(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, or the model."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {_strip(name): parameter for name, parameter in plain(model).named_parameters()}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, under `model.`; tied ones once. Gathered units are resharded."""
    for module in model.modules():
        # Outside a step a root may still hold its gathered parameters (FSDP2 after a forward without backward).
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in named_parameters(model).items()}
    tensors.update((f"model.{name}", buffer) for name, buffer in _persistent_buffers(plain(model)))
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _optimized(model, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def optimizer_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside tensors, as JSON: class, hyper-parameters per group, numbers in its state."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in _NOT_RESTORED}
        groups.append({"names": [names[id(p)] for p in group["params"]], "settings": settings})
    numbers = {
        f"{name}.{key}": value
        for name, parameter in _optimized(model, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }
    return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def restore_optimizer_settings(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint was written with {saved['class']}, this run uses {type(optimizer).__name__}"
        )
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["names"] for group in saved["groups"]]
    if ours != theirs:
        differing = sorted({n for g in ours for n in g} ^ {n for g in theirs for n in g})
        what = (
            f"train different parameters: {_listing(differing)}" if differing else "group their parameters differently"
        )
        raise CheckpointError(
            f"the checkpoint's optimizer and this run's {what}; use the configuration the checkpoint was made with"
        )
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in saved_group["settings"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:  # JSON has no tuples; betas are one
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    for name, parameter in _optimized(model, optimizer):
        prefix = f"{name}."
        for key, value in saved["numbers"].items():
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                optimizer.state[parameter][key[len(prefix) :]] = value


def prepare_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata) -> None:
    """Give the optimizer empty state of the kinds the checkpoint holds, laid out like its parameters, and no other."""
    saved: dict[str, TensorStorageMetadata] = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("optimizer.") and isinstance(entry, TensorStorageMetadata)
    }
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_name: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full_key, entry in saved.items():
        name, _, key = full_key.removeprefix("optimizer.").rpartition(".")
        by_name.setdefault(name, {})[key] = entry
    for name, parameter in _optimized(model, optimizer):
        group = groups[id(parameter)]
        state: dict[str, Any] = {}
        for key, entry in by_name.get(name, {}).items():
            if entry.size == parameter.shape and not (key == "step" and parameter.ndim == 0):
                state[key] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
            else:
                # torch's optimizers keep `step` on the host unless the step itself runs on the device.
                on_device = key != "step" or group.get("capturable") or group.get("fused")
                device = parameter.device if on_device else torch.device("cpu")
                state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def refuse_another_model(tensors: dict[str, Tensor], metadata: Metadata, where: str) -> None:
    """Raises: CheckpointError naming the tensors by which the model and the checkpoint differ."""
    saved = {
        key.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    ours = {
        key.removeprefix("model."): (tuple(t.shape), t.dtype) for key, t in tensors.items() if key.startswith("model.")
    }
    complaints = []
    if missing := sorted(ours.keys() - saved.keys()):
        complaints.append(f"only in the model: {_listing(missing)}")
    if unexpected := sorted(saved.keys() - ours.keys()):
        complaints.append(f"only in the checkpoint: {_listing(unexpected)}")
    differing = [
        f"{name} is {_describe(*saved[name])} in the checkpoint and {_describe(*ours[name])} in the model"
        for name in sorted(ours.keys() & saved.keys())
        if ours[name] != saved[name]
    ]
    if differing:
        complaints.append(f"different: {_listing(differing)}")
    if complaints:
        raise CheckpointError(
            f"{where} is a checkpoint of another model ({'; '.join(complaints)}); "
            "use the model it was made with, or another output folder"
        )


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model; "
                    "create the optimizer after sharding, from model.parameters()"
                )
            yield names[id(parameter)], parameter


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _strip(f"{prefix}.{name}" if prefix else name), buffer


def _strip(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _listing(items: list[str]) -> str:
    shown = ", ".join(items[:_MAX_LISTED])
    return shown if len(items) <= _MAX_LISTED else f"{shown} and {len(items) - _MAX_LISTED} more"
