"""The sampler: a function of (seed, step), cut by rank."""

from __future__ import annotations

import numpy as np
import pytest

from laconic.data.sampler import Sampler


def sampler(**changes: int) -> Sampler:
    return Sampler(**{"seed": 0, "num_tokens": 1000, "sequence_length": 8, "micro_batch_size": 2, **changes})


def test_values_are_pinned() -> None:
    """A resumed run on another machine or numpy must see the same rows; changing this breaks old checkpoints."""
    assert sampler(accumulation=2).offsets(0).tolist() == PINNED_STEP_0
    assert sampler(accumulation=2, seed=1).offsets(7).tolist() == PINNED_SEED_1_STEP_7


PINNED_STEP_0 = [[374, 47], [786, 789]]
PINNED_SEED_1_STEP_7 = [[788, 464], [19, 611]]


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "accumulation"), [(1, 4, 3), (2, 2, 3), (3, 4, 1), (6, 1, 2)]
)
def test_the_global_batch_does_not_depend_on_how_it_is_cut(
    world_size: int, micro_batch_size: int, accumulation: int
) -> None:
    whole = sampler(micro_batch_size=12).offsets(5).ravel()
    parts = [
        sampler(world_size=world_size, rank=rank, micro_batch_size=micro_batch_size, accumulation=accumulation).offsets(
            5
        )
        for rank in range(world_size)
    ]
    assert all(part.shape == (accumulation, micro_batch_size) for part in parts)
    assert sorted(np.concatenate(parts, axis=None)) == sorted(whole)


def test_steps_and_seeds_differ() -> None:
    drawn = [
        sampler(micro_batch_size=16, seed=seed).offsets(step).tobytes() for seed in (0, 1, -1) for step in range(20)
    ]
    assert len(set(drawn)) == len(drawn)


def test_every_position_is_drawn_and_none_beyond_the_end() -> None:
    """All starts from 0 to num_tokens - sequence_length, about equally often."""
    counts = np.bincount(
        np.concatenate([sampler(num_tokens=17, micro_batch_size=500).offsets(step) for step in range(10)], axis=None)
    )
    assert len(counts) == 10
    assert counts.min() > 400
    assert counts.max() < 600
    assert sampler(num_tokens=8).offsets(3).tolist() == [[0, 0]]
