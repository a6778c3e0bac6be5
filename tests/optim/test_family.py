"""Every optimizer on ranks against one process: equal gradients give equal results, from mesh to mesh by checkpoints.

Ranks are given the gradients, so the tests see the optimizer alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.optim import AdamW8bit, Muon, Shampoo, Tiling, matrices_and_rest
from laconic.ragged.tensor import RaggedTensor
from tests.optim.matrices import random_tensors
from tests.support.launch import run_ranks
from tests.support.owner_bytes import elements_to_owners, received_bytes, sum_over_ranks

TENSORS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "up": ((11, 9), None, Shard(0)),
    "narrow": ((6, 4), None, Shard(1)),
    "experts_up": ((5, 12, 7), Shard(0), Shard(1)),
    "experts_down": ((5, 8, 11), Shard(0), Shard(2)),
    "experts_whole": ((3, 4, 6), Shard(0), Replicate()),
    "bias": ((24,), None, Shard(0)),
    "inner.long": ((450,), None, None),
    "inner.square": ((2, 3), None, None),
}
"""Shapes, and how expert and tensor parallelism cut them. Of some, most ranks hold nothing."""
FEW = [((3, 1, 1), 1), ((2, 2, 1), 2), ((1, 1, 2), 1)]
LINKS = [*FEW, ((1, 1, 1), 1), ((2, 1, 2), 2), ((4, 1, 1), 2), ((2, 2, 2), 4), ((1, 2, 1), 1)]
"""Sizes of (dp, ep, tp), and ranks on a node: training goes from one to the next through a checkpoint."""
STEPS = 2
_TILES: dict[str, Any] = {"block": Tiling(tile=2, flat=4), "min_8bit_size": 5}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One optimizer, as users call it."""

    make: Callable[[nn.Module], torch.optim.Optimizer]
    """Makes the optimizer from the model, sharded or not."""
    itemsize: int = 0
    """The bytes in which an element of a matrix travels."""
    granularity: Any = None
    """The granularity for `fully_shard`."""
    rtol: float = 0.0
    """The largest difference to one process, relative to a tensor's largest magnitude; 0 asks for equal bits."""


