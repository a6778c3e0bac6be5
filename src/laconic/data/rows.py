"""A corpus of rows of tokens, such as conversations after a chat template and a tokenizer: one in a row, padded.

[Note: Rows of tokens]
A row of the corpus has the field `input_ids`, as TRL and `datasets` make it. `labels` is -100 where the loss does not
count a token; or `assistant_masks` and `completion_mask` say which tokens it counts. A row needs no mask of attention:
attention is causal, and padding comes last, so no token sees it. The exception are models whose routers add a loss of
their own: it counts padding too. No label is the first token, which nothing predicts.
"""

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from laconic.config import DataConfig, JobError
from laconic.data import arrays
from laconic.data.batches import IGNORED, LEAST_TOKENS, Batch, Division, EpochSampler, TrainingData, hashed
from laconic.data.corpus import Corpus, Document

IDS = "input_ids"
"""The field with the tokens of a row."""
_LABELS, _MASKS = "labels", ("assistant_masks", "completion_mask")
_SPLITS = ("train", "eval")
_TOKENS = 8  # of each row that the model is asked with


def check_model(run: Callable[[Batch], Any], rows: str, consequence: str) -> None:
    """Run a model on two rows. The loss must be the sum over all targets, divided by the batch's `num_items`.

    The message says which `rows` need that, and the `consequence` of a model that divides by itself, with the remedy.

    Raises:
        JobError: it is not so.
    """
    ids = torch.tensor([[1], [2]]) * torch.arange(_TOKENS) % 3
    try:
        output = run(Batch(input_ids=ids, labels=ids, num_items=torch.tensor(1.0)))
    except TypeError as error:  # an unexpected keyword argument
        raise JobError(f"this model cannot train on {rows}: {error}; choose another model") from error
    logits = output.logits.detach().float().cpu()
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    if float(output.loss.detach()) < 0.5 * float(total):  # a mean is far smaller, and a model may add a loss of its own
        raise JobError(
            "this model divides its loss by the number of tokens of each micro-batch (it takes no num_items_in_batch), "
            f"so {consequence}, or choose another model"
        )


@dataclass(frozen=True, kw_only=True)
class RowFiles(TrainingData):
    """The rows of a job on this node."""

    config: DataConfig
    tokens: np.ndarray
    """The tokens of all rows that are kept: (tokens,)."""
    counted: np.ndarray
    """Whether the loss counts each token: (tokens,)."""
    bounds: np.ndarray
    """The place in `tokens` where each row begins, and the end: (rows + 1,)."""
    num_targets: np.ndarray
    """The tokens of each row that the loss counts, and 0 for row -1: (rows + 1,)."""
    train: np.ndarray
    """The rows to train on: (rows,)."""
    evaluation: np.ndarray
    """The rows held out: (rows,)."""
    summary: dict[str, Any]

    @property
    def num_documents(self) -> int:  # type: ignore[override]
        """See `TrainingData.num_documents`."""
        return len(self.bounds) - 1

    @property
    def num_held_out(self) -> int:  # type: ignore[override]
        """See `TrainingData.num_held_out`."""
        return len(self.evaluation)

    def steps_per_epoch(self, rows_per_step: int) -> int:
        """See `TrainingData.steps_per_epoch`."""
        return -(-len(self.train) // rows_per_step)

    def describe(self) -> str:
        """See `TrainingData.describe`."""
        fates = {
            "num_cut": f"cut to data.sequence_length = {self.config.sequence_length} tokens",
            "num_without_target": "left out: the loss counts none of their tokens",
        }
        notes = "; ".join(f"{self.summary[key]:,} {text}" for key, text in fates.items() if self.summary[key])
        return (
            f"corpus: {self.num_documents:,} rows{f' ({notes})' if notes else ''}; to train on: "
            f"{len(self.train):,} rows, {self.num_tokens(self.train).sum():,} tokens, of which the loss counts "
            f"{self.num_targets[self.train].sum():,}; held out: {len(self.evaluation):,} rows"
        )

    def num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of rows, without padding."""
        return self.bounds[rows + 1] - self.bounds[rows]

    def check_model(self, run: Callable[[Batch], Any], *, is_unequal: bool = False) -> None:
        """See `TrainingData.check_model`. Rows of tokens have different numbers of targets anyway."""
        consequence = "rows with few tokens that count would weigh too much; train on text, whose rows count equally"
        check_model(run, "rows of tokens", consequence)

    def step(self, division: Division, step: int) -> list[Batch]:
        """See `TrainingData.step` and [Note: Mean over tokens] in data/batches.py. Each epoch draws each row once."""
        shape = (division.accumulation, division.num_workers, division.micro_batch_size)
        rows = self._numbers(self.train, self._sampler(division).global_rows(step)).reshape(shape)
        together = division.together(rows)
        num_items = max(int(self.num_targets[together].sum()), 1) / len(together)
        return [
            self._batch(division, micro_batch, num_items, 1.0) if len(micro_batch) else Batch.without_rows(num_items)
            for micro_batch in division.own(rows)
        ]

    def tokens_after(self, division: Division, steps: int) -> int:
        """See `TrainingData.tokens_after`."""
        sampler = self._sampler(division)
        epoch, place = divmod(steps, sampler.steps_per_epoch)
        num_tokens = self.num_tokens(self.train)
        begun = num_tokens[sampler.order(epoch)[: place * division.rows_per_step]]
        return epoch * int(num_tokens.sum()) + int(begun.sum())

    def _held_out(self, division: Division, places: np.ndarray) -> Batch:
        """See `TrainingData`. Rows without a target stand for missing ones."""
        rows = self._numbers(self.evaluation, np.where(places < self.num_held_out, places, -1))
        num_targets = int(self.num_targets[rows].sum())
        return self._batch(division, rows, max(num_targets, 1), num_targets)

    def _sampler(self, division: Division) -> EpochSampler:
        return EpochSampler(seed=self.config.seed, num_rows=len(self.train), rows_per_step=division.rows_per_step)

    @staticmethod
    def _numbers(split: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The rows at these places of a split, and -1 for place -1."""
        return np.where(places < 0, -1, split[places])

    def _batch(self, division: Division, rows: np.ndarray, num_items: float, weight: float) -> Batch:
        sources = [slice(*self.bounds[row : row + 2]) if row >= 0 else slice(0, 0) for row in rows]
        length = max([LEAST_TOKENS, *(source.stop - source.start for source in sources)])
        if division.equal_shapes:
            length = self.config.sequence_length
        ids = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for place, source in enumerate(sources):
            end = source.stop - source.start
            ids[place, :end] = self.tokens[source]
            labels[place, :end] = np.where(self.counted[source], ids[place, :end], IGNORED)
        return Batch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            num_items=torch.tensor(num_items, dtype=torch.float32),
            weight=weight,
        )


