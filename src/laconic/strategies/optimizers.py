"""The job's optimizer: which parameters it gives to which rule, at which learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from laconic.config.job import Config, JobError, OptimizerConfig
from laconic.strategies.learning_rates import lr_at

_Group = dict[str, Any]

_WHOLE_BLOCKS = ("adamw8bit", "muon", "shampoo")


def require_optimizer(config: Config) -> None:
    """Refuse an optimizer that the strategy's way of cutting parameters does not let work."""
    name, strategy = config.optimizer.name, config.shard.strategy
    if name in _WHOLE_BLOCKS and strategy not in ("laconic", "ddp"):
        raise JobError(
            f"optimizer.name = {name!r} needs whole blocks or matrices, which shard.strategy = {strategy!r} cuts "
            "anywhere; set shard.strategy to 'laconic' (or 'ddp', which cuts nothing), or optimizer.name to 'adamw'"
        )


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer over what is trainable; matrices decay, norms and biases do not. `ndim` is that of the global
    tensor."""
    settings = config.optimizer
    common: _Group = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.name == "adamw":
        return torch.optim.AdamW(_by_decay(_trainable(model), settings), **common, fused=settings.fused)
    from laconic import optim

    if settings.name == "adamw8bit":
        return optim.AdamW8bit(_by_decay(_trainable(model), settings), **common)
    groups = _with_rest(model, settings)
    if settings.name == "muon":
        return optim.Muon(
            groups,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            ns_steps=settings.ns_steps,
            adjust_lr_fn=settings.adjust_lr_fn,
        )
    return optim.Shampoo(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        block_size=settings.block_size,
        update_every=settings.update_every,
        grafting=settings.grafting,
        grafting_eps=settings.eps,
    )


def make_stage_optimizer(config: Config) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """From the parameters of a stage to their optimizer; not for those that want to know hidden layers from others."""
    return lambda parameters: make_optimizer(nn.ParameterList(parameters), config)


def set_learning_rates(optimizer: torch.optim.Optimizer, step: int, config: Config) -> float:
    """Set every group's learning rate for optimizer step `step`; returns `optimizer.lr`'s."""
    settings, total = config.optimizer, config.train.steps
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, _of_group(group, settings), total_steps=total)
    return lr_at(step, settings, total_steps=total)


def _of_group(group: _Group, settings: OptimizerConfig) -> OptimizerConfig:
    if group.get("algorithm") == "adamw" and settings.adamw_lr is not None:
        return replace(settings, lr=settings.adamw_lr)
    return settings


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _by_decay(parameters: list[nn.Parameter], settings: OptimizerConfig, **group: Any) -> list[_Group]:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay, **group},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, **group},
    ]
    return [group for group in groups if group["params"]]


def _with_rest(model: nn.Module, settings: OptimizerConfig) -> list[_Group]:
    """Hidden layers' matrices, and AdamW's groups for the rest."""
    from laconic.optim import matrices_and_rest

    matrices, rest = matrices_and_rest(model)
    if not matrices["params"]:
        raise JobError(
            f"optimizer.name = {settings.name!r} is for the matrices of hidden layers, and this model has none that "
            "trains; use 'adamw'"
        )
    adamw = {"algorithm": "adamw", "betas": settings.betas, "eps": settings.eps}
    return [{**matrices, "weight_decay": settings.weight_decay}, *_by_decay(rest["params"], settings, **adamw)]
