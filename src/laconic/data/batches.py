"""The rows of a step: which rows of the corpus, and what the training loop asks of data.

[Note: Mean over tokens]
The loss of an optimizer step is the mean over all targets of its global batch. A target is a token that the loss
counts: its label is not -100. Rows of tokens have different numbers of targets, so a mean of the means of ranks and
micro-batches would be wrong: a target would weigh more where few others are. Every rank has the same prepared data, and
the rows of a step are a function of (seed, step). So each rank knows the number T of targets of the global batch
without a message. With M micro-batches over all ranks, the loss of a micro-batch is the sum over its targets, divided
by T / M, their mean number. Ranks and micro-batches then average, as for any other job, and the average is the sum over
all targets divided by T. A micro-batch without a target adds zero, and is not divided by zero. The model divides:
transformers' losses take the divisor as `num_items_in_batch`. Islands take optimizer steps of their own, so each
island counts the targets of its own rows. Rows of a token stream all have equally many targets, and need no divisor
where all micro-batches have equally many rows.

[Note: Unequal rows]
Ranks that take different times for a row may get different numbers of rows: `Division.rows`. The global batch and the
order of its rows stay: an island's rows are cut into runs, one for each rank, and a run into micro-batches, the longer
ones first. All ranks have equally many micro-batches, since they gather and reduce together. So a slower rank has
smaller ones, and a faster rank larger ones, which need more memory. Where a rank has fewer rows than micro-batches, the
others have one row of two tokens, none of which counts: a model needs some row to run its transfers. As M does not
change, [Note: Mean over tokens] holds as it stands, and streams need its divisor, too. So the losses are those of equal
rows, but for the order of sums. Dropout, and a loss that routers add, depend on who has which rows, as on the number of
ranks.

[Note: A sampler without state]
A counter-based generator with the key (seed, s) draws all rows of step s at once, and rank r takes its rows by
position. So a checkpoint needs no state of the sampler, and a resumed run sees the same rows as an unbroken run. One
rank with 8 micro-batches, 8 ranks, and a mesh of 2 x 2 x 2 ranks draw the same global batch. Only the generator's raw
bits are used: numpy keeps them equal in every release, but not the distributions that it makes of them.

Rows of tokens are drawn without replacement: the key (seed, e) gives the order of all rows in epoch e, and step s
takes the next ones in it.
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that the loss does not count, as in transformers."""
LEAST_TOKENS = 2
"""A row has at least so many tokens, as some models need."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one micro-batch."""

    input_ids: Tensor
    """Token ids, of shape (rows, tokens), int64."""
    labels: Tensor
    """The same ids, and `IGNORED` where the loss does not count a token. Losses shift labels: label t is predicted from
    the tokens before t."""
    num_items: Tensor | None = None
    """The divisor of the sum over targets, a scalar: see [Note: Mean over tokens]. None: the number of targets."""
    weight: float = 1.0
    """The weight of this micro-batch's loss in a mean over an evaluation."""

    def arguments(self) -> dict[str, Tensor]:
        """The keyword arguments of a transformers model that returns the loss."""
        found = {"input_ids": self.input_ids, "labels": self.labels}
        if self.num_items is not None:
            found["num_items_in_batch"] = self.num_items
        return found

    def to(self, device: torch.device) -> "Batch":
        """This batch on `device`; transfers from pinned memory, while the host goes on."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @classmethod
    def without_rows(cls, num_items: float) -> "Batch":
        """A micro-batch of a rank that has no row for it: [Note: Unequal rows]."""
        ids = torch.zeros((1, LEAST_TOKENS), dtype=torch.int64)
        return cls(
            input_ids=ids,
            labels=torch.full_like(ids, IGNORED),
            num_items=torch.tensor(num_items, dtype=torch.float32),
        )


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the global batch is divided: into parts, one for each worker, and a part into micro-batches."""

    num_workers: int = 1
    """The number of parts."""
    workers: range = range(1)
    """The parts of this rank."""
    peers: range | None = None
    """The parts that share an optimizer step with this rank's: those of its island. None: all parts."""
    micro_batch_size: int = 1
    """Rows per micro-batch."""
    accumulation: int = 1
    """Micro-batches per part."""
    equal_shapes: bool = False
    """Whether all micro-batches must have one shape, as the cyclic schedule needs."""
    rows: tuple[int, ...] | None = None
    """The rows of a step of each part of `peers`: [Note: Unequal rows]. None: equally many."""
    rank: int = 0
    """This rank, of `world_size` that share the held-out rows: all of the launch."""
    world_size: int = 1

    @property
    def rows_per_step(self) -> int:
        """The number of rows of the global batch."""
        return self.accumulation * self.num_workers * self.micro_batch_size

    def own(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of each micro-batch of this rank, in order.

        Shapes: `rows`, the global batch, (accumulation, parts, micro-batch size) -> (rows of the micro-batch,) each.
        """
        if self.rows is None:
            return list(rows[:, self.workers.start : self.workers.stop].reshape(-1, self.micro_batch_size))
        place = self.workers.start - self._peers.start
        first = sum(self.rows[:place])
        run = self.together(rows).reshape(-1)[first : first + self.rows[place]]
        return np.array_split(run, self.accumulation)

    def together(self, rows: np.ndarray) -> np.ndarray:
        """The rows that share this rank's optimizer step. Shape: (micro-batches, mean rows of a micro-batch)."""
        return rows[:, self._peers.start : self._peers.stop].reshape(-1, self.micro_batch_size)

    @property
    def _peers(self) -> range:
        return self.peers or range(self.num_workers)


class TrainingData(ABC):
    """The prepared corpus of a job on this node, and the batches of a rank. Only `check_model` communicates."""

    num_documents: int
    """The number of documents, those for evaluation included."""
    num_held_out: int
    """The number of rows held out for evaluation; 0 with eval_fraction = 0."""

    @abstractmethod
    def steps_per_epoch(self, rows_per_step: int) -> int:
        """The number of optimizer steps, of `rows_per_step` rows each, that see the whole corpus once.

        The last step of an epoch may have fewer rows. A token stream is drawn with replacement: its epoch is as many
        tokens as the corpus has.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line with the sizes of the corpus."""

    @abstractmethod
    def check_model(self, run: Callable[[Batch], Any], *, is_unequal: bool = False) -> None:
        """Run the model once, if rows need it, to see that it divides their loss by the number it is given. Collective.

        `run` returns a transformers output with the loss and the logits of a batch. With `is_unequal`, ranks may have
        different numbers of rows.

        Raises:
            JobError: the model divides the loss by another number.
        """

    @abstractmethod
    def step(self, division: Division, step: int) -> Sequence[Batch]:
        """The rank's micro-batches of optimizer step `step`, counted from 0."""

    @abstractmethod
    def tokens_after(self, division: Division, steps: int) -> int:
        """The number of tokens of the first `steps` global batches, without padding."""

    def held_out(self, division: Division, num_batches: int) -> Iterator[Batch]:
        """At most `num_batches` micro-batches of held-out rows, the same every time, equally many on every rank."""
        rows_each = division.micro_batch_size
        rows_at_once = rows_each * division.world_size
        for index in range(min(num_batches, -(-self.num_held_out // rows_at_once))):
            yield self._held_out(division, index * rows_at_once + division.rank * rows_each + np.arange(rows_each))

    @abstractmethod
    def _held_out(self, division: Division, places: np.ndarray) -> Batch:
        """The held-out rows at these places. Those from `num_held_out` on are for ranks without a row left."""


def drawn_offsets(division: Division, step: int, *, seed: int, num_starts: int) -> np.ndarray:
    """Draw the first token of each row of a step, with replacement, from the first `num_starts` tokens of a stream.

    Shape: (accumulation, workers, micro-batch size), int64.
    """
    key = np.array([seed % 2**64, step], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(division.rows_per_step)
    # the modulo prefers low places by num_starts / 2**64, which is negligible
    shape = (division.accumulation, division.num_workers, division.micro_batch_size)
    return (raw % np.uint64(num_starts)).astype(np.int64).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class EpochSampler:
    """Draws the rows of each step without replacement: every row once in each epoch, in a new order."""

    seed: int
    num_rows: int
    rows_per_step: int

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch. The last one has the rows that are left, and -1 in the places of missing rows."""
        return -(-self.num_rows // self.rows_per_step)

    def global_rows(self, step: int) -> np.ndarray:
        """The rows of the global batch, and -1 where there is none. Shape: (rows per step,), int64."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self.order(epoch)[place * self.rows_per_step :][: self.rows_per_step]
        return np.pad(rows, (0, self.rows_per_step - len(rows)), constant_values=-1)

    def order(self, epoch: int) -> np.ndarray:
        """All rows in the order of an epoch. Shape: (rows,), int64."""
        return _order(self.seed, epoch, self.num_rows)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """A permutation of all rows, from raw bits alone."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")


def hashed(document: int) -> int:
    """A random number below 2**64 that belongs to a document and is the same on every machine."""
    digest = hashlib.blake2b(document.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
