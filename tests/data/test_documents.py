"""Rows of documents: which documents share a row, which rows a step has, and the model's view of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laconic.config import DataConfig, JobError, ModelConfig
from laconic.data import tokens as data
from laconic.data.batches import IGNORED, Division, EpochSampler, Sampler, TrainingData, pack_rows
from laconic.data.documents import check_model
from laconic.hf.models import build_model
from laconic.hf.tokenizer import ByteTokenizer
from tests.support.jobs import SMALL_LLAMA, job


def naive_pack(lengths: list[int], capacity: int) -> list[int]:
    """The tokens of each row by best fit, longest first: look at all rows for each document."""
    used: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(used)) if used[row] + length <= capacity]
        row = max(fitting, key=used.__getitem__, default=len(used))
        used[row : row + 1] = [length + (used[row] if fitting else 0)]
    return used


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_best_fit_decreasing(seed: int) -> None:
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(5, 60))
    lengths = generator.integers(1, capacity + 1, size=int(generator.integers(1, 200))).tolist()
    rows = pack_rows(lengths, capacity)
    totals = [sum(lengths[document] for document in row) for row in rows]
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert max(totals) <= capacity
    assert sorted(totals) == sorted(naive_pack(lengths, capacity))
    assert pack_rows(lengths, capacity) == rows


def test_an_epoch_has_every_row_once_in_a_new_order() -> None:
    sampler = EpochSampler(seed=3, num_rows=11, rows_per_step=4)
    assert sampler.steps_per_epoch == 3
    epochs = [np.concatenate([sampler.global_rows(3 * epoch + place) for place in range(3)]) for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows.tolist()) == [-1, *range(11)]
        assert rows[-1] == -1
    assert len({rows.tobytes() for rows in epochs}) == 3
    assert EpochSampler(seed=4, num_rows=11, rows_per_step=4).global_rows(0).tolist() != epochs[0][:4].tolist()
    assert EpochSampler(seed=3, num_rows=11, rows_per_step=12).global_rows(1)[:11].tolist() == epochs[1][:11].tolist()
    # a resumed run on another machine or numpy must see the same rows
    assert epochs[0].tolist() == [6, 1, 8, 5, 2, 7, 10, 9, 4, 3, 0, -1]


def texts(folder: Path, lengths: list[int], **settings: Any) -> TrainingData:
    """Documents of these lengths, of which the second half counts."""
    path = folder / "rows.jsonl"
    rows = [{"prompt": "p" * (n // 2), "completion": chr(97 + k) * (n - n // 2 - 1)} for k, n in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"kind": "jsonl", "path": str(path), "sequence_length": 12, "eval_fraction": 0.0}
    config = DataConfig(**{**table, **settings})
    return data.open_data(data.prepare(config, ByteTokenizer(), folder / "tokens"), config)


def stream(folder: Path) -> TrainingData:
    config = job(folder).data
    return data.open_data(data.prepare(config, ByteTokenizer(), folder / "tokens"), config)


def test_packed_rows_restart_positions_and_padding_is_ignored(tmp_path: Path) -> None:
    (batch,) = texts(tmp_path, [5, 6, 3], packing=True).batches(Division(micro_batch_size=2), 0, 1).step(0)
    by_length = {int((row != 0).sum()): place for place, row in enumerate(batch.input_ids)}
    pair = next(place for place in by_length.values() if bytes(batch.input_ids[place].tolist()).count(0) > 3) ^ 1
    assert batch.position_ids is not None
    assert bytes(batch.input_ids[pair].tolist()) == b"ppaa\0pppbb\0\0"
    assert batch.position_ids[pair].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert [label != IGNORED for label in batch.labels[pair].tolist()] == [
        *(False, False, True, True, True),
        *(False, False, False, True, True, True),
        False,
    ]


def test_padded_rows_are_as_long_as_the_longest_or_fixed(tmp_path: Path) -> None:
    for settings, division, width in [
        ({}, Division(micro_batch_size=3), 7),
        ({"padding": "fixed"}, Division(micro_batch_size=3), 12),
        ({}, Division(micro_batch_size=3, equal_shapes=True), 12),
    ]:
        (batch,) = texts(tmp_path, [5, 7, 4], **settings).batches(division, 0, 1).step(0)
        assert batch.input_ids.shape == batch.labels.shape == (3, width)
        assert batch.position_ids is None
        assert sorted(int((row != IGNORED).sum()) for row in batch.labels) == [2, 3, 4]


def test_every_rank_knows_the_targets_of_its_optimizer_step(tmp_path: Path) -> None:
    """5 rows for 3 ranks x 2 micro-batches: the sums over ranks are those of the corpus, islands count their own."""
    corpus = texts(tmp_path, [5, 7, 4, 9, 3])

    def micro_batches(rank: int, peers: range | None) -> list[tuple[int, float]]:
        division = Division(num_workers=3, workers=range(rank, rank + 1), peers=peers, accumulation=2)
        found = corpus.batches(division, rank, 3).step(0)
        return [(int((batch.labels != IGNORED).sum()), float(batch.num_items)) for batch in found]  # type: ignore[arg-type]

    together = [micro_batches(rank, None) for rank in range(3)]
    assert sum(count for rank in together for count, _ in rank) == 3 + 4 + 2 + 5 + 2
    assert [items for rank in together for _, items in rank] == [pytest.approx(16 / 6)] * 6
    alone = [micro_batches(rank, range(rank, rank + 1)) for rank in range(3)]
    assert [rank[0][1] for rank in alone] == [pytest.approx(sum(count for count, _ in rank) / 2) for rank in alone]
    batches = corpus.batches(Division(num_workers=2), 0, 2)  # 3 steps per epoch
    assert [batches.tokens_after(steps) for steps in (0, 3, 6)] == [0, 28, 56]
    pair = [corpus.batches(Division(num_workers=2, workers=range(r, r + 1)), r, 2).step(3) for r in range(2)]
    found = [int((batch.input_ids != 0).sum()) + 1 for (batch,) in pair]  # padding is zero, as is the separator
    assert batches.tokens_after(4) - 28 == sum(found)
    assert [corpus.steps_per_epoch(rows) for rows in (6, 2)] == [1, 3]


def test_every_held_out_target_counts_once(tmp_path: Path) -> None:
    corpus = texts(tmp_path, [5, 7, 4, 9, 3, 6], eval_fraction=0.7)
    weights = [
        [batch.weight for batch in corpus.batches(Division(micro_batch_size=2), rank, 3).evaluation(9)]
        for rank in range(3)
    ]
    assert [len(own) for own in weights] == [1, 1, 1]
    assert weights[2] == [0.0]
    held_out = corpus.evaluation.num_targets.sum()  # type: ignore[attr-defined]
    assert sum(own[0] for own in weights) == held_out > 0


def test_attention_stays_inside_documents() -> None:
    model: Any = build_model(ModelConfig(config={"model_type": "llama", **SMALL_LLAMA, "vocab_size": 16}), device="cpu")
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        check_model(lambda batch: model(**batch.arguments(), use_cache=False), is_packed=True)


def test_models_that_mix_documents_or_divide_for_themselves_are_refused(tmp_path: Path) -> None:
    tiny = {"hidden_size": 16, "vocab_size": 16, "num_hidden_layers": 1, "state_size": 4}
    mamba: Any = build_model(ModelConfig(config={"model_type": "mamba", **tiny}, dtype="bfloat16"), device="cpu")

    def run(batch: Any) -> Any:
        return mamba(**{key: value for key, value in batch.arguments().items() if key != "position_ids"})

    def divide(batch: Any) -> Any:
        return mamba(input_ids=batch.input_ids, labels=batch.labels)

    check_model(run, is_packed=False)
    with pytest.raises(JobError, match="lets a document see the ones before it"):
        check_model(run, is_packed=True)
    with pytest.raises(JobError, match=r"unexpected keyword argument 'position_ids'; set data\.packing = false"):
        check_model(lambda batch: mamba.get_input_embeddings().forward(position_ids=batch.position_ids), is_packed=True)
    with pytest.raises(JobError, match="takes no num_items_in_batch"):
        check_model(divide, is_packed=False)
    files = stream(tmp_path)
    files.check_model(divide)
    with pytest.raises(JobError, match=r"with few of them would weigh too much; leave train\.rows out"):
        files.check_model(divide, is_unequal=True)
    files.check_model(run, is_unequal=True)


# -- sampler -----------------------------------------------------------------------------------------------------------


def sampler(**changes: int) -> Sampler:
    return Sampler(**{"seed": 0, "num_tokens": 1000, "sequence_length": 8, "micro_batch_size": 2, **changes})


def test_values_are_pinned() -> None:
    """A resumed run on another machine or numpy must see the same rows; changing this breaks old checkpoints."""
    assert sampler(accumulation=2).offsets(0).tolist() == [[374, 47], [786, 789]]
    assert sampler(accumulation=2, seed=1).offsets(7).tolist() == [[788, 464], [19, 611]]


@pytest.mark.parametrize(("world_size", "micro_batch_size", "accumulation"), [(1, 4, 3), (3, 4, 1), (6, 1, 2)])
def test_the_global_batch_does_not_depend_on_how_it_is_cut(
    world_size: int, micro_batch_size: int, accumulation: int
) -> None:
    whole = sampler(micro_batch_size=12).offsets(5).ravel()
    cut = {"world_size": world_size, "micro_batch_size": micro_batch_size, "accumulation": accumulation}
    parts = [sampler(rank=rank, **cut).offsets(5) for rank in range(world_size)]
    assert all(part.shape == (accumulation, micro_batch_size) for part in parts)
    assert sorted(np.concatenate(parts, axis=None)) == sorted(whole)


def test_every_position_is_drawn_and_none_beyond_the_end() -> None:
    """All starts from 0 to num_tokens - sequence_length, about equally often."""
    drawn = [sampler(num_tokens=17, micro_batch_size=500).offsets(step) for step in range(10)]
    counts = np.bincount(np.concatenate(drawn, axis=None))
    assert len(counts) == 10
    assert counts.min() > 400
    assert counts.max() < 600
    assert sampler(num_tokens=8).offsets(3).tolist() == [[0, 0]]