# -- preparation -------------------------------------------------------------------------------------------------------


def rows_index_path(config: DataConfig, corpus: Corpus, vocab_size: int, folder: Path) -> Path:
    """The index file of these rows, cut as the job says."""
    settings = config.pick("sequence_length", "eval_fraction")
    return arrays.index_path(folder, (corpus.identity, IDS, vocab_size, settings))


def write(index: Path, config: DataConfig, corpus: Corpus, vocab_size: int) -> None:
    """Write the rows' tokens.

    Raises:
        JobError: a row has no tokens of the vocabulary, or masks that do not fit; or the loss counts no token of any.
        OSError: a file cannot be written.
    """
    dtypes = {"tokens": np.min_scalar_type(vocab_size - 1), "counted": np.dtype(bool)}
    counts = {"num_cut": 0, "num_without_target": 0}
    lengths, num_targets = array("q"), array("q")
    with arrays.array_file(index, "tokens") as tokens_file, arrays.array_file(index, "counted") as counted_file:
        for document in corpus.documents():
            tokens, counted = _read(document, vocab_size)
            counts["num_cut"] += len(tokens) > config.sequence_length
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
            f"no row of the corpus {config.path!r} has a token that the loss counts within data.sequence_length = "
            f"{config.sequence_length}: {counts['num_cut']} are cut, {counts['num_without_target']} have nothing to "
            "learn; use a longer sequence, or other masks"
        )
    small = {"lengths": np.array(lengths), "num_targets": np.array(num_targets)}
    small |= dict(zip(_SPLITS, _split(len(lengths), config.eval_fraction), strict=True))
    for name, values in small.items():
        with arrays.array_file(index, name) as file:
            file.write(values.astype(np.int64).data)
        dtypes[name] = np.dtype(np.int64)
    arrays.write_index(index, dtypes, {"is_stream": False, **counts})


def _read(document: Document, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a row, and which of them the loss counts: [Note: Rows of tokens]."""
    fields = {name: document.fields[name] for name in (IDS, _LABELS, *_MASKS) if document.fields.get(name) is not None}
    if IDS not in fields:
        raise JobError(f"{document.name} has no field {IDS!r}: it has only {sorted(document.fields)}")
    found = {name: _integers(values, f"{document.name}, field {name!r}") for name, values in fields.items()}
    tokens = found.pop(IDS)
    if tokens.ndim != 1 or any(values.shape != tokens.shape for values in found.values()):
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in {IDS: tokens, **found}.items())
        raise JobError(f"{document.name} must have lists of one length, got {shapes}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise JobError(
            f"{document.name} has the token {int(tokens.max() if tokens.min() >= 0 else tokens.min())}, and "
            f"data.tokenizer has {vocab_size} tokens; set data.tokenizer to the tokenizer that made the rows"
        )
    counted = np.ones(len(tokens), dtype=bool)
    for name, values in found.items():
        counted &= values != IGNORED if name == _LABELS else values != 0
    if _LABELS in found and (found[_LABELS] != tokens)[counted].any():
        raise JobError(f"{document.name} has labels that are neither its tokens nor {IGNORED}; do not shift them")
    counted[:1] = False
    return tokens, counted


def _integers(values: Any, where: str) -> np.ndarray:
    with contextlib.suppress(ValueError):  # lists of several lengths
        found = np.asarray(values)
        if found.dtype.kind in "iub" or found.size == 0:
            return found.astype(np.int64)
    raise JobError(f"{where} holds {values!r:.80}; it must be a list of integers")


def open_rows(index: Path, config: DataConfig) -> RowFiles:
    """Map the files of `index`, which `prepare` returned, into memory."""
    found = arrays.map_arrays(index)
    return RowFiles(
        config=config,
        tokens=found["tokens"],
        counted=found["counted"],
        bounds=np.append(0, np.cumsum(found["lengths"])),
        num_targets=np.append(found["num_targets"], 0),
        train=found["train"],
        evaluation=found["eval"],
        summary=arrays.read_index(index).summary,
    )


def _split(num_rows: int, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and those held out, at random but the same on every machine.

    With a fraction above 0, at least one row is held out, and at least one is not.

    Raises:
        JobError: there is only one row.
    """
    if eval_fraction == 0:
        return np.arange(num_rows), np.arange(0)
    if num_rows < 2:
        raise JobError(
            f"data.eval_fraction = {eval_fraction} holds rows out, and the corpus has one that the loss counts; set "
            "data.eval_fraction = 0"
        )
    held_out = min(max(round(num_rows * eval_fraction), 1), num_rows - 1)
    order = np.argsort([hashed(row) for row in range(num_rows)], kind="stable")
    return np.sort(order[held_out:]), np.sort(order[:held_out])
