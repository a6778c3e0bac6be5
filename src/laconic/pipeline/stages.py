"""Stages, each of consecutive blocks of a model as one module, and how a model is cut into stages of equal cost.

[Note: Stages]
A stage is a module that maps tensors to a tensor or a tuple of tensors. Its outputs are the inputs of the next stage;
outputs that require no gradient (masks, positions, rotary angles) are carried along. Stages share the model's own
parameters, under the model's own names. So patterns of names, checkpoints and the whole model go on working.
The stages of a pipeline and those of the cyclic schedule are cut by this arithmetic, each with criteria of its own.
"""

from __future__ import annotations

import copy
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from laconic.pipeline.meter import ActivationMeter

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Criterion = Literal["time", "memory", "parameters"]
Values = tuple[Tensor, ...]


class ModelBlock(Protocol):
    """The smallest part of a model that `cut` keeps whole."""

    modules: dict[str, nn.Module]
    """The modules of the block, by their names in the model."""
    shells: Sequence[nn.Module]
    """Copies of the modules around the block's modules. Their forward runs, and may look at `training`."""

    def __call__(self, *values: Tensor) -> Values:
        """Run the block; the outputs are the inputs of the next block."""
        ...


class Stage(nn.Module):
    """Consecutive blocks of a model: `forward(*hidden) -> Tensor | tuple[Tensor, ...]`; see [Note: Stages]."""

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)
        self.num_blocks = len(blocks)
        for block in blocks:
            for path, module in block.modules.items():
                self._graft(path, module)

    def _graft(self, path: str, module: nn.Module) -> None:
        """Register a module under its path in the model, with empty modules for its parents."""
        *parents, name = path.split(".")
        root: nn.Module = self
        for parent in parents:
            if parent not in root._modules:
                root.add_module(parent, nn.Module())
            root = root.get_submodule(parent)
        root.add_module(name, module)

    def train(self, mode: bool = True) -> Stage:
        """See nn.Module.train."""
        for block in self._blocks:
            for shell in block.shells:
                shell.training = mode
        return super().train(mode)

    def forward(self, *hidden: Tensor) -> Tensor | Values:
        """Run all blocks."""
        for block in self._blocks:
            hidden = block(*hidden)
        return hidden[0] if len(hidden) == 1 else hidden


def unstage(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The state dict of the model that was cut into `stages`, under the model's names; tensors are not copied."""
    return {name: value for stage in stages for name, value in stage.state_dict().items()}


# -- where to cut: borders between blocks ------------------------------------------------------------------------------

_TOLERANCE = 0.05
"""The part of a stage's share that a prefix may lack. Measured costs vary as much; a worker waits no longer."""
_ROUNDING = 1e-9  # costs that differ by less are equal
_Cost = Callable[[int, int, int], float]  # the cost of a stage that runs from one block to before another


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    is_allowed: Callable[[int, int], bool] = lambda start, stop: True,
    is_front_heavy: bool = True,
) -> list[int]:
    """Partition blocks of these costs, none negative, into N stages.

    Three criteria choose the partition, one after the other: no prefix falls short of its share j / N of the cost by
    more than a tolerance, or than it must, if `is_front_heavy`: [Note: Front-heavy stages] in cyclic/stages.py; the
    largest stage is as small as possible; the sum of the squares of all stages is as small as possible. `is_allowed`
    says whether the blocks from `start` to before `stop` may be a stage.

    Returns:
        Borders 0 = b_0 < ... < b_N = len(costs); stage j has the blocks from b_j to before b_{j+1}.

    Raises:
        ValueError: there are fewer blocks than stages, or no allowed partition, or a cost is negative.
    """
    if len(costs) < num_stages:
        raise ValueError(
            f"{num_stages} stages need at least as many blocks, and the model has {len(costs)}; take fewer workers or "
            "stages, or give the model as smaller modules"
        )
    if min(costs) < 0:
        raise ValueError(f"costs are {list(costs)}; none may be negative")
    total = sum(costs)
    shares = [0.0, *accumulate(cost / total if total else 1 / len(costs) for cost in costs)]

    criteria: list[tuple[_Cost, Callable[[float, float], float]]] = [
        (lambda stage, start, stop: max((stage - _TOLERANCE) / num_stages - shares[start], 0.0), max),
        (lambda stage, start, stop: shares[stop] - shares[start], max),
        (lambda stage, start, stop: (shares[stop] - shares[start]) ** 2, operator.add),
    ]  # the shortfall of the prefix before a stage, the size of a stage, and its square
    if not is_front_heavy:
        del criteria[0]

    def is_possible(stage: int, start: int, stop: int) -> bool:
        return is_allowed(start, stop) and all(cost(stage, start, stop) <= limit for cost, limit in limits)

    limits: list[tuple[_Cost, float]] = []
    borders: list[int] = []
    for cost, combine in criteria:
        borders = _best_borders(num_stages, len(costs), cost, combine, is_possible)
        if not borders:
            raise ValueError(
                f"the model cannot be cut into {num_stages} stages with a trainable parameter each; take fewer "
                "workers, or train more of the model"
            )
        limits.append((cost, max(cost(stage, *run) for stage, run in enumerate(pairwise(borders))) + _ROUNDING))
    return borders


