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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.optim import AdamW8bit, Muon, Shampoo, Tiling, matrices_and_rest
from laconic.partial.patterns import sliced_layer
from tests.composition import columns
from tests.composition.matrix import CACHES, CODED, CYCLIC, ISLANDS, OUTER, Cell, keys_of
from tests.support.sharded_net import Block, full_parameters

EVERY, MAX_NORM = 2, 0.5
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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
        self.shift: Tensor | float = 0.0
        self.gain: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.is_autocast else nullcontext():
            x = self.inp(x)
            self.block_dtype = x.dtype
            for block in self.blocks:
                x = checkpoint(self._run, block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            y = self.out(x) + self.shift
            return y if self.gain is None else y * self.gain.to(y.dtype)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.block_calls += 1
        return block(x)


def num_steps(cell: Cell) -> int:
    """Two steps; with local steps one more, after the sync."""
    return 3 if "local" in cell.strategy or cell.strategy == "partial updates" else 2


def num_parts(cell: Cell) -> int:
    """The number of parts of the global batch. Ranks that share a model or a sequence train on one part."""
    shares = bool(cell.features.intersection((*OUTER, "pipeline"))), "context parallel" in cell.features
    is_cyclic = cell.strategy in CYCLIC and "local" not in cell.strategy
    return 2 if is_cyclic else 4 // 2 ** sum(shares)


class Attending(Block):
    """A block that attends to all rows first, those of the other ranks of `group` included."""

    group: dist.ProcessGroup | None = None

    def __init__(self, d: int, h: int) -> None:
        super().__init__(d, h)
        self.qkv = nn.Linear(d, 3 * d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.group is not None:
            key, value = Rows.apply(key, self.group), Rows.apply(value, self.group)
        return super().forward(x + (query @ key.T).softmax(-1) @ value)


class Rows(torch.autograd.Function):
    """The rows of all ranks of a group, (n, d) -> (ranks * n, d)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class Mixture(Block):
    """A block that adds the sum of three experts; a rank that has some of them computes their terms."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__(d, h)
        self.experts = nn.Parameter(torch.randn(3, d, d) / d)

    def forward(self, x: Tensor) -> Tensor:
        x, experts = super().forward(x), self.experts
        if not isinstance(experts, DTensor):
            return x + torch.einsum("bd,edf->ebf", x, experts).tanh().sum(0)
        mesh = experts.device_mesh
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        rows = whole.to_local(grad_placements=[Partial()])
        terms = torch.einsum("bd,edf->ebf", rows, experts.to_local()).tanh().sum(0)
        return x + DTensor.from_local(terms, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def build(cell: Cell, island: int, outer: DeviceMesh | None = None, sequence: dist.ProcessGroup | None = None) -> Net:
    """The cell's model before `fully_shard`; for partial updates the slice of an island.

    `outer` is the mesh over which parameters are cut, and `sequence` the ranks that share one.
    """
    torch.manual_seed(0)
    first, second = Attending if "context parallel" in cell.features else Block, Block
    if "expert parallel" in cell.features:
        second = Mixture
    model = Net(nn.Linear(5, 9), [first(9, 44), second(9, 44)], nn.Linear(9, 3))
    if "scaled" in cell.features:
        laconic.convert_to_scaled_training(model, "mxfp8")
    if "QLoRA" in cell.features:
        laconic.quantize_(model, "nf4", skip=["inp", "out"])
    if cell.has_adapters:
        torch.manual_seed(1)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    if "ignored" in cell.features:
        model.gain = nn.Parameter(torch.ones(1), requires_grad=False)
    if "buffers" in cell.features:
        del model.shift
        model.register_buffer("shift", torch.zeros(1))
    if outer is not None:
        for block in model.blocks if "tensor parallel" in cell.features else ():
            parallelize_module(block, outer, LORA_PLAN if cell.has_adapters else PLAN)
        if isinstance(mixture := model.blocks[1], Mixture):
            cut = distribute_tensor(mixture.experts.detach(), outer, [Shard(0)], src_data_rank=None)
            mixture.experts = nn.Parameter(cut, requires_grad=mixture.experts.requires_grad)
    if isinstance(attending := model.blocks[0], Attending):
        attending.group = sequence
    if cell.strategy == "partial updates":
        pattern = sliced_layer(Block, kind="mlp", rows=["up"], columns=["down"])
        laconic.partial_updates(model, slice_index=island, num_slices=2, include=["mlp"], patterns=[pattern])
    return model


def _blocks(cell: Cell) -> Tiling:
    """Tensor parallelism cuts 44 rows in the middle. Experts have 9 rows each, so 11 would not end where one does."""
    return Tiling(tile=1 if "expert parallel" in cell.features else 11, flat=22)


def make_optimizer(cell: Cell, groups: Any) -> torch.optim.Optimizer:
    """The cell's optimizer of parameters, or of the groups (matrices, rest) for an optimizer of matrices."""
    if cell.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
    if cell.optimizer == "AdamW8bit":
        return AdamW8bit(groups, lr=0.01, eps=1e-3, block=_blocks(cell), min_8bit_size=0)
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


def run_cell(cell: Cell) -> dict[str, Tensor]:
    """Train the cell on this rank and return the whole parameters. Collective.

    Raises:
        AssertionError: a feature of the cell had no effect, so the cell shows nothing.
    """
    if cell.strategy in CYCLIC:
        return _run_cyclic(cell)
    if "pipeline" in cell.features:
        return _run_pipeline(cell)
    mesh, outer, sequence, whole = _mesh(cell)
    is_local = cell.strategy in ("local steps", "partial updates")
    part = dist.get_rank() // (4 // num_parts(cell))
    model: Any = build(cell, dist.get_rank() // 2, outer, sequence)
    _apply_features(cell, model)
    _shard(cell, model, mesh, whole)
    optimizer: Any = optimizer_of(cell, model)
    steps = laconic.LocalSteps(model, optimizer, mesh=mesh, every=EVERY, codec="fp32") if is_local else optimizer
    followers = columns.Followers(model, steps if is_local else None) if columns.PUBLISHED in cell.features else None
    for step in range(num_steps(cell)):
        x, y = (rows if sequence is None else rows.chunk(2)[sequence.rank()] for rows in batch(step, part))
        error(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        steps.step()
        steps.zero_grad()
        if followers is not None and (not is_local or (step + 1) % EVERY == 0):
            followers.follow()
    if followers is not None:
        followers.close()
    _check_features(cell, model)
    return full_parameters(model)


def _shard(cell: Cell, model: Net, mesh: DeviceMesh, whole: DeviceMesh) -> None:
    """Shard the model, or a stage, over `mesh`, a part of the mesh `whole`, with the arguments of the cell."""
    granularity = partial(AdamW8bit.granularity, block=_blocks(cell), min_8bit_size=0)  # by default for larger tensors
    options: dict[str, Any] = {
        "mesh": mesh,
        "cache": "host",
        "mp_policy": PRECISION if "mixed precision" in cell.features else None,
        **(keys_of(cell.strategy) if cell.strategy in CACHES else {}),
        "granularity": granularity if cell.optimizer == "AdamW8bit" else None,
        "checks": laconic.Checks(interval=1, on_damage="regather", unnoticed_edits=True),
        **columns.arguments(cell.features, model, mesh, whole),
    }
    sharing = mesh.mesh[mesh.get_local_rank(0)] if cell.strategy in ("local steps", "partial updates") else mesh.mesh
    columns.spoil(
        cell.features, model, rank=dist.get_rank(), first=int(mesh.mesh.min()), first_of_island=int(sharing.min())
    )
    if cell.strategy in CODED:
        options["wire"] = _wire(cell, laconic.Wire.of(options.get("wire", "exact")))
    for block in model.blocks:
        laconic.fully_shard(block, **options)
    laconic.fully_shard(model, **options)


def _run_pipeline(cell: Cell) -> dict[str, Tensor]:
    """Two stages of one block each, and two ranks on different nodes for each; two micro-batches a step."""
    is_local, has_islands = cell.strategy in ("local steps", "partial updates"), cell.strategy in ISLANDS
    shape, names = ((2, 1, 2), ("replicate", "shard", "stage")) if has_islands else ((2, 2), ("dp", "stage"))
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh, number = whole[names[:-1]] if has_islands else whole["dp"], whole.get_local_rank("stage")
    part, group = dist.get_rank() // 2, whole.get_group("stage")
    model: Any = build(cell, part)
    _apply_features(cell, model)
    stage: Any = stages_of(cell, model)[number]
    names_of = {id(each): name for name, each in model.named_parameters()}
    own = [names_of[id(each)] for each in stage.parameters()]
    has_rules = cell.optimizer in ("Muon", "Shampoo")  # of the whole model: a stage's last matrix is no output layer
    by_rule: list[Any] = matrices_and_rest(model) if has_rules else [{"params": [*model.parameters()]}]
    by_rule = [each | {"params": [names_of[id(one)] for one in each["params"]]} for each in by_rule]
    _shard(cell, stage, mesh, whole)
    now = {name: each for name, each in zip(own, stage.parameters(), strict=True) if each.requires_grad}
    groups = [each | {"params": [now[name] for name in each["params"] if name in now]} for each in by_rule]
    optimizer: Any = make_optimizer(cell, groups)
    steps = laconic.LocalSteps(stage, optimizer, mesh=mesh, every=EVERY, codec="fp32") if is_local else optimizer
    schedule = ScheduleGPipe(
        PipelineStage(stage, number, 2, torch.device("cpu"), group=group),
        2,
        loss_fn=lambda output, target: error(output, target) / 2,
        scale_grads=False,
    )
    for step in range(num_steps(cell)):
        x, y = batch(step, part)
        schedule.step(*(() if number else (x,)), **({"target": y} if number else {}))
        trained = [each for each in stage.parameters() if each.grad is not None]
        norm: Any = nn.utils.get_total_norm([each.grad for each in trained])
        squared = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).square()
        dist.all_reduce(squared, group=group)
        nn.utils.clip_grads_with_norm_(trained, MAX_NORM, squared.sqrt())
        steps.step()
        steps.zero_grad()
    _check_features(
        replace(cell, features=cell.features - {"checkpointing"}), *([] if stage.is_checkpointed else [stage])
    )
    found = full_parameters(stage)
    told: list[Any] = [None, None]
    dist.all_gather_object(told, dict(zip(own, found.values(), strict=True)), group=group)
    both = told[0] | told[1]
    return {name: both.get(name, parameter) for name, parameter in model.named_parameters()}


def _wire(cell: Cell, wire: laconic.Wire) -> laconic.Wire:
    """The crossings of a coded cell. Matrix optimizers get gradients in eight bits, as docs/thinner.md advises."""
    if cell.strategy == "4bit replicas":
        wire = laconic.Wire(gradients="int4")
    is_lossy = not wire.keeps_gradients
    return replace(wire, gradients="int8") if is_lossy and cell.optimizer in ("Muon", "Shampoo") else wire


def _mesh(cell: Cell) -> tuple[DeviceMesh, DeviceMesh | None, dist.ProcessGroup | None, DeviceMesh]:
    """The mesh of fully_shard, that over which parameters are cut before, the ranks that share a sequence, and all."""
    is_context = "context parallel" in cell.features
    if not cell.features.intersection(OUTER):
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        mesh = laconic.init_mesh("cpu", islands=2 if cell.strategy in ISLANDS else 1)
        return mesh, None, pairs.get_group("cp") if is_context else None, mesh
    if cell.strategy in ISLANDS:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "outer"))
        return mesh["replicate", "shard"], mesh["outer"], None, mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "outer"))
    return mesh["dp"], mesh["outer"], mesh.get_group("dp") if is_context else None, mesh


