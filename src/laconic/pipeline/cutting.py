"""How a model is cut into the stages of a pipeline: by cost or by hand, alike on all ranks.

[Note: Copies of tied parameters]
Stages of one pipeline are on different ranks, so they cannot share a parameter. The cut gives each stage after the
first that uses it a copy under its own name, and notes the copies. `Pipeline` adds up their gradients. The model that
was cut is not tied any more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from laconic.comm.agreement import RankGroup
from laconic.pipeline.stages import Criterion, Example, ModelBlock, Stage, blocks_in, costs_of, partition, refuse_shared


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """A model cut into the stages of a pipeline."""

    borders: tuple[int, ...]
    """The first block of each stage, and the number of blocks."""
    stages: tuple[Stage, ...]
    """All stages; a rank keeps those that its schedule gives it."""
    tied: tuple[tuple[tuple[int, str], ...], ...] = ()
    """The copies of each parameter that several stages use, as (stage, name): [Note: Copies of tied parameters]."""
    digest: str = ""
    """Of the names, shapes and dtypes of all parameters by stage: equal on ranks that have cut one model alike."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.borders) - 1


def cut_pipeline(
    model: nn.Module | Sequence[nn.Module] | Sequence[ModelBlock],
    num_stages: int,
    *,
    example: Example | None = None,
    by: Criterion | Sequence[float] | None = None,
    borders: Sequence[int] | None = None,
    carry: int = 0,
) -> PipelineCut:
    """Cut a model into stages, of which the most expensive one is as cheap as possible. The model may be on meta.

    An embedding and a head are blocks as all others. Measured time knows that an embedding is cheap and a head is not;
    the number of parameters knows what both take in memory. If costs are measured and torch.distributed is initialised,
    the call is collective, and the costs of rank 0 count.

    Args:
        model: an `nn.Sequential`; modules to call one after the other; or blocks of another model, as those of
            `laconic.hf.causal_lm.blocks_of`.
        num_stages: the number of stages: `PipelinePolicy.num_stages`.
        example: the inputs of one micro-batch, on the model's device, to measure on.
        by: the cost that stages share: measured time of forward and backward, measured bytes saved for backward, the
            number of parameters, or a cost for each block. Default: "time" with an example, "parameters" without.
        borders: the first block of each stage but the first, in place of a cost.
        carry: the number of trailing inputs (masks, positions) that every module of a sequence takes and none returns.

    Raises:
        ValueError: there are fewer blocks than stages; the borders do not make so many stages; stages share a module,
            or a buffer; a cost is measured without an example; or the model is no sequence.
    """
    blocks, values = blocks_in(model, example, carry)
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} is not possible; give PipelinePolicy.num_stages")
    if borders is not None and by is not None:
        raise ValueError(f"borders={list(borders)} and by={by!r} both say where to cut; give one of them")
    if borders is not None:
        found = _by_hand(borders, num_stages, len(blocks))
    else:
        by = by or ("parameters" if values is None else "time")
        costs = costs_of(blocks, values, by)
        if by in ("time", "memory"):
            costs = RankGroup().broadcast(costs)
        found = partition(costs, num_stages, is_front_heavy=False)
    runs = [blocks[start:stop] for start, stop in pairwise(found)]
    refuse_shared(
        {stage: _modules_of(run) for stage, run in enumerate(runs)},
        "module, which cannot be on two ranks; use a module of its own in each (they may share a parameter), or cut so "
        "that both are in one stage",
    )
    tied = _untie(runs)
    stages = tuple(Stage(run) for run in runs)
    described = [
        [[name, list(each.shape), str(each.dtype)] for name, each in stage.named_parameters()] for stage in stages
    ]
    digest = hashlib.sha256(json.dumps([described, tied]).encode()).hexdigest()[:12]
    return PipelineCut(borders=tuple(found), stages=stages, tied=tied, digest=digest)


def _by_hand(borders: Sequence[int], num_stages: int, num_blocks: int) -> list[int]:
    whole = [0, *borders, num_blocks]
    if len(whole) != num_stages + 1 or any(start >= stop for start, stop in pairwise(whole)):
        raise ValueError(
            f"borders={list(borders)} do not cut {num_blocks} blocks into {num_stages} stages; give {num_stages - 1} "
            f"ascending numbers between 1 and {num_blocks - 1}, the first block of each stage but the first"
        )
    return whole


def _modules_of(run: Sequence[ModelBlock]) -> Iterator[tuple[str, nn.Module]]:
    for block in run:
        for path, module in block.modules.items():
            yield from module.named_modules(prefix=path)


def _untie(runs: Sequence[Sequence[ModelBlock]]) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Give each stage a copy of its own of the parameters that an earlier one has: see the module's note."""
    uses: dict[nn.Parameter, dict[int, list[tuple[nn.Module, str, str]]]] = {}
    for stage, run in enumerate(runs):
        for block in run:
            for path, module in block.modules.items():
                for prefix, child in module.named_modules(prefix=path):
                    for name, parameter in child.named_parameters(recurse=False):
                        full = f"{prefix}.{name}" if prefix else name
                        uses.setdefault(parameter, {}).setdefault(stage, []).append((child, name, full))
    tied = []
    for parameter, by_stage in uses.items():
        if len(by_stage) < 2:
            continue
        for places in list(by_stage.values())[1:]:
            copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for child, name, _ in places:
                setattr(child, name, copy)
        tied.append(tuple((stage, places[0][2]) for stage, places in by_stage.items()))
    return tuple(tied)
