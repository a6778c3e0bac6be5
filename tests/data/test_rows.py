"""Rows of tokens: what is read of them, which rows a step has, and the model's view of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laconic.config import DataConfig, JobError, ModelConfig
from laconic.data import rows as module
from laconic.data import tokens as data
from laconic.data.batches import IGNORED, Division, EpochSampler, TrainingData, drawn_offsets
from laconic.data.rows import RowFiles
from laconic.models.build import build_model
from laconic.models.tokenizer import ByteTokenizer
from tests.support.jobs import job


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


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path, text = folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def rows_of(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> RowFiles:
    table = {"kind": "datasets", "path": str(write(folder, rows)), "sequence_length": 12, "eval_fraction": 0.0}
    config = DataConfig(**{**table, **settings})
    files = data.open_data(data.prepare(config, ByteTokenizer(), folder / "tokens"), config)
    assert isinstance(files, RowFiles)
    return files


def texts(folder: Path, lengths: list[int], **settings: Any) -> RowFiles:
    """Rows of these lengths, of which the second half counts."""
    rows = [
        {
            "input_ids": [112] * (n // 2) + [97 + k] * (n - n // 2),
            "completion_mask": [0] * (n // 2) + [1] * (n - n // 2),
        }
        for k, n in enumerate(lengths)
    ]
    return rows_of(folder, rows, **settings)


def counted(files: RowFiles) -> list[tuple[list[int], list[bool]]]:
    """The tokens of each row, and which of them count."""
    pieces = [slice(*files.bounds[i : i + 2]) for i in range(files.num_documents)]
    return [(files.tokens[piece].tolist(), files.counted[piece].tolist()) for piece in pieces]


def test_labels_and_masks_say_which_tokens_count(tmp_path: Path) -> None:
    """None counts the first token, which nothing predicts. Rows in which nothing counts are left out."""
    ids = [1, 2, 3, 4]
    for masks, wanted in [
        ({}, [False, True, True, True]),
        ({"labels": [1, IGNORED, 3, 4]}, [False, False, True, True]),
        ({"assistant_masks": [0, 1, 0, 1], "completion_mask": [0, 0, 1, 1]}, [False, False, False, True]),
        ({"assistant_masks": [0, 0, 0, 0]}, None),
    ]:
        files = rows_of(tmp_path, [{"input_ids": ids, **masks}, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])
        own = [(ids, wanted)] if wanted else []
        assert counted(files) == [*own, ([5, 6, 7], [False, True, True])]
        assert ("1 left out: the loss counts none of their tokens" in files.describe()) is (wanted is None)
    (row,) = counted(rows_of(tmp_path, [{"input_ids": ids}], sequence_length=3))
    assert row == ([1, 2, 3], [False, True, True])


GOOD = {"input_ids": [1, 2, 3], "labels": [IGNORED, IGNORED, 3]}


@pytest.mark.parametrize(
    ("rows", "settings", "part"),
    [
        ([{"input_ids": "abc"}], {}, "row 0, field 'input_ids' holds 'abc'; it must be a list of integers"),
        ([{"input_ids": [1.5, 2.0]}], {}, "must be a list of integers"),
        ([GOOD, {"input_ids": [1, 300]}], {}, "row 1 has the token 300, and data.tokenizer has 256 tokens"),
        ([GOOD, {"input_ids": [1, -3]}], {}, "has the token -3"),
        ([GOOD, {"input_ids": [1, 2], "labels": [1]}], {}, "lists of one length, got input_ids [2], labels [1]"),
        ([GOOD, {"input_ids": [1, 2], "labels": [2, 3]}], {}, "neither its tokens nor -100; do not shift them"),
        ([GOOD, {"text": "x"}], {}, "row 1 has no field 'input_ids'"),
        ([GOOD], {"sequence_length": 2}, "no row of the corpus"),
        ([GOOD], {"eval_fraction": 0.5}, "set data.eval_fraction = 0"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, rows: Any, settings: dict[str, Any], part: str) -> None:
    with pytest.raises(JobError) as refused:
        rows_of(tmp_path, rows, **settings)
    assert part in str(refused.value)


def test_rows_are_prepared_once_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts(tmp_path, [5, 6])
    monkeypatch.setattr(module, "_read", None)  # would fail if anything were read
    assert len(texts(tmp_path, [5, 6]).train) == 2
    with pytest.raises(TypeError):
        texts(tmp_path, [5, 6], sequence_length=11)


def test_every_source_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = [{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    expected = counted(rows_of(tmp_path, rows))
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    table.to_parquet(tmp_path / "files" / "train.parquet")
    for path in ("saved", "files", "files/train.parquet"):
        config = DataConfig(kind="datasets", path=str(tmp_path / path), sequence_length=12, eval_fraction=0.0)
        files = data.open_data(data.prepare(config, ByteTokenizer(), tmp_path / "tokens"), config)
        assert isinstance(files, RowFiles)
        assert counted(files) == expected, path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(JobError, match="is no file or folder here, and datasets cannot load it from the Hub"):
        data.prepare(DataConfig(kind="datasets", path="nobody/nothing"), ByteTokenizer(), tmp_path / "tokens")


def stream(folder: Path) -> TrainingData:
    config = job(folder).data
    return data.open_data(data.prepare(config, ByteTokenizer(), folder / "tokens"), config)


def test_padded_rows_are_as_long_as_the_longest_or_fixed(tmp_path: Path) -> None:
    files = texts(tmp_path, [5, 7, 4])
    for division, width in [(Division(micro_batch_size=3), 7), (Division(micro_batch_size=3, equal_shapes=True), 12)]:
        (batch,) = files.step(division, 0)
        assert batch.input_ids.shape == batch.labels.shape == (3, width)
        assert sorted(int((row != IGNORED).sum()) for row in batch.labels) == [2, 3, 4]


def test_every_rank_knows_the_targets_of_its_optimizer_step(tmp_path: Path) -> None:
    """5 rows for 3 ranks x 2 micro-batches: the sums over ranks are those of the corpus, islands count their own."""
    corpus = texts(tmp_path, [5, 7, 4, 9, 3])

    def micro_batches(rank: int, peers: range | None) -> list[tuple[int, float]]:
        division = Division(num_workers=3, workers=range(rank, rank + 1), peers=peers, accumulation=2)
        found = corpus.step(division, 0)
        return [(int((batch.labels != IGNORED).sum()), float(batch.num_items)) for batch in found]  # type: ignore[arg-type]

    together = [micro_batches(rank, None) for rank in range(3)]
    assert sum(count for rank in together for count, _ in rank) == 3 + 4 + 2 + 5 + 2
    assert [items for rank in together for _, items in rank] == [pytest.approx(16 / 6)] * 6
    alone = [micro_batches(rank, range(rank, rank + 1)) for rank in range(3)]
    assert [rank[0][1] for rank in alone] == [pytest.approx(sum(count for count, _ in rank) / 2) for rank in alone]
    pairs = Division(num_workers=2)  # 3 steps per epoch
    assert [corpus.tokens_after(pairs, steps) for steps in (0, 3, 6)] == [0, 28, 56]
    pair = [corpus.step(Division(num_workers=2, workers=range(r, r + 1)), 3) for r in range(2)]
    found = [int((batch.input_ids != 0).sum()) for (batch,) in pair]  # padding is zero
    assert corpus.tokens_after(pairs, 4) - 28 == sum(found)
    assert [corpus.steps_per_epoch(rows) for rows in (6, 2)] == [1, 3]


def test_every_held_out_target_counts_once(tmp_path: Path) -> None:
    corpus = texts(tmp_path, [5, 7, 4, 9, 3, 6], eval_fraction=0.7)
    weights = [
        [each.weight for each in corpus.held_out(Division(micro_batch_size=2, rank=rank, world_size=3), 9)]
        for rank in range(3)
    ]
    assert [len(own) for own in weights] == [1, 1, 1]
    assert weights[2] == [0.0]
    held_out = corpus.num_targets[corpus.evaluation].sum()
    assert sum(own[0] for own in weights) == held_out > 0


def test_models_that_divide_for_themselves_are_refused(tmp_path: Path) -> None:
    tiny = {"hidden_size": 16, "vocab_size": 16, "num_hidden_layers": 1, "state_size": 4}
    mamba: Any = build_model(ModelConfig(config={"model_type": "mamba", **tiny}, dtype="bfloat16"), device="cpu")

    def run(batch: Any) -> Any:
        return mamba(**batch.arguments())

    def divide(batch: Any) -> Any:
        return mamba(input_ids=batch.input_ids, labels=batch.labels)

    files, rows = stream(tmp_path), texts(tmp_path, [5, 6])
    rows.check_model(run)
    with pytest.raises(JobError, match="takes no num_items_in_batch"):
        rows.check_model(divide)
    with pytest.raises(JobError, match=r"cannot train on rows of tokens: .*; choose another model"):
        rows.check_model(lambda batch: mamba.get_input_embeddings().forward(**batch.arguments()))
    files.check_model(divide)
    with pytest.raises(JobError, match=r"with few of them would weigh too much; leave train\.rows out"):
        files.check_model(divide, is_unequal=True)
    files.check_model(run, is_unequal=True)


# -- rows of a stream --------------------------------------------------------------------------------------------------


def offsets(step: int, *, seed: int = 0, num_starts: int = 993, **division: Any) -> np.ndarray:
    return drawn_offsets(Division(**{"micro_batch_size": 2, **division}), step, seed=seed, num_starts=num_starts)


def test_values_are_pinned() -> None:
    """A resumed run on another machine or numpy must see the same rows; changing this breaks old checkpoints."""
    assert offsets(0, accumulation=2)[:, 0].tolist() == [[374, 47], [786, 789]]
    assert offsets(7, accumulation=2, seed=1)[:, 0].tolist() == [[788, 464], [19, 611]]


@pytest.mark.parametrize(("num_workers", "micro_batch_size", "accumulation"), [(1, 4, 3), (3, 4, 1), (6, 1, 2)])
def test_the_global_batch_does_not_depend_on_how_it_is_cut(
    num_workers: int, micro_batch_size: int, accumulation: int
) -> None:
    whole = offsets(5, micro_batch_size=12).ravel()
    cut = offsets(5, num_workers=num_workers, micro_batch_size=micro_batch_size, accumulation=accumulation)
    assert cut.shape == (accumulation, num_workers, micro_batch_size)
    assert sorted(cut.ravel()) == sorted(whole)


def test_every_position_is_drawn_and_none_beyond_the_end() -> None:
    """All starts, about equally often."""
    drawn = [offsets(step, num_starts=10, micro_batch_size=500) for step in range(10)]
    counts = np.bincount(np.concatenate(drawn, axis=None))
    assert len(counts) == 10
    assert counts.min() > 400
    assert counts.max() < 600
    assert offsets(3, num_starts=1).tolist() == [[[0, 0]]]
