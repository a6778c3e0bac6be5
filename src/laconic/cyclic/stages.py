"""How a model is cut into the stages of the cyclic schedule: of equal cost, the first ones longer where they cannot be.

[Note: Front-heavy stages]
Every worker runs all stages, so stages of unequal cost leave no worker idle. But they decide when a version is needed.
Let the stages before j take the share C_j of the time of a batch. Under rule v2, worker N - 1 - j is the first to use
the new version of stage j. It starts its batch j / N of a batch before worker N - 1, which completes the gradient. It
reaches stage j after the forwards of the stages before j. The gradient is complete when worker N - 1 has only the
backwards of the stages before j left to do. These forwards and backwards together take C_j. So worker N - 1 - j waits
in every batch, unless C_j >= j / N. So each prefix of stages should have at least its share of the cost. Example: with
stages of 40 % and 60 %, worker 0 waits for 10 % of every batch; with stages of 60 % and 40 % it never waits.

[Note: Workers of several ranks]
Tensor or expert parallelism may have cut layers among the ranks that are one worker together. Its parameters are then
DTensors, over a mesh that crosses the workers' mesh in this rank alone. Ranks of equal place in their workers form a
ring each, and every ring runs the whole schedule on its own: sums, versions and snapshots are of the parts that its
ranks hold, and rings do not know of each other. They meet in the collectives that the layers themselves call, within a
worker. So the ranks of a worker must issue ops and messages in one order, and they do, since all follow one program.
Therefore nothing that a rank measures may decide what it does next: such a worker passes its baton after two ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.comm.agreement import RankGroup
from laconic.pipeline.stages import (
    Criterion,
    Example,
    ModelBlock,
    Stage,
    blocks_in,
    costs_of,
    parameters_of,
    partition,
    refuse_meta,
    refuse_shared,
)


def trainable(stage: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a stage by name; a shared parameter has one name only."""
    return {name: p for name, p in stage.named_parameters() if p.requires_grad}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or buffer, without autograd: [Note: Workers of several ranks]."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def as_part_of(parameter: Tensor, part: Tensor) -> Tensor:
    """A tensor like this rank's part of a parameter, in the form of the parameter."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gradient_part(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's gradient; sums over the ranks of the worker that are pending are made."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    return gradient.redistribute(placements=parameter.placements).to_local()


def refuse_shared_parameters(by_stage: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Raise ValueError if two stages share one of these parameters."""
    refuse_shared(
        {number: parameters.items() for number, parameters in enumerate(by_stage)},
        "parameter, whose gradient would be complete at two different times; untie them (transformers: "
        "tie_word_embeddings=False), or cut so that both are in one stage",
    )


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
    blocks, values = blocks_in(model, example, carry)
    refuse_meta(parameter for block in blocks for parameter in parameters_of(block))
    costs = ranks.broadcast(costs_of(blocks, values, by))
    counts = [0, *accumulate(any(p.requires_grad for p in parameters_of(block)) for block in blocks)]
    borders = partition(costs, num_stages, is_allowed=lambda start, stop: counts[stop] > counts[start])
    stages = [Stage(blocks[start:stop]) for start, stop in pairwise(borders)]
    refuse_shared_parameters([dict(stage.named_parameters()) for stage in stages])
    return stages