def _best_borders(
    num_stages: int,
    num_blocks: int,
    cost: _Cost,
    combine: Callable[[float, float], float],
    is_possible: Callable[[int, int, int], bool],
) -> list[int]:
    """The borders with the least combined cost; empty if there are none. In a tie the first stages are long."""
    # Dynamic programming from the last stage to the first, in O(num_stages * num_blocks^2).
    best: dict[int, tuple[float, list[int]]] = {num_blocks: (0.0, [num_blocks])}
    for stage in reversed(range(num_stages)):
        longer: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, num_blocks) if stage else [0]:
            options = [
                (combine(cost(stage, start, stop), rest), -stop)
                for stop, (rest, _) in best.items()
                if start < stop and is_possible(stage, start, stop)
            ]
            if options:
                total, negative_stop = min(options)
                longer[start] = total, [start, *best[-negative_stop][1]]
        best = longer
    return best[0][1] if 0 in best else []


# -- cut ---------------------------------------------------------------------------------------------------------------

_REPEATS = 5  # each block is timed this often: the first time warms up, the median of the others counts


def refuse_shared(by_stage: Mapping[int, Iterable[tuple[str, object]]], reason: str) -> None:
    """Refuse stages that share a parameter or a module, given with its names by the number of the stage.

    Raises:
        ValueError: two do. `reason` follows the names in the message.
    """
    first_use: dict[int, tuple[int, str]] = {}
    for stage, named in by_stage.items():
        for name, shared in named:
            first, first_name = first_use.setdefault(id(shared), (stage, name))
            if first != stage:
                raise ValueError(f"{first_name} in stage {first} and {name} in stage {stage} are one {reason}")


def refuse_meta(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse parameters without values.

    Raises:
        ValueError: there is one.
    """
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError("the model is on the meta device; give its parameters values before it is cut")


class _ModuleBlock:
    """A module of a sequence as a block."""

    shells: Sequence[nn.Module] = ()

    def __init__(self, name: str, module: nn.Module, *, carry: int, is_last: bool, takes_tuple: bool) -> None:
        self.modules = {name: module}
        self._module, self._carry, self._is_last, self._takes_tuple = module, carry, is_last, takes_tuple

    def __call__(self, *values: Tensor) -> Values:
        carried = values[len(values) - self._carry :]
        output = self._module(values) if self._takes_tuple and len(values) > 1 else self._module(*values)
        if not isinstance(output, tuple):
            output = (output,)
        return output if self._is_last else (*output, *carried)


def blocks_in(
    model: nn.Module | Sequence[nn.Module] | Sequence[ModelBlock], example: Example | None, carry: int
) -> tuple[Sequence[ModelBlock], Values | None]:
    """The blocks of a model, and the inputs of the first block."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} is no sequence of modules; give a list of its modules, or an nn.Sequential; or cut"
            " a causal language model of transformers with laconic.hf.causal_lm.cut_causal_lm"
        )
    if isinstance(example, Mapping):
        raise ValueError("a sequence of modules takes its inputs by position; give the example as a tuple")
    is_sequential = isinstance(model, nn.Sequential)
    if carry and is_sequential:
        raise ValueError("nn.Sequential passes one value on and has no carried inputs; give list(model) to carry")
    values = None if example is None else (example,) if isinstance(example, Tensor) else tuple(example)
    if not isinstance(model, nn.Module) and not all(isinstance(each, nn.Module) for each in model):
        return list(model), values  # type: ignore[arg-type]
    named: Any = model.named_children() if isinstance(model, nn.Module) else enumerate(model)
    named = list(named)
    blocks = [
        _ModuleBlock(str(name), module, carry=carry, is_last=number == len(named), takes_tuple=is_sequential)
        for number, (name, module) in enumerate(named, 1)
    ]
    return blocks, values


