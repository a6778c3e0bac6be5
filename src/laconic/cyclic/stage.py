"""A stage: consecutive blocks of a model as one module; runs of blocks of equal cost.

[Note: Stages]
A stage is a module that maps tensors to a tensor or a tuple of tensors. Its outputs are the inputs of the next stage;
outputs that require no gradient (masks, positions, rotary angles) are carried along. Stages share the model's own
parameters, under the model's own names. So patterns of names, checkpoints and the whole model go on working.

[Note: Front-heavy stages]
Every worker runs all stages, so stages of unequal cost leave no worker idle. But they decide when a version is needed.
Let the stages before j take the share C_j of the time of a batch. Under rule v2, worker N - 1 - j is the first to use
the new version of stage j. It starts its batch j / N of a batch before worker N - 1, which completes the gradient. It
reaches stage j after the forwards of the stages before j. The gradient is complete when worker N - 1 has only the
backwards of the stages before j left to do. These forwards and backwards together take C_j. So worker N - 1 - j waits
in every batch, unless C_j >= j / N. So each prefix of stages should have at least its share of the cost. Example: with
stages of 40 % and 60 %, worker 0 waits for 10 % of every batch; with stages of 60 % and 40 % it never waits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

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

    @property
    def num_blocks(self) -> int:
        """The number of blocks in this stage."""
        return len(self._blocks)

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


def trainable(stage: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a stage by name; a shared parameter has one name only."""
    return {name: p for name, p in stage.named_parameters() if p.requires_grad}


def refuse_shared(by_stage: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Raise ValueError if two stages share one of these parameters."""
    first_use: dict[int, tuple[int, str]] = {}
    for stage, parameters in enumerate(by_stage):
        for name, parameter in parameters.items():
            first_stage, first_name = first_use.setdefault(id(parameter), (stage, name))
            if first_stage != stage:
                raise ValueError(
                    f"{first_name} in stage {first_stage} and {name} in stage {stage} are one parameter, whose "
                    "gradient would be complete at two different times; untie them (transformers: "
                    "tie_word_embeddings=False), or cut so that both are in one stage"
                )


_TOLERANCE = 0.05
"""The part of a stage's share that a prefix may lack. Measured costs vary as much; a worker waits no longer."""
_ROUNDING = 1e-9  # costs that differ by less are equal
_Cost = Callable[[int, int, int], float]  # the cost of a stage that runs from one block to before another


def partition(
    costs: Sequence[float], num_stages: int, *, is_allowed: Callable[[int, int], bool] = lambda start, stop: True
) -> list[int]:
    """Partition blocks of these costs, none negative, into N stages; see [Note: Front-heavy stages].

    Three criteria choose the partition, one after the other: no prefix falls short of its share j / N of the cost by
    more than a tolerance, or than it must; the largest stage is as small as possible; the sum of the squares of all
    stages is as small as possible. `is_allowed` says whether the blocks from `start` to before `stop` may be a stage.

    Returns:
        Borders 0 = b_0 < ... < b_N = len(costs); stage j has the blocks from b_j to before b_{j+1}.

    Raises:
        ValueError: there are fewer blocks than stages, or no allowed partition, or a cost is negative.
    """
    if len(costs) < num_stages:
        raise ValueError(
            f"{num_stages} stages need at least as many blocks, and the model has {len(costs)}; take fewer workers, or "
            "give the model as smaller modules"
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
