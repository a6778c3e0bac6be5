"""Cuts a model into stages of equal cost, front-heavy where they cannot be equal.

[Note: Stages]
A stage is a module that maps tensors to a tensor or a tuple of tensors. Its outputs are the next one's inputs; those
that require no gradient (masks, positions, rotary angles) are carried along. Stages share the model's own parameters,
under the model's own names, so rules by name, checkpoints and the whole model go on working.
A worker runs all stages, so unequal ones leave nobody idle, but they change who can have the newest parameters. If the
stages before j take less than j / N of the time, worker N - 1 - j is through with their forward before the gradient it
should have seen is complete, and waits. So a prefix of stages should cost its share at least.
"""

from __future__ import annotations

import copy
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from laconic.comm.agreement import RankGroup
from laconic.cyclic.stages.meter import ActivationMeter

Values = tuple[Tensor, ...]
Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Criterion = Literal["time", "memory", "parameters"]

_REPEATS = 5
"""Of each block when it is timed; the first is for warming up, the median of the rest counts."""
_TOLERANCE = 0.05
"""Of a stage's share of the cost, by which a prefix may fall short: measured costs are noisy to that amount, and the
schedule loses at most as much of one time step."""
_ROUNDING = 1e-9
"""Of shares of the cost."""
_Cost = Callable[[int, int, int], float]
"""Of a stage from a block to before another."""


class ModelBlock(Protocol):
    """The smallest piece that a model is cut at."""

    modules: dict[str, nn.Module]
    """By their names in the model."""
    shells: Sequence[nn.Module]
    """Modules without parts of their own, whose code runs and may ask whether it trains."""

    def __call__(self, *values: Tensor) -> Values:
        """Outputs that are the next block's inputs."""
        ...


class Stage(nn.Module):
    """Consecutive blocks of a model: `forward(*hidden) -> Tensor | tuple[Tensor, ...]`."""

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)
        for block in blocks:
            for name, module in block.modules.items():
                _graft(self, name, module)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model in this stage."""
        return len(self._blocks)

    def train(self, mode: bool = True) -> Stage:
        """See nn.Module."""
        for block in self._blocks:
            for shell in block.shells:
                shell.training = mode
        return super().train(mode)

    def forward(self, *hidden: Tensor) -> Tensor | Values:
        for block in self._blocks:
            hidden = block(*hidden)
        return hidden[0] if len(hidden) == 1 else hidden


def cut(
    model: nn.Module | Sequence[nn.Module],
    num_stages: int,
    *,
    example: Example | None = None,
    by: Criterion | Sequence[float] = "time",
    carry: int = 0,
) -> list[Stage]:
    """Cut a model into stages; see [Note: Stages].

    Costs are measured on `example` and leave no trace in gradients, buffers or random states. When torch.distributed is
    initialised every rank must call this, and rank 0's costs count, so that all cut alike. Measured times vary between
    launches, and so may the cut, and the numbers under rules whose stages differ in age.

    Args:
        model: an `nn.Sequential`; modules to call one after the other; or a transformers causal language model, whose
            inputs are those of `example` by position or name (default: `input_ids` alone) and whose output is logits.
        num_stages: as many as there will be workers.
        example: inputs of one micro-batch, of the usual size, on the model's device. A language model without one gets
            128 random tokens.
        by: what stages shall have equal shares of: measured time of forward and backward, measured bytes saved for
            backward, numbers of parameters, or costs given for each block (a module; of a language model: embedding,
            layers, head).
        carry: of a sequence of modules, how many trailing inputs (masks, positions) each takes and none returns.

    Returns:
        The stages. Cut at the same blocks, prefixes cost their share at least where that is possible, and the largest
        stage is as small as possible.

    Raises:
        ValueError: fewer blocks than stages; a stage would have no trainable parameter; stages would share a parameter;
            a measured cost without an example; a language model that is not the sequence of its layers.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} is not possible; give as many stages as there will be workers")
    modules = [model] if isinstance(model, nn.Module) else model
    if any(parameter.is_meta for module in modules for parameter in module.parameters()):
        raise ValueError("the model is on the meta device; give its parameters values before it is cut")
    blocks, values = _blocks_of(model, example, carry)
    costs = RankGroup().broadcast(_costs(blocks, values, by))
    borders = partition(costs, num_stages, is_allowed=_has_trainable(blocks))
    stages = [Stage(blocks[start:stop]) for start, stop in pairwise(borders)]
    _refuse_sharing(stages)
    return stages


