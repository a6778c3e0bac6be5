"""Calls that change a model, two by two in each order: the model trains as the unsharded one, or a call is refused.

`python -m tests.composition.transforms` prints what becomes of each pair. Where neither call of a pair shards the
model, `fully_shard` follows. Four ranks: two of data parallelism times two of tensor parallelism.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import laconic
from laconic.partial.patterns import sliced_layer
from laconic.rehearse import DeadlockError, RankError, ranks
from tests.support.launch import launch

_SOURCES = str(Path(laconic.__file__).parent)
_STEPS, _RATE = 3, 0.2
_CLOSE = 1e-3
"""The difference of losses that is allowed, of the change that training makes."""
_COARSE = {"casts": 0.1, "converts to scaled training": 0.1, "quantises": 0.1}
"""The same beside calls that round: ranks of tensor parallelism round other sums."""
_BY_TORCH = re.compile(
    "Each distinct composable distributed API|Cannot distribute a DTensor with device mesh"
    "|ColwiseParallel currently only support"
)
"""Refusals of torch that say enough."""


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Input layer, two blocks, output layer; sizes that blocks of 64 divide."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(64, 128), nn.Linear(128, 64)
        self.blocks = nn.ModuleList([Block(128, 256), Block(128, 256)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


Axes = dict[str, DeviceMesh]
"""The axes over which calls may distribute: "dp", "tp", both or none."""


def _shard(model: Any, axes: Axes) -> Any:
    if "dp" in axes:
        for module in [each for each in model.modules() if isinstance(each, Block)]:
            laconic.fully_shard(module, mesh=axes["dp"])
        laconic.fully_shard(model, mesh=axes["dp"])
    return model


def _parallelize(model: Any, axes: Axes) -> Any:
    if "tp" in axes:
        for block in model.blocks:
            parallelize_module(block, axes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _slice(model: Any, axes: Axes) -> Any:
    patterns = [sliced_layer(Block, kind="mlp", rows=["up"], columns=["down"])]
    return laconic.partial_updates(model, slice_index=1, num_slices=2, include=["mlp"], patterns=patterns)


def _add_adapters(model: Any, axes: Axes) -> Any:
    torch.manual_seed(1)
    return inject_adapter_in_model(LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False), model)


def _replace(model: Any, axes: Axes) -> Any:
    torch.manual_seed(2)
    model.out = nn.Linear(128, 64)
    return model


CALLS: dict[str, Callable[[Any, Axes], Any]] = {  # each returns the model, or changes it
    "shards": _shard,
    "parallelises tensors": _parallelize,
    "slices": _slice,
    "converts to scaled training": lambda model, axes: laconic.convert_to_scaled_training(model, "mxfp8"),
    "quantises": lambda model, axes: laconic.quantize_(model, skip=["inp", "out"]),
    "adds adapters": _add_adapters,
    "compiles": lambda model, axes: model.compile(backend="eager"),
    "checkpoints activations": lambda model, axes: apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Block)
    ),
    "casts": lambda model, axes: model.to(torch.bfloat16),
    "freezes": lambda model, axes: model.inp.requires_grad_(False),
    "ties": lambda model, axes: setattr(model.blocks[1].up, "weight", model.blocks[0].up.weight),
    "normalises weights": lambda model, axes: parametrizations.weight_norm(model.inp),
    "replaces a layer": _replace,
    "copies": lambda model, axes: copy.deepcopy(model),
    "loads by assignment": lambda model, axes: model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    ),
}
WRAPPERS: dict[str, Callable[[Any, Axes], Any]] = {
    "shards by FSDP2": lambda model, axes: shard_by_torch(model, mesh=axes["dp"]) if "dp" in axes else model,
    "replicates by DDP": lambda model, axes: (
        DistributedDataParallel(model, process_group=axes["dp"].get_group()) if "dp" in axes else model
    ),
}
"""Calls that meet `fully_shard` alone."""


def pairs() -> list[tuple[str, str]]:
    """All pairs in each order."""
    beside = [pair for name in WRAPPERS for pair in (("shards", name), (name, "shards"))]
    return [*permutations(CALLS, 2), *beside]


def _train(pair: tuple[str, str], axes: Axes) -> list[float]:
    """The losses of some steps; those of the whole batch, also where a rank has its half."""
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(8, 64)
    for name in pair if "shards" in pair else (*pair, "shards"):
        changed = (CALLS | WRAPPERS)[name](model, axes)
        model = changed if isinstance(changed, Net | DistributedDataParallel) else model
    batch = batch.to(next(model.parameters()).dtype)
    if "dp" in axes:
        batch = batch.chunk(2)[axes["dp"].get_local_rank()]
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=_RATE)
    losses = []
    for _ in range(_STEPS):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        if "dp" in axes:
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=axes["dp"].get_group())
        losses.append(float(mean))
    return losses


def _tried(pair: tuple[str, str], axes: Axes) -> list[float] | str:
    """The losses; else the error, with whose it is."""
    try:
        return _train(pair, axes)
    except Exception as error:  # of any kind: `judge` looks at it
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        is_named = place.startswith(_SOURCES) or _BY_TORCH.search(str(error))
        return f"{'refused' if is_named else 'UNCLEAR'}: {type(error).__name__} of {Path(place).name}: {error}"


def _job(pair: tuple[str, str], names: tuple[str, ...]) -> list[float] | str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _tried(pair, {name: mesh[name] for name in names})


def judge(pair: tuple[str, str]) -> str:
    """Judge a pair: the model trains as alone, a call is refused, warned of, or raises alone, too; else it is wrong."""
    run = partial(launch, num_ranks=4) if "replicates by DDP" in pair else partial(ranks, nodes=2, local=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            answers = run(_job, pair, ("dp", "tp"))
        except (DeadlockError, RankError) as error:
            return f"WRONG: {error}"
    wanted = ranks(_job, pair, ("tp",), nodes=2, local=2) if "parallelises tensors" in pair else [_tried(pair, {})] * 4
    errors = [answer for answer in answers if isinstance(answer, str)]
    if any(isinstance(want, str) for want in wanted):
        return f"as alone: {wanted[0]}" if errors else f"WRONG: without data parallelism {wanted[0]}"
    if errors:
        return max(errors, key=lambda error: "UNCLEAR" in error)
    coarse = max(_COARSE.get(name, _CLOSE) for name in pair)
    for got, want in zip(answers, wanted, strict=True):
        if any(abs(a - b) > coarse * abs(want[0] - want[-1]) for a, b in zip(got, want, strict=True)):
            ours = [str(each.message) for each in told if "each rank trains a copy of its own" in str(each.message)]
            return f"warned: {ours[0]}" if ours else f"WRONG: losses {got}, and {want} without data parallelism"
    return "right"


if __name__ == "__main__":
    for each in pairs():
        print(f"{' then '.join(each)}: {judge(each)}", flush=True)
