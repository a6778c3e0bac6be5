"""The optimizers that tests/optim/test_family.py tests: every member of `MEMBERS`, with all that the tests need.

Ranks are given the gradients, so the tests see the optimizer alone. With equal gradients, every member must have the
results of one process, on any number of ranks, and through checkpoints to any other number.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.optim import AdamW8bit, Muon, Shampoo, Tiling, matrices_and_rest
from laconic.ragged.tensor import RaggedTensor

STEPS = 4
SAVED_AFTER = 2


class Small(nn.Module):
    """Odd sizes, tensors with fewer elements than there are ranks, and one of which most ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(43, 97)
        self.first = nn.Sequential(nn.Linear(97, 70), nn.LayerNorm(70), nn.Linear(3, 1))
        self.second = nn.Sequential(_Parameter(3, 20, 75), _Parameter(4500), nn.Linear(2, 2, bias=False))
        self.output = nn.Linear(70, 43, bias=False)


class _Parameter(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


@dataclass(frozen=True, kw_only=True)
class Member:
    """One optimizer, as users call it."""

    make: Callable[[nn.Module], torch.optim.Optimizer]
    """Makes the optimizer from the model, sharded or not."""
    granularity: Any = None
    """The granularity for `fully_shard`."""
    rtol: float = 0.0
    """The largest difference to one process, relative to a tensor's largest magnitude; 0 asks for equal bits."""


def _adamw8bit(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups with hyper-parameters of their own."""
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3, "betas": (0.7, 0.8)}]
    return AdamW8bit(groups, lr=1e-2, **options)


def _with_rest(cls: type[torch.optim.Optimizer], model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices, rest = matrices_and_rest(model)
    return cls([matrices, rest | {"lr": 3e-3}], **options)  # type: ignore[call-arg]


_FLAT = Tiling(tile=None, flat=100)

MEMBERS: dict[str, Member] = {
    "adamw8bit": Member(make=_adamw8bit, granularity=AdamW8bit.granularity),
    "adamw8bit-flat": Member(
        make=partial(_adamw8bit, block=_FLAT, min_8bit_size=50),
        granularity=partial(AdamW8bit.granularity, block=_FLAT, min_8bit_size=50),
    ),
    "muon": Member(make=partial(_with_rest, Muon, lr=2e-2, weight_decay=0.1), rtol=1e-6),
    "muon-whole": Member(
        make=partial(_with_rest, Muon, lr=2e-2), granularity=lambda name, p: max(1, p.numel()), rtol=1e-6
    ),
    "shampoo": Member(make=partial(_with_rest, Shampoo, lr=1e-2, update_every=2, block_size=40), rtol=1e-6),
}


def build() -> Small:
    """The same values on every rank and in every process."""
    torch.manual_seed(0)
    return Small()


def sharded(member: Member, mesh: Any) -> nn.Module:
    """The model in three units."""
    model = build()
    for unit in (model.first, model.second, model):
        laconic.fully_shard(unit, mesh=mesh, granularity=member.granularity)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """Steps [start, stop) with a learning rate schedule; in one of them some parameters have no gradient."""
    for step in range(start, stop):
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * (1 - step / 10)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = None if step == 2 and index % 3 == 1 else _gradient(parameter, 100 * step + index)
        optimizer.step()
        optimizer.zero_grad()


def _gradient(parameter: Tensor, seed: int) -> Tensor:
    whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return parameter.like(parameter.spec.part_of(whole).clone()) if isinstance(parameter, RaggedTensor) else whole


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter and every state, whole. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = _whole(parameter)
        for key, value in sorted(optimizer.state[parameter].items()):
            found[f"{name}.{key}"] = _whole(value)
    return found


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, RaggedTensor) else tensor).detach().clone()


def alone(name: str) -> dict[str, Tensor]:
    """The results of one process without sharding."""
    model = build()
    optimizer = MEMBERS[name].make(model)
    train(model, optimizer, 0, STEPS)
    return snapshot(model, optimizer)


@dataclass(kw_only=True)
class Outcome:
    """The results of all ranks for one member."""

    unbroken: dict[str, Tensor]
    """After `STEPS` steps."""
    through_state_dict: dict[str, Tensor]
    """The same, with the state carried from one optimizer to another on the way."""
    resumed: dict[str, Tensor]
    """The same, from a checkpoint of this number of ranks."""
    resharded: dict[str, Tensor] | None
    """The same, from a checkpoint of another number of ranks."""
    empty_parts: int
    """The number of parts, of parameters and states, in which a rank holds nothing."""


def try_all(folder: str, previous: int | None) -> dict[str, Outcome | str]:
    """The outcome of every member on these ranks; the traceback of a member that fails."""
    mesh = laconic.init_mesh("cpu")
    outcomes: dict[str, Outcome | str] = {}
    for name, member in MEMBERS.items():
        try:
            outcomes[name] = _try(member, mesh, Path(folder) / name, previous)
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes if dist.get_rank() == 0 else {}


def _try(member: Member, mesh: Any, folder: Path, previous: int | None) -> Outcome:
    own = folder / f"ranks-{dist.get_world_size()}"
    model = sharded(member, mesh)
    optimizer = member.make(model)
    train(model, optimizer, 0, SAVED_AFTER)
    save_checkpoint(own, SAVED_AFTER, model=model, optimizer=optimizer, extra={})
    values = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[operator]
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, SAVED_AFTER, STEPS)
    unbroken = snapshot(model, optimizer)

    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.to_local().copy_(value)  # type: ignore[operator]
    other = member.make(model)
    other.load_state_dict(state)
    train(model, other, SAVED_AFTER, STEPS)
    return Outcome(
        unbroken=unbroken,
        through_state_dict=snapshot(model, other),
        resumed=_from_checkpoint(member, mesh, own),
        resharded=_from_checkpoint(member, mesh, folder / f"ranks-{previous}") if previous else None,
        empty_parts=_empty_parts(model, optimizer),
    )


def _from_checkpoint(member: Member, mesh: Any, folder: Path) -> dict[str, Tensor]:
    model = sharded(member, mesh)
    optimizer = member.make(model)
    extra = load_checkpoint(folder, model=model, optimizer=optimizer)
    assert extra is not None
    assert extra["step"] == SAVED_AFTER
    train(model, optimizer, SAVED_AFTER, STEPS)
    return snapshot(model, optimizer)


def _empty_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [tensor for tensor in (*model.parameters(), *states) if isinstance(tensor, RaggedTensor)]
    count = torch.tensor(sum(tensor.to_local().numel() == 0 for tensor in tensors))
    dist.all_reduce(count)
    return int(count)
