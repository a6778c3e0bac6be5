"""Cuts a model into stages of equal cost; see [Note: Stages] in stage.py."""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from laconic.comm.agreement import RankGroup
from laconic.cyclic.meter import ActivationMeter
from laconic.cyclic.stage import (
    ModelBlock,
    Stage,
    Values,
    partition,
    refuse_shared,
    restoring_random_states,
    synchronize,
)

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Criterion = Literal["time", "memory", "parameters"]

_REPEATS = 5  # each block is timed this often: the first time warms up, the median of the others counts


def cut(
    model: nn.Module | Sequence[nn.Module] | Sequence[ModelBlock],
    num_stages: int,
    *,
    example: Example | None = None,
    by: Criterion | Sequence[float] | None = None,
    carry: int = 0,
) -> list[Stage]:
    """Cut a model into stages of equal cost, front-heavy where they cannot be equal: see [Note: Front-heavy stages].

    Costs are measured on `example`; gradients, buffers and random states stay as they were. If torch.distributed is
    initialised, the call is collective and the costs of rank 0 count, so that all ranks cut alike. Measured times vary
    between launches, so the cut may vary, and with it the losses under rules that give stages different ages.

    On one rank, one device runs all workers' micro-batches. No worker waits for another there, so the time of a stage
    does not matter. The activations that are alive together do, and those of the first stage live longest.

    Args:
        model: an `nn.Sequential`; modules to call one after the other; or blocks of another model. A causal language
            model of transformers is cut by `laconic.hf.causal_lm.cut_causal_lm`.
        num_stages: the number of stages, one for each worker.
        example: the inputs of one micro-batch of the usual size, on the model's device.
        by: the cost that stages share equally: measured time of forward and backward, measured bytes saved for
            backward, the number of parameters, or a cost for each block.
            Default: "time", and "memory" on one rank.
        carry: the number of trailing inputs (masks, positions) that every module of a sequence takes and none returns.

    Raises:
        ValueError: there are fewer blocks than stages; a stage would have no trainable parameter; stages would share a
            parameter; a cost is measured without an example; or the model is no sequence.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} is not possible; give as many stages as there will be workers")
    ranks = RankGroup()
    if by is None:
        by = "time" if ranks.size > 1 else "memory"
    blocks, values = _blocks_of(model, example, carry)
    refuse_meta(parameter for block in blocks for parameter in _parameters(block))
    costs = ranks.broadcast(_costs(blocks, values, by))
    counts = [0, *accumulate(any(p.requires_grad for p in _parameters(block)) for block in blocks)]
    borders = partition(costs, num_stages, is_allowed=lambda start, stop: counts[stop] > counts[start])
    stages = [Stage(blocks[start:stop]) for start, stop in pairwise(borders)]
    refuse_shared([dict(stage.named_parameters()) for stage in stages])
    return stages


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


def _blocks_of(
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


def _parameters(block: ModelBlock) -> Iterator[nn.Parameter]:
    for module in block.modules.values():
        yield from module.parameters()


def _costs(blocks: Sequence[ModelBlock], values: Values | None, by: Criterion | Sequence[float]) -> list[float]:
    if not isinstance(by, str):
        if len(by) != len(blocks):
            raise ValueError(f"by= gives {len(by)} costs, but the model has {len(blocks)} blocks; give one for each")
        return [float(cost) for cost in by]
    if by == "parameters":
        return [float(sum(p.numel() for p in set(_parameters(block)))) for block in blocks]
    measures: dict[str, Callable[[ModelBlock, Values], float]] = {"time": _time_s, "memory": _memory_bytes}
    if by not in measures:
        raise ValueError(f"by={by!r} is unknown; give 'time', 'memory', 'parameters' or a cost for each block")
    if values is None:
        raise ValueError(f"by={by!r} measures; give example=, the inputs of one micro-batch, or by='parameters'")
    costs = []
    with _restoring_state(blocks, values), torch.enable_grad():
        for block in blocks:
            costs.append(measures[by](block, values))
            values = _detached(block(*_detached(values)))
    return costs


def _time_s(block: ModelBlock, values: Values) -> float:
    """The median duration of a block's forward and backward together."""
    durations_s = []
    for _ in range(_REPEATS):
        inputs = _detached(values)
        leaves = [leaf for leaf in (*inputs, *_parameters(block)) if leaf.requires_grad]
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
def _restoring_state(blocks: Sequence[ModelBlock], values: Values) -> Iterator[None]:
    """Afterwards, buffers (running statistics) and random states are as before."""
    buffers = [buffer for block in blocks for module in block.modules.values() for buffer in module.buffers()]
    copies = [copy.deepcopy(buffer) for buffer in buffers]
    try:
        with restoring_random_states(values):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, copies, strict=True):
                buffer.copy_(value)
