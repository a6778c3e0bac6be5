"""Unequal rows of ranks: who gets how many, that none is lost, and that the loss is the mean over all targets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic.config import ModelConfig
from laconic.data.batches import IGNORED, LEAST_TOKENS, Batch, Division, TrainingData
from laconic.models.build import build_model
from laconic.train.balance import fastest_rows, last_end
from tests.data.test_rows import stream, texts
from tests.reference import unequal as naive
from tests.support.jobs import SMALL_LLAMA


def test_no_division_ends_earlier() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        num_ranks = int(generator.integers(1, 5))
        seconds = generator.uniform(0.2, 2.0, size=num_ranks).tolist()
        num_rows = num_ranks + int(generator.integers(0, 12))
        rows = fastest_rows(seconds, num_rows)
        assert sum(rows) == num_rows
        assert min(rows) >= 1
        assert last_end(rows, seconds) == pytest.approx(naive.earliest_end(seconds, num_rows))


def test_equal_speeds_give_equal_rows_and_half_the_speed_half_of_them() -> None:
    assert fastest_rows([0.3] * 4, 36) == (9, 9, 9, 9)
    assert fastest_rows([1.0, 1.0, 2.0, 2.0], 36) == (12, 12, 6, 6)
    assert fastest_rows([1.0, 1.0, 1.0], 7) == (3, 2, 2)
    assert fastest_rows([1.0, 1000.0], 9) == (8, 1)


NUM_RANKS, MICRO_BATCH, ACCUMULATION = 3, 2, 3
DIVISIONS = [(1, 10, 7), (2, 15, 1), (9, 5, 4)]
"""Of 18 rows; a rank with less than 3 has empty micro-batches."""


def division(rank: int, rows: tuple[int, ...] | None, **changes: Any) -> Division:
    fields: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "accumulation": ACCUMULATION, **changes}
    return Division(num_workers=NUM_RANKS, workers=range(rank, rank + 1), rows=rows, **fields)


@pytest.mark.parametrize("rows", DIVISIONS)
def test_each_row_is_on_one_rank_in_micro_batches_of_like_size(rows: tuple[int, ...]) -> None:
    global_batch = np.random.default_rng(0).permutation(18).reshape(ACCUMULATION, NUM_RANKS, MICRO_BATCH)
    parts = [division(rank, rows).own(global_batch) for rank in range(NUM_RANKS)]
    assert [len(part) for part in parts] == [ACCUMULATION] * NUM_RANKS
    assert [sum(map(len, part)) for part in parts] == list(rows)
    assert all(max(map(len, part)) - min(map(len, part)) <= 1 for part in parts)
    together = np.concatenate([micro_batch for part in parts for micro_batch in part])
    assert together.tolist() == global_batch.ravel().tolist()


def test_an_island_divides_its_own_rows() -> None:
    """Four ranks in islands of two: the rows of an island are those that it has with equal rows."""
    global_batch = np.arange(16).reshape(2, 4, 2)
    for peers, rows in ((range(2), (5, 3)), (range(2, 4), (1, 7))):
        fields: dict[str, Any] = {"num_workers": 4, "peers": peers, "micro_batch_size": 2, "accumulation": 2}
        pair = [Division(workers=range(rank, rank + 1), rows=rows, **fields) for rank in peers]
        found = np.concatenate([micro_batch for each in pair for micro_batch in each.own(global_batch)])
        assert found.tolist() == global_batch[:, peers.start : peers.stop].ravel().tolist()


LENGTHS = [5, 7, 4, 9, 3, 6, 12, 8, 5, 11, 10, 7, 6, 4, 9, 12, 5, 8, 3, 7, 9, 10]


def padded(folder: Path) -> TrainingData:
    """Rows of different lengths, too few for the last step of an epoch."""
    return texts(folder, LENGTHS)


def step_of(corpus: TrainingData, rows: tuple[int, ...] | None, step: int) -> list[list[Batch]]:
    """The micro-batches of each rank."""
    return [[*corpus.step(division(rank, rows), step)] for rank in range(NUM_RANKS)]


def counted_rows(ranks: list[list[Batch]]) -> list[bytes]:
    """All rows of a step that count, without their padding."""
    batches = [batch for rank in ranks for batch in rank]
    rows = [row for batch in batches for row in zip(batch.input_ids, batch.labels, strict=True)]
    return sorted(bytes(ids.tolist()).rstrip(b"\0") for ids, labels in rows if (labels != IGNORED).any())


@pytest.mark.parametrize("corpus", [stream, padded])
def test_the_global_batch_stays(tmp_path: Path, corpus: Any) -> None:
    files = corpus(tmp_path)
    whole = Division(micro_batch_size=18)
    for rows, step in itertools.product(DIVISIONS, (0, 1, 4)):
        assert counted_rows(step_of(files, rows, step)) == counted_rows([[*files.step(whole, step)]])
        for steps in (1, 4):
            assert files.tokens_after(division(0, rows), steps) == files.tokens_after(whole, steps)


@pytest.mark.parametrize("corpus", [stream, padded])
def test_ranks_and_micro_batches_average_to_the_mean_over_all_targets(tmp_path: Path, corpus: Any) -> None:
    """Loss and gradients against one process that sees one row at a time."""
    files = corpus(tmp_path)
    model: Any = build_model(
        ModelConfig(config={"model_type": "llama", **SMALL_LLAMA, "vocab_size": 256}), device="cpu"
    )
    for step, rows in ((0, DIVISIONS[0]), (1, DIVISIONS[1])):
        ranks = step_of(files, rows, step)
        losses = [model(**batch.arguments(), use_cache=False).loss for rank in ranks for batch in rank]
        mean = torch.stack(losses).mean()
        mean.backward()
        gradients = taken(model)
        documents = [document for rank in step_of(files, None, step) for batch in rank for document in apart(batch)]
        expected = naive.mean_loss(model, *zip(*documents, strict=True))  # type: ignore[arg-type]
        expected.backward()
        assert float(mean.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
        torch.testing.assert_close(gradients, taken(model), rtol=1e-4, atol=1e-6)
    sizes = [len(batch.input_ids) for batch in ranks[2]]
    assert sizes == [1, 1, 1]
    assert [batch.input_ids.shape[1] for batch in ranks[2][1:]] == [LEAST_TOKENS] * 2, "no row costs no compute"


def taken(model: Any) -> dict[str, Tensor]:
    """The gradients, which are then forgotten."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def apart(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """The rows of a micro-batch that count, each with the tokens that count."""
    rows = zip(batch.input_ids, batch.labels, strict=True)
    return [(ids, labels != IGNORED) for ids, labels in rows if (labels != IGNORED).any()]
