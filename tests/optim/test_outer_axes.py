"""Optimizers of blocks and matrices on parameters that expert and tensor parallelism cut, too, against one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.optim import AdamW8bit, Muon, Shampoo, Tiling
from laconic.optim.adamw8bit import check_outer_cut
from laconic.ragged.dtensor import DTensorShard
from tests.optim.matrices import random_tensors
from tests.reference import adamw8bit as reference_adamw8bit
from tests.reference import muon as reference_muon
from tests.support.launch import on_ranks, run_ranks
from tests.support.owner_bytes import elements_to_owners, received_bytes, sum_over_ranks

BLOCK = Tiling(tile=2, flat=4)
CUTS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "up": ((11, 9), None, Shard(0)),
    "down": ((9, 11), None, Shard(1)),
    "narrow": ((6, 4), None, Shard(1)),
    "experts_up": ((5, 12, 7), Shard(0), Shard(1)),
    "experts_down": ((5, 8, 11), Shard(0), Shard(2)),
    "experts_whole": ((3, 4, 6), Shard(0), Replicate()),
    "experts_odd": ((5, 7, 11), Shard(0), Shard(2)),
    "plain": ((10, 7), None, None),
    "bias": ((24,), None, Shard(0)),
}
"""Shapes, and how expert and tensor parallelism cut them. On three ranks, one has no part of `narrow`."""
LINKS = [(2, 1, 2), (1, 2, 1), (2, 2, 2), (1, 1, 1), (1, 1, 3)]
"""Sizes of (dp, ep, tp): training goes from one to the next through a checkpoint."""
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One of the optimizers."""

    make: Callable[..., torch.optim.Optimizer]
    without: tuple[str, ...]
    """Parameters that it does not get."""
    itemsize: int = 0
    """The bytes in which an element of a matrix travels."""
    granularity: Any = None
    rtol: float = 0.0


RULES = {
    "adamw8bit": Rule(
        make=partial(AdamW8bit, lr=1e-2, block=BLOCK, min_8bit_size=0),
        without=("experts_odd",),  # a tile would reach from the last expert of a rank into the next
        granularity=partial(AdamW8bit.granularity, block=BLOCK, min_8bit_size=0),
    ),
    "muon": Rule(make=partial(Muon, lr=0.1, adjust_lr_fn="match_rms_adamw"), without=("bias",), itemsize=2, rtol=1e-5),
    "shampoo": Rule(make=partial(Shampoo, lr=0.1, block_size=5, update_every=2), without=(), itemsize=4, rtol=1e-5),
}


def build(rule: Rule, seed: int = 0) -> nn.Module:
    module = nn.Module()
    for name, value in zip(CUTS, random_tensors([shape for shape, _, _ in CUTS.values()], seed=seed), strict=True):
        if name not in rule.without:
            module.register_parameter(name, nn.Parameter(value))
    return module


def cut(rule: Rule, sizes: tuple[int, ...], seed: int = 0) -> Any:
    """The module, cut over ("ep", "tp") and then over ("dp",)."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep", "tp"))
    module = build(rule, seed)
    for name, parameter in list(module.named_parameters()):
        _, by_expert, by_tensor = CUTS[name]
        if by_tensor is not None:
            over, how = (mesh["tp"], [by_tensor]) if by_expert is None else (mesh["ep", "tp"], [by_expert, by_tensor])
            whole = distribute_tensor(parameter.detach(), over, how, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole))
    return laconic.fully_shard(module, mesh=mesh["dp"], granularity=rule.granularity)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        for index, parameter in enumerate(module.parameters()):
            (grad,) = random_tensors([tuple(parameter.shape)], seed=100 * step + index)
            is_cut = isinstance(parameter, laconic.RaggedTensor)
            parameter.grad = parameter.like(parameter.spec.part_of(grad).clone()) if is_cut else grad
        optimizer.step()


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter and every state, whole. Collective."""
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            whole = value.full_tensor() if isinstance(value, laconic.RaggedTensor) else value
            found[f"{name}.{key}"] = whole.detach().clone()
    return found


def job_link(sizes: tuple[int, ...], folder: Path, link: int) -> dict[str, dict[str, Tensor]]:
    """With every rule, load what the link before has saved, take some steps and save again."""
    found = {}
    for name, rule in RULES.items():
        module = cut(rule, sizes, seed=link)
        optimizer: Any = rule.make(module.parameters())
        if link:
            extra = load_checkpoint(folder / name / str(link - 1), model=module, optimizer=optimizer)
            assert extra is not None
            assert extra["step"] == link * STEPS
        for parameter in module.parameters():
            shard = parameter.spec.dtensor
            for dim in range(parameter.ndim if shard is not None else 0):
                own = range(shard.offset[dim], shard.offset[dim] + shard.local_shape[dim])
                assert not own or own in shard.runs_along(dim, parameter.shape[dim])
        before = received_bytes(module, optimizer)
        train(module, optimizer, link * STEPS, (link + 1) * STEPS)
        if rule.itemsize:
            each_way = elements_to_owners(optimizer.owners)
            assert received_bytes(module, optimizer) - before == STEPS * 2 * rule.itemsize * each_way
            assert each_way <= sum_over_ranks(sum(matrix.numel for matrix in optimizer.owners.by_matrix))
        save_checkpoint(folder / name / str(link), (link + 1) * STEPS, model=module, optimizer=optimizer, extra={})
        found[name] = snapshot(module, optimizer)
    return found