def _adamw8bit(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with hyper-parameters of their own."""
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3, "betas": (0.7, 0.8)}]
    return AdamW8bit(groups, lr=1e-2, **_TILES)


def _with_rest(cls: type[torch.optim.Optimizer], model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices, rest = matrices_and_rest(model)
    return cls([matrices, rest | {"lr": 3e-3}], **options)  # type: ignore[call-arg]


MEMBERS: dict[str, Member] = {
    "adamw8bit": Member(make=_adamw8bit, granularity=partial(AdamW8bit.granularity, **_TILES)),
    "muon": Member(make=partial(_with_rest, Muon, lr=2e-2, adjust_lr_fn="match_rms_adamw"), itemsize=2, rtol=1e-5),
    "shampoo": Member(
        make=partial(_with_rest, Shampoo, lr=1e-2, block_size=5, update_every=2), itemsize=4, rtol=1e-5,
        granularity=lambda name, parameter: max(1, parameter.numel()) if name == "inner.square" else 1,
    ),
}  # fmt: skip


def build(seed: int = 0) -> nn.Module:
    """The same values on every rank and in every process."""
    module = nn.Module()
    module.inner = nn.Module()
    shapes = [shape for shape, *_ in TENSORS.values()]
    for name, value in zip(TENSORS, random_tensors(shapes, seed), strict=True):
        home, _, own = name.rpartition(".")
        module.get_submodule(home).register_parameter(own, nn.Parameter(value))
    return module


def cut(member: Member, sizes: tuple[int, ...], seed: int) -> Any:
    """The module in two units, cut over ("ep", "tp") and then over ("dp",)."""
    module = build(seed)
    if sizes[1:] == (1, 1):
        mesh = laconic.init_mesh("cpu")
    else:
        meshes = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep", "tp"))
        mesh = meshes["dp"]  # type: ignore[assignment]
        for name, parameter in list(module.named_parameters()):
            _, by_expert, by_tensor = TENSORS[name]
            if by_tensor is not None:
                over = meshes["tp"] if by_expert is None else meshes["ep", "tp"]
                how = [each for each in (by_expert, by_tensor) if each is not None]
                whole = distribute_tensor(parameter.detach(), over, how, src_data_rank=None)
                module.register_parameter(name, nn.Parameter(whole))
    for unit in (module.inner, module):
        laconic.fully_shard(unit, mesh=mesh, granularity=member.granularity)
    return module


def train(module: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """Steps [start, stop) with a learning rate schedule; in odd ones some parameters have no gradient."""
    for step in range(start, stop):
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * (1 - step / 30)
        for index, parameter in enumerate(module.parameters()):
            (grad,) = random_tensors([tuple(parameter.shape)], seed=100 * step + index)
            is_cut = isinstance(parameter, RaggedTensor)
            own = parameter.like(parameter.spec.part_of(grad).clone()) if is_cut else grad
            parameter.grad = None if step % 2 and index % 3 == 1 else own
        optimizer.step()


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer, *, is_whole: bool = True) -> dict[str, Tensor]:
    """Every parameter and every state, whole, which is collective, or this rank's part of it."""
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            if isinstance(value, RaggedTensor):
                value = value.full_tensor() if is_whole else value.to_local()
            found[f"{name}.{key}"] = value.detach().clone()
    return found


def job_link(link: int, name: str, folder: Path) -> dict[str, Tensor]:
    """Load what the link before has saved, take some steps and save again. The first also goes on."""
    (sizes, _), member, first = LINKS[link], MEMBERS[name], link * STEPS
    module = cut(member, sizes, seed=link)
    optimizer: Any = member.make(module)
    if link:
        extra = load_checkpoint(folder / str(link - 1), model=module, optimizer=optimizer)
        assert extra is not None
        assert extra["step"] == first
    before = received_bytes(module, optimizer)
    train(module, optimizer, first, first + 1)
    if member.itemsize:
        each_way = elements_to_owners(optimizer.owners)
        assert received_bytes(module, optimizer) - before == 2 * member.itemsize * each_way
        assert each_way <= sum_over_ranks(sum(matrix.numel for matrix in optimizer.owners.by_matrix))
        for parameter in optimizer.param_groups[0]["params"] if link == 0 else ():
            for key, value in optimizer.state[parameter].items():
                held = key == "step" or value.to_local().numel() in (0, value.numel())
                assert held or (name == "muon" and value.spec == parameter.spec), "with its owner"
    train(module, optimizer, first + 1, first + STEPS)
    if sizes[0] == 3:
        empty = sum(parameter.to_local().numel() == 0 for parameter in module.parameters())
        assert sum_over_ranks(empty) > 1, "the tests cover ranks that hold nothing"
    save_checkpoint(folder / str(link), first + STEPS, model=module, optimizer=optimizer, extra={})
    found = snapshot(module, optimizer)
    if link == 0:
        resumed = cut(member, sizes, seed=1)
        other, ends = member.make(resumed), []
        load_checkpoint(folder / "0", model=resumed, optimizer=other)
        for each, own in ((module, optimizer), (resumed, other)):
            train(each, own, STEPS, STEPS + 1)
            ends.append(snapshot(each, own, is_whole=False))
        torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    return found if dist.get_rank() == 0 else {}


@pytest.mark.parametrize("links", [FEW, pytest.param(LINKS, marks=pytest.mark.campaign(seconds=120))], ids=len)
@pytest.mark.parametrize("name", MEMBERS)
def test_every_mesh_trains_as_one_process_and_goes_on_from_another(name: str, links: list[Any], tmp_path: Path) -> None:
    for link, (sizes, local) in enumerate(links):
        found = run_ranks(job_link, math.prod(sizes), link, name, tmp_path, local=local)[0]
        module = build()
        optimizer = MEMBERS[name].make(module)
        train(module, optimizer, 0, (link + 1) * STEPS)
        wanted = snapshot(module, optimizer)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), (link, key)
            off = (found[key].double() - value.double()).abs().max().item()
            assert off <= MEMBERS[name].rtol * value.abs().max().item(), (link, key, off)
