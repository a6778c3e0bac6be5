"""The optimizer of a job: its parameter groups, and learning rates, which are pure functions of the step."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from laconic import optim
from laconic.config import JobError, OptimizerConfig

_Group = dict[str, Any]


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters that this rank holds: those of other stages are on the meta device.

    Raises:
        JobError: see `groups_of`.
    """
    adamw = settings.pick("betas", "eps")
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if not parameter.is_meta]}
        for group in groups_of(model, settings)
    ]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, fused=settings.fused, **adamw)
    if settings.name == "adamw8bit":
        return optim.AdamW8bit(groups, lr=settings.lr, block=tiling(settings), **adamw)
    if settings.name == "muon":
        return optim.Muon(groups, **settings.pick("lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"))
    keys = ("lr", "betas", "block_size", "update_every", "grafting")
    return optim.Shampoo(groups, grafting_eps=settings.eps, **settings.pick(*keys))


def groups_of(model: nn.Module, settings: OptimizerConfig) -> list[_Group]:
    """The trainable parameters of a model in groups. Weight decay is for parameters of two dimensions and more.

    Raises:
        JobError: the optimizer is for the matrices of hidden layers, and none of the model's trains.
    """
    if settings.name in ("adamw", "adamw8bit"):
        return _by_decay([parameter for parameter in model.parameters() if parameter.requires_grad], settings)
    matrices, rest = optim.matrices_and_rest(model)
    if not matrices["params"]:
        raise JobError(
            f"optimizer.name = {settings.name!r} is for the matrices of hidden layers, and this model has none that "
            "trains; use 'adamw'"
        )
    rest_groups = _by_decay(rest["params"], settings, algorithm="adamw", **settings.pick("betas", "eps"))
    return [{**matrices, "weight_decay": settings.weight_decay}, *rest_groups]


def tiling(settings: OptimizerConfig) -> optim.Tiling:
    """The blocks of `adamw8bit` that share a scale."""
    return optim.Tiling(tile=None) if settings.flat_blocks else optim.Tiling()


def make_stage_optimizer(settings: OptimizerConfig) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A function from a stage's parameters to their optimizer, for `adamw` and `adamw8bit`."""
    return lambda parameters: make_optimizer(nn.ParameterList(parameters), settings)


def set_learning_rates(
    optimizer: torch.optim.Optimizer, step: int, settings: OptimizerConfig, total_steps: int
) -> float:
    """Set every group's learning rate for step `step`, counted from 0; return the rate that follows `optimizer.lr`."""
    adamw = replace(settings, lr=settings.adamw_lr) if settings.adamw_lr is not None else settings
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, adamw if group.get("algorithm") == "adamw" else settings, total_steps=total_steps)
    return lr_at(step, settings, total_steps=total_steps)


def _by_decay(parameters: list[nn.Parameter], settings: OptimizerConfig, **group: Any) -> list[_Group]:
    """Two groups: parameters with weight decay, and without. A sharded parameter has the whole tensor's dimensions."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay, **group},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, **group},
    ]
    return [group for group in groups if group["params"]]


def lr_at(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * _decay(step, config, total_steps)


def _decay(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The learning rate of a step after the warm-up, as a share of the peak."""
    floor = config.min_lr_ratio
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "cosine":
            length = config.decay_steps or max(total_steps - config.warmup_steps, 1)
            progress = min((step - config.warmup_steps) / length, 1.0)
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            length = config.decay_steps or max(total_steps // 5, 1)
            # The first step of the decay is below the plateau already, and the last step is at the floor.
            progress = min(max(step + 1 - (total_steps - length), 0) / length, 1.0)
            return 1.0 - (1.0 - floor) * progress
