"""A corpus as whole documents in rows: one in a row, padded, or several in a row, packed.

[Note: Documents in a row]
Documents of a row must not see each other. Positions begin at 0 with each document, and transformers builds the mask
that keeps attention inside documents from these positions. A row of one document needs no mask: attention is causal,
and padding comes last, so no token of the document sees it. No label is the first token of a document: the token
before it belongs to another document. So a document gives the same loss alone, padded and packed. The exception are
models whose routers add a loss of their own: it counts padding too.

No list says which models do: it depends on their layers, on the attention's implementation, and on the release of
transformers. For example, gpt-oss in transformers 5.23 does not tell its masks about positions. So the model is asked.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from laconic.config import DataConfig, JobError
from laconic.data import arrays
from laconic.data.batches import (
    IGNORED,
    LEAST_TOKENS,
    Batch,
    Batches,
    Division,
    EpochSampler,
    TrainingData,
    hashed,
    pack_rows,
)
from laconic.data.corpus import Corpus
from laconic.data.formats import CorpusFormat, Encoder
from laconic.hf.chat import Encoded

_TOKENS = 8  # of each of the two documents in a row


_OF_DOCUMENTS = (
    "rows of documents",
    "so rows with few tokens that count would weigh too much; for text, leave data.packing out to train on a "
    "stream of tokens, whose rows count equally; for chat data, choose another model",
)
OF_UNEQUAL_RANKS = (
    "different numbers of rows on each rank",
    "so the rows of a rank with few of them would weigh too much; leave train.rows out, or choose another model",
)
"""The rows that a model cannot train on, and why, with the remedy: see `check_model`."""


def check_model(run: Callable[[Batch], Any], *, is_packed: bool, words: tuple[str, str] = _OF_DOCUMENTS) -> None:
    """Run a model on two rows. The second documents of the rows are equal, and the first ones are not.

    With `is_packed`, the logits of the second documents must be equal too. And the loss must be the sum over all
    targets, divided by the batch's `num_items`. `words` are for the message: what needs this, and what to do.

    Raises:
        JobError: one of the two is not so.
    """
    first, second = torch.tensor([[1], [2]]).expand(2, _TOKENS), (torch.arange(_TOKENS) % 3).expand(2, _TOKENS)
    ids = torch.cat([first, second], dim=1)
    positions = torch.arange(_TOKENS).repeat(2).expand(2, 2 * _TOKENS)
    batch = Batch(
        input_ids=ids,
        labels=ids,
        position_ids=positions.contiguous() if is_packed else None,
        num_items=torch.tensor(1.0),
    )
    try:
        output = run(batch)
    except TypeError as error:  # an unexpected keyword argument
        advice = "set data.packing = false, or " if is_packed else ""
        raise JobError(f"this model cannot train on {words[0]}: {error}; {advice}choose another model") from error
    logits = output.logits.detach().float().cpu()
    second_documents = logits[:, _TOKENS:]
    difference = (second_documents[0] - second_documents[1]).abs().mean() / second_documents.abs().mean()
    # equal to the bit as a rule, but a layer of experts may add in another order; a leak is at least 0.3 %
    if is_packed and difference > max(1e-4, torch.finfo(output.logits.dtype).eps / 4):
        raise JobError(
            "data.packing = true puts several documents in a row, and this model lets a document see the ones before "
            "it: its layers, or the implementation of its attention, take no notice of position_ids; set data.packing "
            "= false"
        )
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    if float(output.loss.detach()) < 0.5 * float(total):  # a mean is far smaller, and a model may add a loss of its own
        raise JobError(
            "this model divides its loss by the number of tokens of each micro-batch (it takes no num_items_in_batch), "
            f"{words[1]}"
        )


_DOCUMENTS_PER_BATCH = 256
_SPLITS = ("train", "eval")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one split, as documents."""

    documents: np.ndarray
    """The documents of all rows, row by row: (documents,)."""
    starts: np.ndarray
    """The place in `documents` where each row begins, and the end: (rows + 1,)."""
    num_tokens: np.ndarray
    """The tokens of each row, without padding: (rows,)."""
    num_targets: np.ndarray
    """The tokens of each row that the loss counts, and 0 for row -1: (rows + 1,)."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.num_tokens)

    def members(self, row: int) -> np.ndarray:
        """The documents of a row; row -1 has none."""
        return self.documents[self.starts[row] : self.starts[row + 1]] if row >= 0 else self.documents[:0]


@dataclass(frozen=True, kw_only=True)
class RowFiles(TrainingData):
    """The tokenised documents of a job on this node."""

    config: DataConfig
    is_packed: bool
    tokens: np.ndarray
    """The tokens of all documents that are kept: (tokens,)."""
    counted: np.ndarray
    """Whether the loss counts each token: (tokens,)."""
    bounds: np.ndarray
    """The place in `tokens` where each document begins, and the end: (documents + 1,)."""
    train: Rows
    evaluation: Rows
    summary: dict[str, Any]

    @property
    def num_documents(self) -> int:  # type: ignore[override]
        """See `TrainingData.num_documents`."""
        return len(self.bounds) - 1

    def steps_per_epoch(self, rows_per_step: int) -> int:
        """See `TrainingData.steps_per_epoch`."""
        return -(-len(self.train) // rows_per_step)

    @property
    def holds_out(self) -> bool:
        """See `TrainingData.holds_out`."""
        return len(self.evaluation) > 0

    def describe(self) -> str:
        """See `TrainingData.describe`."""
        length = self.config.sequence_length
        fates = {
            "num_cut": f"cut to data.sequence_length = {length} tokens",
            "num_dropped": f"left out: longer than data.sequence_length = {length} tokens",
            "num_without_target": "left out: the loss counts none of their tokens",
        }
        notes = "; ".join(f"{self.summary[key]:,} {text}" for key, text in fates.items() if self.summary[key])
        return (
            f"corpus: {self.num_documents:,} documents{f' ({notes})' if notes else ''}; to train on: "
            f"{len(self.train):,} rows, {self.train.num_tokens.sum():,} tokens, of which the loss counts "
            f"{self.train.num_targets.sum():,}; held out: {len(self.evaluation):,} rows"
        )

    def check_model(self, run: Callable[[Batch], Any], *, is_unequal: bool = False) -> None:
        """See `TrainingData.check_model`. Rows of documents have different numbers of targets anyway."""
        check_model(run, is_packed=self.is_packed)

    def batches(self, division: Division, rank: int, world_size: int) -> Batches:
        """See `TrainingData.batches`."""
        return _DocumentBatches(self, division, rank, world_size)


class _DocumentBatches(Batches):
    """Rows of documents, drawn without replacement."""

    def __init__(self, files: RowFiles, division: Division, rank: int, world_size: int) -> None:
        self._files, self._division, self._rank, self._world_size = files, division, rank, world_size
        self._is_fixed = files.is_packed or files.config.padding == "fixed" or division.equal_shapes
        self._rows = division.rows_per_step
        self._sampler = EpochSampler(seed=files.config.seed, num_rows=len(files.train), rows_per_step=self._rows)

    def step(self, step: int) -> list[Batch]:
        """See `Batches.step` and [Note: Mean over tokens] in data/batches.py."""
        division, train = self._division, self._files.train
        shape = (division.accumulation, division.num_workers, division.micro_batch_size)
        rows = self._sampler.global_rows(step).reshape(shape)
        together = division.together(rows)
        num_items = max(int(train.num_targets[together].sum()), 1) / len(together)
        return [
            self._batch(train, micro_batch, num_items, 1.0)
            if len(micro_batch)
            else Batch.without_rows(num_items, has_positions=self._files.is_packed)
            for micro_batch in division.own(rows)
        ]

    def tokens_after(self, steps: int) -> int:
        """See `Batches.tokens_after`."""
        epoch, place = divmod(steps, self._sampler.steps_per_epoch)
        num_tokens = self._files.train.num_tokens
        return epoch * int(num_tokens.sum()) + int(num_tokens[self._sampler.order(epoch)[: place * self._rows]].sum())

    def evaluation(self, num_batches: int) -> Iterator[Batch]:
        """See `Batches.evaluation`. Ranks without a row left get rows without a target."""
        held_out, rows_each = self._files.evaluation, self._division.micro_batch_size
        rows_at_once = rows_each * self._world_size
        for index in range(min(num_batches, -(-len(held_out) // rows_at_once))):
            first = index * rows_at_once + self._rank * rows_each
            rows = np.arange(first, first + rows_each)
            rows[rows >= len(held_out)] = -1
            num_targets = int(held_out.num_targets[rows].sum())
            yield self._batch(held_out, rows, max(num_targets, 1), num_targets)

    def _batch(self, split: Rows, rows: np.ndarray, num_items: float, weight: float) -> Batch:
        length = self._files.config.sequence_length
        if not self._is_fixed:
            length = max([LEAST_TOKENS, *(int(split.num_tokens[row]) for row in rows if row >= 0)])
        ids = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        positions = np.tile(np.arange(length), (len(rows), 1))
        for place, row in enumerate(rows):
            self._fill(split.members(row), ids[place], labels[place], positions[place])
        return Batch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions) if self._files.is_packed else None,
            num_items=torch.tensor(num_items, dtype=torch.float32),
            weight=weight,
        )

    def _fill(self, documents: np.ndarray, ids: np.ndarray, labels: np.ndarray, positions: np.ndarray) -> None:
        """Put documents one after the other into a row."""
        files, end = self._files, 0
        for document in documents:
            source = slice(*files.bounds[document : document + 2])
            start, end = end, end + source.stop - source.start
            ids[start:end] = files.tokens[source]
            labels[start:end] = np.where(files.counted[source], ids[start:end], IGNORED)
            positions[start:] = np.arange(len(positions) - start)  # padding continues the last document


# -- preparation -------------------------------------------------------------------------------------------------------


def rows_index_path(config: DataConfig, corpus: Corpus, encoder: Encoder, folder: Path) -> Path:
    """The index file of these documents, encoded and cut as the job says."""
    settings = config.pick("sequence_length", "too_long", "eval_fraction")
    return arrays.index_path(folder, (corpus.identity, encoder.identity, settings))


def write(
    index: Path, config: DataConfig, corpus: Corpus, encoder: Encoder, reading: CorpusFormat, vocab_size: int
) -> None:
    """Write the documents' tokens and rows.

    Raises:
        JobError: a document cannot be encoded, or the loss counts no token of any document.
        OSError: a file cannot be written.
    """
    dtypes = {"tokens": np.min_scalar_type(vocab_size - 1), "counted": np.dtype(bool)}
    counts = {"num_cut": 0, "num_dropped": 0, "num_without_target": 0}
    lengths, num_targets = array("q"), array("q")
    with arrays.array_file(index, "tokens") as tokens_file, arrays.array_file(index, "counted") as counted_file:
        for tokens, counted in _encoded(corpus, encoder):
            counted[:1] = False  # see [Note: Documents in a row]
            if len(tokens) > config.sequence_length:
                if config.too_long == "drop":
                    counts["num_dropped"] += 1
                    continue
                counts["num_cut"] += 1
                tokens, counted = tokens[: config.sequence_length], counted[: config.sequence_length]
            if not counted.any():
                counts["num_without_target"] += 1
                continue
            tokens_file.write(tokens.astype(dtypes["tokens"]).data)
            counted_file.write(np.ascontiguousarray(counted).data)
            lengths.append(len(tokens))
            num_targets.append(int(counted.sum()))
    if not lengths:
        raise JobError(
            f"no document of the corpus {config.path or config.kind!r} has a token that the loss counts "
            f"(data.loss = {reading.loss!r}, data.sequence_length = {config.sequence_length}): {counts['num_dropped']} "
            f"are too long, {counts['num_cut']} are cut, {counts['num_without_target']} have nothing to learn; use a "
            "longer sequence, or data.loss = 'all'"
        )
    small = {"lengths": np.array(lengths), "num_targets": np.array(num_targets)}
    for split, documents in zip(_SPLITS, _split(len(lengths), config.eval_fraction), strict=True):
        own_lengths = small["lengths"][documents]
        rows = (
            pack_rows(own_lengths, config.sequence_length) if reading.packing else [[n] for n in range(len(documents))]
        )
        small[f"{split}-documents"] = documents[np.array([n for row in rows for n in row], dtype=np.int64)]
        small[f"{split}-starts"] = np.cumsum([0, *map(len, rows)])
    for name, values in small.items():
        with arrays.array_file(index, name) as file:
            file.write(values.astype(np.int64).data)
        dtypes[name] = np.dtype(np.int64)
    arrays.write_index(index, dtypes, {"is_stream": False, "is_packed": reading.packing, **counts})


def _encoded(corpus: Corpus, encoder: Encoder) -> Iterator[Encoded]:
    found = corpus.documents()
    while batch := list(islice(found, _DOCUMENTS_PER_BATCH)):
        yield from encoder.encode(batch)


def open_rows(index: Path, config: DataConfig) -> RowFiles:
    """Map the files of `index`, which `prepare` returned, into memory."""
    summary = arrays.read_index(index).summary
    found = arrays.map_arrays(index)
    lengths, num_targets = found["lengths"], found["num_targets"]

    def rows(split: str) -> Rows:
        documents, starts = found[f"{split}-documents"], found[f"{split}-starts"]

        def by_row(values: np.ndarray) -> np.ndarray:
            return np.add.reduceat(values[documents], starts[:-1]) if len(documents) else np.empty(0, np.int64)

        return Rows(
            documents=documents,
            starts=starts,
            num_tokens=by_row(lengths),
            num_targets=np.append(by_row(num_targets), 0),
        )

    return RowFiles(
        config=config,
        is_packed=summary["is_packed"],
        tokens=found["tokens"],
        counted=found["counted"],
        bounds=np.append(0, np.cumsum(lengths)),
        train=rows("train"),
        evaluation=rows("eval"),
        summary=summary,
    )


def _split(num_documents: int, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """The documents to train on and those held out, at random but the same on every machine.

    With a fraction above 0, at least one document is held out, and at least one is not.

    Raises:
        JobError: there is only one document.
    """
    if eval_fraction == 0:
        return np.arange(num_documents), np.arange(0)
    if num_documents < 2:
        raise JobError(
            f"data.eval_fraction = {eval_fraction} holds documents out, and the corpus has one that the loss counts; "
            "set data.eval_fraction = 0"
        )
    held_out = min(max(round(num_documents * eval_fraction), 1), num_documents - 1)
    order = np.argsort([hashed(document) for document in range(num_documents)], kind="stable")
    return np.sort(order[held_out:]), np.sort(order[:held_out])
