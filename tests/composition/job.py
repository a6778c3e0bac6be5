"""One cell of the matrix on four ranks: two nodes of two ranks, a tiny model, three steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.optim import AdamW8bit, Muon, Shampoo, matrices_and_rest
from laconic.partial.patterns import sliced_layer
from tests.composition.matrix import CACHES, CODED, CYCLIC, ISLANDS, Cell, keys_of
from tests.support.sharded_net import Block

EVERY, MAX_NORM = 2, 0.5
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_TILES = partial(AdamW8bit.granularity, min_8bit_size=0)  # by default 8 bits are for larger tensors only
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
LORA_PLAN = {
    "up.base_layer": ColwiseParallel(),
    "up.lora_B.default": ColwiseParallel(),
    "down.base_layer": RowwiseParallel(),
    "down.lora_A.default": RowwiseParallel(),
}


class Net(nn.Module):
    """An input layer, blocks and an output layer, or a stage that shares some of these with a whole `Net`."""

    def __init__(self, inp: nn.Module, blocks: list[nn.Module], out: nn.Module) -> None:
        super().__init__()
        self.inp, self.blocks, self.out = inp, nn.ModuleList(blocks), out
        self.is_checkpointed = self.is_autocast = False
        self.block_calls, self.block_dtype = 0, torch.float32

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.is_autocast else nullcontext():
            x = self.inp(x)
            self.block_dtype = x.dtype
            for block in self.blocks:
                x = checkpoint(self._run, block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            return self.out(x)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.block_calls += 1
        return block(x)


def num_steps(cell: Cell) -> int:
    """Two steps; with local steps one more, after the sync."""
    return 3 if "local" in cell.strategy or cell.strategy == "partial updates" else 2


def num_parts(cell: Cell) -> int:
    """The number of parts of the global batch. Ranks that share a model by tensor parallelism train on one part."""
    return 2 if cell.strategy in ("cyclic", "cyclic, sharded") or "tensor parallel" in cell.features else 4


def build(cell: Cell, island: int, tp: DeviceMesh | None = None) -> Net:
    """The cell's model before `fully_shard`, cut over `tp` if given; for partial updates the slice of an island."""
    torch.manual_seed(0)
    model = Net(nn.Linear(5, 9), [Block(9, 44), Block(9, 44)], nn.Linear(9, 3))
    if "LoRA" in cell.features:
        torch.manual_seed(1)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    if tp is not None:
        for block in model.blocks:
            parallelize_module(block, tp, LORA_PLAN if "LoRA" in cell.features else PLAN)
    if cell.strategy == "partial updates":
        pattern = sliced_layer(Block, kind="mlp", rows=["up"], columns=["down"])
        laconic.partial_updates(model, slice_index=island, num_slices=2, include=["mlp"], patterns=[pattern])
    return model


def make_optimizer(cell: Cell, groups: Any) -> torch.optim.Optimizer:
    """The cell's optimizer of parameters, or of the groups (matrices, rest) for an optimizer of matrices."""
    if cell.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
    if cell.optimizer == "AdamW8bit":
        return AdamW8bit(groups, lr=0.01, eps=1e-3, min_8bit_size=0)
    return {"Muon": Muon, "Shampoo": Shampoo}[cell.optimizer](groups, lr=0.01)


