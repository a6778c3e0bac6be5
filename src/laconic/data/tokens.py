"""A corpus as one stream of tokens, and the preparation of a corpus in general."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.config import DataConfig, JobError
from laconic.data import arrays, rows
from laconic.data.batches import Batch, Division, TrainingData, drawn_offsets, hashed
from laconic.data.corpus import Corpus, open_corpus
from laconic.models.tokenizer import Tokenizer

_DOCUMENTS_PER_BATCH = 64
_SPLITS = ("train", "eval")


@dataclass(frozen=True, kw_only=True)
class TokenFiles(TrainingData):
    """The tokenised corpus of a job on this node, as a stream of tokens."""

    config: DataConfig
    train: np.ndarray
    evaluation: np.ndarray
    """Tokens held out for evaluation; empty with eval_fraction = 0."""
    num_documents: int

    def steps_per_epoch(self, rows_per_step: int) -> int:
        """See `TrainingData.steps_per_epoch`."""
        return -(-len(self.train) // (rows_per_step * self.config.sequence_length))

    def describe(self) -> str:
        """See `TrainingData.describe`."""
        return (
            f"corpus: {self.num_documents:,} documents, {len(self.train):,} tokens to train on, "
            f"{len(self.evaluation):,} held out"
        )

    def check_model(self, run: Callable[[Batch], Any], *, is_unequal: bool = False) -> None:
        """See `TrainingData.check_model`. Rows that count equally need nothing: [Note: Unequal rows] in batches.py."""
        if is_unequal:
            consequence = "the rows of a rank with few of them would weigh too much; leave train.rows out"
            rows.check_model(run, "different numbers of rows on each rank", consequence)

    @property
    def num_held_out(self) -> int:  # type: ignore[override]
        """See `TrainingData.num_held_out`."""
        return len(self.evaluation) // self.config.sequence_length

    def step(self, division: Division, step: int) -> list[Batch]:
        """See `TrainingData.step`. Rows begin anywhere in the stream."""
        length = self.config.sequence_length
        offsets = drawn_offsets(division, step, seed=self.config.seed, num_starts=len(self.train) - length + 1)
        micro_batches = division.own(offsets)
        if division.rows is None:
            return [self._batch(self.train, own) for own in micro_batches]
        num_items = division.micro_batch_size * (length - 1.0)  # the mean: [Note: Mean over tokens]
        return [
            self._batch(self.train, own, torch.tensor(num_items)) if len(own) else Batch.without_rows(num_items)
            for own in micro_batches
        ]

    def tokens_after(self, division: Division, steps: int) -> int:
        """See `TrainingData.tokens_after`."""
        return steps * division.rows_per_step * self.config.sequence_length

    def _held_out(self, division: Division, places: np.ndarray) -> Batch:
        """See `TrainingData`. The last batch wraps around."""
        return self._batch(self.evaluation, places % self.num_held_out * self.config.sequence_length)

    def _batch(self, tokens: np.ndarray, offsets: np.ndarray, num_items: torch.Tensor | None = None) -> Batch:
        ids = torch.from_numpy(rows_at(tokens, offsets, self.config.sequence_length))
        return Batch(input_ids=ids, labels=ids, num_items=num_items)


def prepare(config: DataConfig, tokenizer: Tokenizer, folder: Path, *, writes: bool = True) -> Path:
    """Tokenise the corpus unless `folder` already holds it undamaged; return the index file.

    See [Note: One writer per node] and [Note: Damaged arrays] in data/arrays.py. Documents with the field `input_ids`
    are rows of tokens, all others text. Without `writes` nothing is checked or written.

    Raises:
        JobError: the corpus cannot be read or is binary, the loss counts no token, or the folder cannot be written.
    """
    corpus = open_corpus(config)
    with contextlib.closing(corpus.documents()) as found:
        first = next(found, None)
    is_stream = first is None or rows.IDS not in first.fields
    if is_stream:
        # earlier releases have named the folder so
        encoding = "CorpusFormat(format='text', loss='all', packing=False, is_stream=True)"
        encoding = f"({encoding}, {config.text_field!r}, {tokenizer.identity!r}, None, None)"
        index = arrays.index_path(folder, (corpus.identity, encoding, config.eval_fraction))
    else:
        index = rows.rows_index_path(config, corpus, tokenizer.vocab_size, folder)
    if writes and not arrays.is_whole(index):
        with arrays.writing_to(folder):
            if is_stream:
                _write(index, corpus, tokenizer, config)
            else:
                rows.write(index, config, corpus, tokenizer.vocab_size)
    return index


def open_data(index: Path, config: DataConfig) -> TrainingData:
    """Map the files of `index`, which `prepare` returned, into memory.

    Raises:
        JobError: the corpus is empty, or too short for one sequence.
    """
    is_stream = arrays.read_index(index).summary["is_stream"]
    return open_tokens(index, config) if is_stream else rows.open_rows(index, config)


def open_tokens(index: Path, config: DataConfig) -> TokenFiles:
    """Map the files of a token stream into memory.

    Raises:
        JobError: the corpus is empty, or too short for one sequence.
    """
    summary = arrays.read_index(index).summary
    found = arrays.map_arrays(index)
    train, evaluation = (found[split] for split in _SPLITS)
    length = config.sequence_length
    source = config.path or config.kind
    if summary["num_text_tokens"] == 0:
        raise JobError(f"the corpus {source!r} is empty: no text in {summary['num_documents']} documents")
    if config.eval_fraction > 0 and (len(evaluation) < length or len(train) < length):
        # too few documents to hold out whole documents: hold out the last tokens instead
        tokens = np.concatenate([train, evaluation])
        held_out = max(round(len(tokens) * config.eval_fraction), length)
        train, evaluation = tokens[: max(len(tokens) - held_out, 0)], tokens[max(len(tokens) - held_out, 0) :]
    if len(train) < length:
        held = f" once {len(evaluation)} are held out for evaluation" if len(evaluation) else ""
        raise JobError(
            f"the corpus {source!r} has {len(train)} tokens to train on{held}, shorter than one sequence of "
            f"data.sequence_length = {length}; use a larger corpus, a shorter sequence or data.eval_fraction = 0"
        )
    return TokenFiles(config=config, train=train, evaluation=evaluation, num_documents=summary["num_documents"])


def rows_at(tokens: np.ndarray, offsets: np.ndarray, length: int) -> np.ndarray:
    """Copy the rows of `length` tokens that start at `offsets`: (*offsets.shape, length), int64."""
    found = np.empty((*offsets.shape, length), dtype=np.int64)
    for where in np.ndindex(offsets.shape):
        start = int(offsets[where])
        found[where] = tokens[start : start + length]
    return found


def _write(index: Path, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    num_documents = num_text_tokens = 0
    with arrays.array_file(index, "train") as train, arrays.array_file(index, "eval") as evaluation:
        for tokens in _tokens(corpus, tokenizer, config.text_field):
            file = evaluation if hashed(num_documents) < config.eval_fraction * 2**64 else train
            row = tokens.astype(dtype, copy=False)
            num_text_tokens += len(row)
            if tokenizer.separator is not None:
                row = np.append(row, dtype.type(tokenizer.separator))
            file.write(row.data)  # `tofile` hides why a write fails
            num_documents += 1
    summary = {"is_stream": True, "num_documents": num_documents, "num_text_tokens": num_text_tokens}
    arrays.write_index(index, dict.fromkeys(_SPLITS, dtype), summary)


def _tokens(corpus: Corpus, tokenizer: Tokenizer, text_field: str) -> Iterator[np.ndarray]:
    found = corpus.documents()
    while batch := list(islice(found, _DOCUMENTS_PER_BATCH)):
        yield from tokenizer.encode([document.text(text_field) for document in batch])