def parameters_of(block: ModelBlock) -> Iterator[nn.Parameter]:
    """The parameters of a block."""
    for module in block.modules.values():
        yield from module.parameters()


def costs_of(blocks: Sequence[ModelBlock], values: Values | None, by: Criterion | Sequence[float]) -> list[float]:
    """The cost of each block: see `by` of `cut`. Raises ValueError if it cannot be measured, or is unknown."""
    if not isinstance(by, str):
        if len(by) != len(blocks):
            raise ValueError(f"by= gives {len(by)} costs, but the model has {len(blocks)} blocks; give one for each")
        return [float(cost) for cost in by]
    if by == "parameters":
        return [float(sum(p.numel() for p in set(parameters_of(block)))) for block in blocks]
    measures: dict[str, Callable[[ModelBlock, Values], float]] = {"time": _time_s, "memory": _memory_bytes}
    if by not in measures:
        raise ValueError(f"by={by!r} is unknown; give 'time', 'memory', 'parameters' or a cost for each block")
    if values is None:
        raise ValueError(f"by={by!r} measures; give example=, the inputs of one micro-batch, or by='parameters'")
    costs = []
    modules = (module for block in blocks for module in block.modules.values())
    with restoring_state(modules, values), torch.enable_grad():
        for block in blocks:
            costs.append(measures[by](block, values))
            values = _detached(block(*_detached(values)))
    return costs


def _time_s(block: ModelBlock, values: Values) -> float:
    """The median duration of a block's forward and backward together."""
    durations_s = []
    for _ in range(_REPEATS):
        inputs = _detached(values)
        leaves = [leaf for leaf in (*inputs, *parameters_of(block)) if leaf.requires_grad]
        synchronize(values)
        start_s = time.perf_counter()
        heads = [output for output in block(*inputs) if output.requires_grad]
        if heads:
            torch.autograd.grad(heads, leaves, [torch.ones_like(head) for head in heads], allow_unused=True)
        synchronize(values)
        durations_s.append(time.perf_counter() - start_s)
    return statistics.median(durations_s[1:])


def _memory_bytes(block: ModelBlock, values: Values) -> float:
    """The bytes that a block saves for backward."""
    meter = ActivationMeter()
    with meter.forward(nn.ModuleList(block.modules.values())):
        outputs = block(*_detached(values))
    live_bytes = meter.live_bytes
    del outputs  # until here, their graph held the storages that the meter counts
    return live_bytes


def _detached(values: Values) -> Values:
    """The values as a stage receives them, cut off from the graph of the block before."""
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in values)


@contextmanager
def restoring_state(modules: Iterable[nn.Module], values: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards, buffers (running statistics) and random states are as before."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    copies = [copy.deepcopy(buffer) for buffer in buffers]
    try:
        with restoring_random_states(values):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, copies, strict=True):
                buffer.copy_(value)


@contextmanager
def restoring_random_states(values: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards, the random states of the CPU and of the accelerators that hold `values` are as before."""
    devices = _accelerators(values)
    kind = next((device.type for device in devices), "cpu")  # the CPU's state is restored whatever this says
    with torch.random.fork_rng(devices, device_type=kind):
        yield


def synchronize(values: Iterable[Tensor]) -> None:
    """Wait until the accelerators that hold `values` have finished all work."""
    for device in _accelerators(values):
        torch.accelerator.synchronize(device)


def _accelerators(values: Iterable[Tensor]) -> set[torch.device]:
    return {value.device for value in values if value.device.type != "cpu"}
