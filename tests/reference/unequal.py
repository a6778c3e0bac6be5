"""Divisions of rows over unequal ranks: all that there are, and the one process whose losses each must have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


def divisions(num_rows: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of some ranks at least one of `num_rows` rows."""
    if num_ranks == 1:
        yield (num_rows,)
        return
    for first in range(1, num_rows - num_ranks + 2):
        for rest in divisions(num_rows - first, num_ranks - 1):
            yield (first, *rest)


def earliest_end(seconds: Sequence[float], num_rows: int) -> float:
    """When the last rank ends under the best of all divisions."""
    return min(
        max(rows * each for rows, each in zip(division, seconds, strict=True))
        for division in divisions(num_rows, len(seconds))
    )


def mean_loss(model: nn.Module, rows: Sequence[Tensor], counted: Sequence[Tensor]) -> Tensor:
    """The mean over all targets of some rows, one row at a time. A target is a counted token after the first."""
    sums, count = [], 0
    for ids, counts in zip(rows, counted, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        for place in range(1, len(ids)):
            if counts[place]:
                sums.append(nn.functional.cross_entropy(logits[place - 1], ids[place]))
                count += 1
    return torch.stack(sums).sum() / count
