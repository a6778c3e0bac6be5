"""Tokens in memory-mapped files, and the rows of batches in them.

[Note: One writer per node]
Local rank 0 of each node tokenises the corpus. It writes each file under a temporary name and then renames it. So a
reader sees a whole file or none, also after a run was killed, or if nodes share the folder. The index file comes last
and has the sizes of the others: a file that was deleted, or that a power cut left empty, is written again. File names
have a hash of the sources, the tokenizer and the split. The other ranks wait in `RankGroup.agree` and then map the
files.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from laconic.config import DataConfig, JobError
from laconic.data.batches import Batch, Batches, Division, TrainingData
from laconic.data.corpus import Corpus, Document, open_corpus
from laconic.data.sampler import Sampler
from laconic.files import replacing, write_text
from laconic.hf.tokenizer import Tokenizer

_DOCUMENTS_PER_BATCH = 64
_SPLITS = ("train", "eval")
_FORMAT = 2  # raise it when the files change: runs then ignore files of the old format


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

    @property
    def holds_out(self) -> bool:
        """See `TrainingData.holds_out`."""
        return len(self.evaluation) > 0

    def describe(self) -> str:
        """See `TrainingData.describe`."""
        return (
            f"corpus: {self.num_documents:,} documents, {len(self.train):,} tokens to train on, "
            f"{len(self.evaluation):,} held out"
        )

    def batches(self, division: Division, rank: int, world_size: int) -> Batches:
        """See `TrainingData.batches`."""
        return _StreamBatches(self, division, rank, world_size)


class _StreamBatches(Batches):
    """Rows that begin anywhere in the stream of tokens."""

    def __init__(self, files: TokenFiles, division: Division, rank: int, world_size: int) -> None:
        self._files, self._division, self._rank, self._world_size = files, division, rank, world_size
        self._length = files.config.sequence_length
        self._sampler = Sampler(
            seed=files.config.seed,
            num_tokens=len(files.train),
            sequence_length=self._length,
            micro_batch_size=division.micro_batch_size,
            accumulation=division.accumulation,
            world_size=division.num_workers,
        )

    def step(self, step: int) -> list[Batch]:
        """See `Batches.step`."""
        offsets = self._division.own(self._sampler.global_offsets(step))
        return [self._batch(self._files.train, micro_batch) for micro_batch in offsets]

    def evaluation(self, num_batches: int) -> Iterator[Batch]:
        """See `Batches.evaluation`."""
        rows_each = self._division.micro_batch_size
        num_rows, rows_at_once = len(self._files.evaluation) // self._length, rows_each * self._world_size
        for index in range(min(num_batches, -(-num_rows // rows_at_once))):
            first = index * rows_at_once + self._rank * rows_each
            rows = (first + np.arange(rows_each)) % num_rows  # the last batch wraps around
            yield self._batch(self._files.evaluation, rows * self._length)

    def _batch(self, tokens: np.ndarray, offsets: np.ndarray) -> Batch:
        rows = torch.from_numpy(rows_at(tokens, offsets, self._length))
        return Batch(input_ids=rows, labels=rows)


def prepare(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> Path:
    """Tokenise the corpus unless `folder` already holds it; return the index file. See [Note: One writer per node].

    Raises:
        JobError: the corpus cannot be read or is binary, or the folder cannot be created.
    """
    corpus = open_corpus(config)
    index = folder / f"corpus-{_fingerprint(corpus, tokenizer, config)}.json"
    if _is_whole(index):
        return index
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot create the folder for tokenised data {str(folder)!r}: {error}") from error
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    train_path, eval_path = (_path(index, split) for split in _SPLITS)
    num_documents = num_text_tokens = 0
    with (
        replacing(train_path, durable=False) as new_train,
        replacing(eval_path, durable=False) as new_eval,
        new_train.open("wb") as train,
        new_eval.open("wb") as evaluation,
    ):
        for tokens in _tokens(corpus, tokenizer):
            file = evaluation if _is_held_out(num_documents, config.eval_fraction) else train
            row = tokens.astype(dtype, copy=False)
            num_text_tokens += len(row)
            if tokenizer.separator is not None:
                row = np.append(row, dtype.type(tokenizer.separator))
            row.tofile(file)
            num_documents += 1
    summary = {
        "dtype": dtype.name,
        "num_documents": num_documents,
        "num_text_tokens": num_text_tokens,
        "nbytes": {split: _path(index, split).stat().st_size for split in _SPLITS},
    }
    write_text(index, json.dumps(summary), durable=False)
    return index


def open_tokens(index: Path, config: DataConfig) -> TokenFiles:
    """Map the files of `index`, which `prepare` returned, into memory.

    Raises:
        JobError: the corpus is empty, or too short for one sequence.
    """
    summary = json.loads(index.read_text())

    def split(name: str) -> np.ndarray:
        path = _path(index, name)
        if path.stat().st_size == 0:  # numpy cannot map an empty file
            return np.empty(0, summary["dtype"])
        return np.memmap(path, dtype=summary["dtype"], mode="r")

    train, evaluation = split("train"), split("eval")
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
    rows = np.empty((*offsets.shape, length), dtype=np.int64)
    for where in np.ndindex(offsets.shape):
        start = int(offsets[where])
        rows[where] = tokens[start : start + length]
    return rows


def _path(index: Path, split: str) -> Path:
    return index.with_name(f"{split}-{index.stem}.bin")


def _is_whole(index: Path) -> bool:
    """True if the index can be read, and its files are there with the sizes that it gives."""
    try:
        sizes = json.loads(index.read_text())["nbytes"]
        return all(_path(index, split).stat().st_size == sizes[split] for split in _SPLITS)
    except (OSError, ValueError):
        return False


def _tokens(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    documents = corpus.documents()
    while batch := list(islice(documents, _DOCUMENTS_PER_BATCH)):
        for document in batch:
            _refuse_binary(document)
        yield from tokenizer.encode([document.text for document in batch])


def _refuse_binary(document: Document) -> None:
    where = document.text.find(b"\0")
    if where >= 0:
        raise JobError(f"{document.name} is binary, not text: a NUL byte at offset {where}; take it out of the corpus")


def _is_held_out(document: int, fraction: float) -> bool:
    """True if the document with this number is for evaluation: a random choice that is the same on every machine."""
    digest = hashlib.blake2b(document.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _fingerprint(corpus: Corpus, tokenizer: Tokenizer, config: DataConfig) -> str:
    identity = repr((_FORMAT, corpus.identity, tokenizer.identity, config.eval_fraction))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
