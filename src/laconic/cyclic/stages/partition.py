"""Partitions a sequence of blocks into runs of equal cost, front-heavy where they cannot be equal.

[Note: Front-heavy stages]
Every worker runs all stages, so stages of unequal cost leave no worker idle. But they decide when a version is needed.
Let the stages before j take the share C_j of the time of a batch. Under rule v2, worker N - 1 - j is the first to use
the new version of stage j. It starts its batch j / N of a batch before worker N - 1, which completes the gradient. It
reaches stage j after the forwards of the stages before j. The gradient is complete when worker N - 1 has only the
backwards of the stages before j left to do. These forwards and backwards together take C_j. So worker N - 1 - j waits
in every batch, unless C_j >= j / N. So each prefix of stages should have at least its share of the cost. Example: with
stages of 40 % and 60 %, worker 0 waits for 10 % of every batch; with stages of 60 % and 40 % it never waits.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

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