def unstage(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The state dict of the model that was cut, under its own names; tensors are not copied."""
    return {name: value for stage in stages for name, value in stage.state_dict().items()}


def partition(
    costs: Sequence[float], num_stages: int, *, is_allowed: Callable[[int, int], bool] = lambda start, stop: True
) -> list[int]:
    """Borders 0 = b_0 < ... < b_N = len(costs) of N runs of blocks, run j from b_j to before b_{j+1}.

    First no prefix shall fall short of its share j / N of the cost, by more than a tolerance, and as little as possible
    if it must; then the largest run shall be small; then all shall be alike, by the sum of their squares.

    Args:
        costs: of the blocks, none negative.
        is_allowed: whether the blocks from `start` to before `stop` may be a stage.

    Raises:
        ValueError: fewer blocks than stages, a negative cost, or no allowed partition.
    """
    if len(costs) < num_stages:
        raise ValueError(
            f"{num_stages} stages need at least as many blocks, and the model has {len(costs)}; take fewer workers, or "
            "cut it into smaller modules"
        )
    if min(costs) < 0:
        raise ValueError(f"costs are {list(costs)}; none may be negative")
    total = sum(costs)
    shares = [0.0, *accumulate(cost / total if total else 1 / len(costs) for cost in costs)]

    def shortfall(stage: int, start: int, stop: int) -> float:
        return max((stage - _TOLERANCE) / num_stages - shares[start], 0.0)

    def size(stage: int, start: int, stop: int) -> float:
        return shares[stop] - shares[start]

    def square(stage: int, start: int, stop: int) -> float:
        return size(stage, start, stop) ** 2

    def is_possible(stage: int, start: int, stop: int) -> bool:
        return is_allowed(start, stop) and all(cost(stage, start, stop) <= limit for cost, limit in limits)

    limits: list[tuple[_Cost, float]] = []
    borders = None
    for cost, total_of in ((shortfall, max), (size, max), (square, operator.add)):
        borders = _best_borders(num_stages, len(costs), cost, total_of, is_possible)
        if borders is None:
            raise ValueError(
                f"the model cannot be cut into {num_stages} stages with a trainable parameter each; take fewer "
                "workers, or train more of it"
            )
        limits.append((cost, max(cost(stage, *run) for stage, run in enumerate(pairwise(borders))) + _ROUNDING))
    assert borders is not None
    return borders


def _best_borders(
    num_stages: int,
    num_blocks: int,
    cost: _Cost,
    total_of: Callable[[float, float], float],
    is_possible: Callable[[int, int, int], bool],
) -> list[int] | None:
    """Borders with the least total cost of the runs, all possible; None if there are none. Equals: long runs first.

    Dynamic programming from the last stage to the first, which costs num_stages * num_blocks^2.
    """
    best: dict[int, tuple[float, list[int]]] = {num_blocks: (0.0, [num_blocks])}
    for stage in reversed(range(num_stages)):
        found: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, num_blocks) if stage else [0]:
            options = [
                (total_of(cost(stage, start, stop), rest), -stop)
                for stop, (rest, _) in best.items()
                if start < stop and is_possible(stage, start, stop)
            ]
            if options:
                total, stop = min(options)
                found[start] = total, [start, *best[-stop][1]]
        best = found
    return best[0][1] if 0 in best else None


# ------------------------------------------------------------------------------------------------ blocks


class _Module:
    """A module of a sequence as a block."""

    def __init__(self, name: str, module: nn.Module, *, carry: int, is_last: bool, takes_tuple: bool) -> None:
        self.modules = {name: module}
        self.shells: Sequence[nn.Module] = ()
        self._module, self._carry, self._is_last, self._takes_tuple = module, carry, is_last, takes_tuple

    def __call__(self, *values: Tensor) -> Values:
        carried = values[len(values) - self._carry :]
        output = self._module(values) if self._takes_tuple and len(values) > 1 else self._module(*values)
        if not isinstance(output, tuple):
            output = (output,)
        return output if self._is_last else (*output, *carried)


def _blocks_of(
    model: nn.Module | Sequence[nn.Module], example: Example | None, carry: int
) -> tuple[list[ModelBlock], Values | None]:
    """The blocks of a model, and the inputs of the first."""
    if isinstance(model, nn.Sequential | nn.ModuleList) or not isinstance(model, nn.Module):
        if isinstance(example, Mapping):
            raise ValueError("a sequence of modules takes its inputs by position; give the example as a tuple")
        if carry and isinstance(model, nn.Sequential):
            raise ValueError("nn.Sequential passes one value on and has no carried inputs; give list(model) to carry")
        named = list(model.named_children()) if isinstance(model, nn.Module) else list(enumerate(model))
        blocks: list[ModelBlock] = [
            _Module(
                str(name), module, carry=carry, is_last=index == len(named) - 1,
                takes_tuple=isinstance(model, nn.Sequential),
            )
            for index, (name, module) in enumerate(named)
        ]  # fmt: skip
        values = (example,) if isinstance(example, Tensor) else None if example is None else tuple(example)
        return blocks, values
    from laconic.cyclic.stages.causal_lm import blocks_of

    return blocks_of(model, example)


def _graft(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at `path` below `root`, in empty modules where there are none yet."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def _parameters(block: ModelBlock) -> Iterator[nn.Parameter]:
    for module in block.modules.values():
        yield from module.parameters()


def _has_trainable(blocks: Sequence[ModelBlock]) -> Callable[[int, int], bool]:
    counts = [0, *accumulate(any(p.requires_grad for p in _parameters(block)) for block in blocks)]
    return lambda start, stop: counts[stop] > counts[start]


def _refuse_sharing(stages: Sequence[nn.Module]) -> None:
    holder: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            other, known = holder.setdefault(id(parameter), (index, name))
            if other != index:
                raise ValueError(
                    f"{known} in stage {other} and {name} in stage {index} are one parameter, whose gradient would be "
                    "complete at two different times; untie them (transformers: tie_word_embeddings=False), or cut so "
                    "that both are in one stage"
                )


# ------------------------------------------------------------------------------------------------ costs


def _costs(blocks: Sequence[ModelBlock], values: Values | None, by: Criterion | Sequence[float]) -> list[float]:
    if not isinstance(by, str):
        costs = [float(cost) for cost in by]
        if len(costs) != len(blocks):
            raise ValueError(f"by= gives {len(costs)} costs, but the model has {len(blocks)} blocks; give one for each")
        return costs
    if by == "parameters":
        return [float(sum(p.numel() for p in set(_parameters(block)))) for block in blocks]
    if by not in ("time", "memory"):
        raise ValueError(f"by={by!r} is unknown; give 'time', 'memory', 'parameters' or a cost for each block")
    if values is None:
        raise ValueError(f"by={by!r} measures; give example=, the inputs of one micro-batch, or by='parameters'")
    with _leaving_no_trace(blocks, values), torch.enable_grad():
        costs = []
        for block in blocks:
            measured = [_measure(block, values, by) for _ in range(_REPEATS if by == "time" else 1)]
            costs.append(statistics.median(measured[1:] or measured))
            values = _detached(block(*_detached(values)))
        return costs


def _detached(values: Values) -> Values:
    """As a stage gets what the one before returned."""
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in values)


def _measure(block: ModelBlock, values: Values, by: str) -> float:
    """Seconds of forward and backward of one block, or the bytes it saves."""
    inputs = _detached(values)
    modules = nn.ModuleList(block.modules.values())
    if by == "memory":
        meter = ActivationMeter()
        with meter.forward(modules):
            outputs = block(*inputs)
        return float(meter.live_bytes)
    leaves = [leaf for leaf in (*inputs, *modules.parameters()) if leaf.requires_grad]
    _synchronize(values)
    start_s = time.perf_counter()
    outputs = block(*inputs)
    heads = [output for output in outputs if output.requires_grad]
    if heads:
        torch.autograd.grad(heads, leaves, [torch.ones_like(head) for head in heads], allow_unused=True)
    _synchronize(values)
    return time.perf_counter() - start_s


def _synchronize(values: Values) -> None:
    if any(value.is_cuda for value in values):
        torch.cuda.synchronize()


@contextmanager
def _leaving_no_trace(blocks: Sequence[ModelBlock], values: Values) -> Iterator[None]:
    """Buffers (running statistics) and random states are afterwards as before."""
    buffers = [buffer for block in blocks for module in block.modules.values() for buffer in module.buffers()]
    copies = [copy.deepcopy(buffer) for buffer in buffers]
    try:
        with torch.random.fork_rng({value.device for value in values if value.is_cuda}):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, copies, strict=True):
                buffer.copy_(value)