def optimizer_of(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    if cell.optimizer in ("Muon", "Shampoo"):
        return make_optimizer(cell, matrices_and_rest(model))
    return make_optimizer(cell, [p for p in model.parameters() if p.requires_grad])


def stage_optimizer(cell: Cell) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Makes a stage's optimizer from its parameters."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if cell.optimizer not in ("Muon", "Shampoo"):
            return make_optimizer(cell, parameters)
        by_rule = [{"params": [p for p in parameters if p.ndim == 2]}]
        rest = [p for p in parameters if p.ndim != 2]
        return make_optimizer(cell, [*by_rule, *([{"params": rest, "algorithm": "adamw"}] if rest else [])])

    return make


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    """The rows of one data-parallel part in a step."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def values(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters by name. Collective."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # type: ignore[operator]
        for name, p in model.named_parameters()
    }


def run_cell(cell: Cell) -> dict[str, Tensor]:
    """Train the cell on this rank and return the whole parameters. Collective.

    Raises:
        AssertionError: a feature of the cell had no effect, so the cell shows nothing.
    """
    if cell.strategy in CYCLIC:
        return _run_cyclic(cell)
    mesh, tp = _mesh(cell)
    is_local = cell.strategy in ("local steps", "partial updates")
    part = dist.get_rank() // (4 // num_parts(cell))
    model: Any = build(cell, dist.get_rank() // 2, tp)
    _apply_features(cell, model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "cache": "host",
        "mp_policy": PRECISION if "mixed precision" in cell.features else None,
        **(keys_of(cell.strategy) if cell.strategy in CACHES else {}),
        "granularity": _TILES if cell.optimizer == "AdamW8bit" else None,
        "checks": laconic.Checks(interval=1, on_damage="regather", unnoticed_edits=True),
    }
    if cell.strategy in CODED:
        options["wire"] = _wire(cell, laconic.Wire.of(options.get("wire", "exact")))
    for block in model.blocks:
        laconic.fully_shard(block, **options)
    laconic.fully_shard(model, **options)
    optimizer: Any = optimizer_of(cell, model)
    steps = laconic.LocalSteps(model, optimizer, mesh=mesh, every=EVERY, codec="fp32") if is_local else optimizer
    for step in range(num_steps(cell)):
        x, y = batch(step, part)
        error(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        steps.step()
        steps.zero_grad()
    _check_features(cell, model)
    return values(model)


def _wire(cell: Cell, wire: laconic.Wire) -> laconic.Wire:
    """The crossings of a coded cell. Matrix optimizers get gradients in eight bits, as docs/thinner.md advises."""
    if cell.strategy == "4bit replicas":
        wire = laconic.Wire(gradients="int4")
    return replace(wire, gradients="int8") if cell.optimizer in ("Muon", "Shampoo") else wire


def _mesh(cell: Cell) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of fully_shard, and that of tensor parallelism."""
    if "tensor parallel" not in cell.features:
        return laconic.init_mesh("cpu", islands=2 if cell.strategy in ISLANDS else 1), None
    if cell.strategy in ISLANDS:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        return mesh["replicate", "shard"], mesh["tp"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def _apply_features(cell: Cell, model: Net) -> None:
    for block in model.blocks:
        if "compile" in cell.features:
            block.compile(backend="aot_eager")
    model.is_checkpointed = "checkpointing" in cell.features


def _check_features(cell: Cell, *models: Net) -> None:
    for model in models:
        assert model.block_calls == (2 * num_steps(cell) * len(model.blocks) if "checkpointing" in cell.features else 0)
        assert model.block_dtype is (torch.bfloat16 if "mixed precision" in cell.features else torch.float32)


def _run_cyclic(cell: Cell) -> dict[str, Tensor]:
    """Two workers of two stages; the other two ranks do the same, are the other island, or hold the other halves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "worker"))
    worker, island = mesh.get_local_rank("worker"), mesh.get_local_rank("outer")
    model = build(cell, 0, mesh["outer"] if "tensor parallel" in cell.features else None)
    _apply_features(cell, model)
    stages = stages_of(cell, model)
    states: Any = "sharded" if cell.strategy == "cyclic, sharded" else "replicated"
    trainer = laconic.CyclicDataParallel(stages, error, stage_optimizer(cell), mesh["worker"], states=states)
    if cell.strategy == "local steps around cyclic":
        around = laconic.init_mesh("cpu", islands=2)
        local = laconic.LocalSteps(model, trainer.optimizer, mesh=around, every=EVERY, codec="fp32")
    for step in range(num_steps(cell)):
        part = 2 * island + worker if cell.strategy == "local steps around cyclic" else worker
        trainer.step(batch(step, part))
        if cell.strategy == "local steps around cyclic":
            local.step()
    trainer.drain()
    _check_features(cell, *stages)
    with trainer.consistent_parameters():
        result = values(model)
    trainer.close()
    return result


def stages_of(cell: Cell, model: Net) -> list[Net]:
    """Two stages that share the parameters of `model`."""
    stages = [
        Net(model.inp, [model.blocks[0]], nn.Identity()),
        Net(nn.Identity(), [model.blocks[1]], model.out),
    ]
    for stage in stages:
        stage.is_checkpointed, stage.is_autocast = model.is_checkpointed, "mixed precision" in cell.features
    return stages