def _apply_features(cell: Cell, model: Net) -> None:
    for block in model.blocks if "compile" in cell.features else ():
        block.compile(backend="aot_eager")
    model.is_checkpointed = "checkpointing" in cell.features


def _check_features(cell: Cell, *models: Net) -> None:
    for model in models:
        assert model.block_calls == (2 * num_steps(cell) * len(model.blocks) if "checkpointing" in cell.features else 0)
        assert model.block_dtype is (torch.bfloat16 if "mixed precision" in cell.features else torch.float32)


def _run_cyclic(cell: Cell) -> dict[str, Tensor]:
    """Two workers of two stages; the other two ranks do the same, are the other island, or hold the other halves.

    Workers share a node, but for messages in few bits.
    """
    is_coded = cell.strategy in CODED
    names = ("worker", "outer") if is_coded else ("outer", "worker")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    worker, island = mesh.get_local_rank("worker"), mesh.get_local_rank("outer")
    is_cut, is_context = bool(cell.features.intersection(OUTER)), "context parallel" in cell.features
    model = build(cell, 0, mesh["outer"] if is_cut else None, mesh.get_group("outer") if is_context else None)
    _apply_features(cell, model)
    stages = stages_of(cell, model)
    states: Any = "sharded" if cell.strategy == "cyclic, sharded" else "replicated"
    trainer = laconic.CyclicDataParallel(
        stages,
        error,
        stage_optimizer(cell),
        mesh if is_context else mesh["worker"],
        states=states,
        wire="8bit" if is_coded else "exact",
    )
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
    if columns.PUBLISHED in cell.features:
        followers = columns.Followers(nn.ModuleList(stages))
        followers.follow(trainer.consistent_parameters)
        followers.close()
    with trainer.consistent_parameters():
        result = full_parameters(model)
    trainer.close()
    return result


def stages_of(cell: Cell, model: Net) -> list[Net]:
    """Two stages that share the parameters of `model`."""
    stages = [
        Net(model.inp, [model.blocks[0]], nn.Identity()),
        Net(nn.Identity(), [model.blocks[1]], model.out),
    ]
    for stage in stages:
        is_cyclic = cell.strategy in CYCLIC
        stage.is_checkpointed = model.is_checkpointed
        stage.is_autocast = is_cyclic and "mixed precision" in cell.features
        if "buffers" in cell.features:
            del stage.shift
            stage.register_buffer("shift", torch.zeros(1))
    return stages