class Chain:
    """The links so far: for each link and rank what it has found with each rule."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, []  # type: ignore[var-annotated]

    def of(self, link: int) -> list[dict[str, dict[str, Tensor]]]:
        while len(self.found) <= link:
            number = len(self.found)
            num_ranks = math.prod(LINKS[number])
            local = 2 - num_ranks % 2
            self.found.append(run_ranks(job_link, num_ranks, LINKS[number], self.folder, number, local=local))
        return self.found[link]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("links"))


@pytest.mark.heavy
@pytest.mark.parametrize("link", range(len(LINKS)), ids=lambda link: "dp{}-ep{}-tp{}".format(*LINKS[link]))
def test_every_mesh_trains_as_one_process_and_goes_on_from_another(link: int, chain: Chain) -> None:
    found = chain.of(link)
    for name, rule in RULES.items():
        module = build(rule)
        values = [parameter.detach().clone() for parameter in module.parameters()]
        reference = reference_of(name, values, STEPS) if link == 0 else {}
        optimizer = rule.make(module.parameters())
        train(module, optimizer, 0, (link + 1) * STEPS)
        for key, value in [*snapshot(module, optimizer).items(), *reference.items()]:
            for each in found:
                got = each[name][key]
                assert got.shape == value.shape, (name, key)
                off = (got.double() - value.double()).abs().max().item()
                assert off <= rule.rtol * value.abs().max().item(), (name, key, off)


def reference_of(name: str, values: list[Tensor], steps: int) -> dict[str, Tensor]:
    """The parameters after so many steps by the naive reference; none for Shampoo, whose reference takes one matrix."""
    step: Callable[[list[Tensor]], None]
    if name == "muon":
        muon = reference_muon.Muon(values, lr=0.1, adjust_lr_fn="match_rms_adamw")
        step = lambda grads: muon.step_some(dict(enumerate(grads)))  # noqa: E731
    elif name == "adamw8bit":
        hyper: Any = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "min_8bit_size": 0}
        step = reference_adamw8bit.ReferenceAdamW8bit(values, tile=BLOCK.tile, flat=BLOCK.flat, **hyper).step
    else:
        return {}
    for number in range(steps):
        step([random_tensors([tuple(v.shape)], seed=100 * number + index)[0] for index, v in enumerate(values)])
    names = [each for each in CUTS if each not in RULES[name].without]
    return {f"{each}.": value for each, value in zip(names, values, strict=True)}


@on_ranks(4, local=2)
def test_ranks_with_different_matrices_all_raise() -> None:
    """One rank gives a matrix to AdamW that tensor parallelism has cut."""
    module = cut(RULES["muon"], (2, 1, 2))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    group: dict[str, Any] = {"params": [module.up], "algorithm": "adamw" if dist.get_rank() == 1 else "muon"}
    optimizer = Muon([group, {"params": [module.plain]}])
    with pytest.raises(ValueError, match="same parameters in the same order"):
        optimizer.step()


def shard_of(shape: tuple[int, ...], *axes: tuple[int, int]) -> DTensorShard:
    """The first rank's shard of a tensor; each axis has a number of ranks and cuts a dim."""
    mesh: Any = SimpleNamespace(size=lambda axis: axes[axis][0])
    placements = tuple(Shard(dim) for _, dim in axes)
    nothing = (0,) * len(shape)
    return DTensorShard(mesh, placements, tuple(range(len(axes))), shape, nothing, shape)


ACCEPTED = [
    ((128, 96), (2, 0)),
    ((127, 96), (2, 0)),
    ((7, 63), (2, 1)),
    ((5, 64, 7), (2, 0)),
    ((4, 16, 7), (2, 0)),
    ((5, 64, 7), (2, 1)),
    ((5, 7, 64), (2, 2)),
    ((512,), (2, 0)),
    ((128, 96), (2, 0), (2, 0)),
]
REFUSED = [
    (((86, 128), (2, 0)), r"at \[43\] of dim 0.*Shard\(1\), or a size of dim 0 that is a multiple of 2 x 32; or"),
    (((96, 80), (2, 1)), r"at \[40\] of dim 1.* or block=Tiling\(tile=8, flat=256\)"),
    (((5, 48, 7), (2, 1)), r"at \[24\] of dim 1.* a multiple of 2 x 32"),
    (((5, 16, 7), (2, 0)), r"at \[3\] of dim 0.* a multiple of 2 x 2, or block=Tiling\(tile=16"),
    (((13, 48, 7), (4, 0)), r"at \[4, 8, 12\] of dim 0.*accepts"),  # torch would cut 20 rows of scales otherwise
    (((500,), (2, 0)), r"at \[250\] of dim 0.* a multiple of 2 x 256; or use torch.optim.AdamW for it"),
]


@pytest.mark.parametrize("cut_", ACCEPTED, ids=str)
def test_adamw8bit_accepts_cuts_between_its_blocks(cut_: Any) -> None:
    check_outer_cut(shard_of(*cut_), Tiling(), "w")


@pytest.mark.parametrize(("cut_", "message"), REFUSED, ids=str)
def test_adamw8bit_refuses_other_cuts_and_names_those_that_it_accepts(cut_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"w of shape .* is cut over another mesh axis as well.*{message}"):
        check_outer_cut(shard_of(*cut_), Tiling(), "w")
