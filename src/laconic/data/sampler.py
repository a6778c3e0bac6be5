"""The rows of the corpus that a step trains on.

[Note: A sampler without state]
A counter-based generator with the key (seed, s) draws all rows of step s at once, and rank r takes its rows by
position. So a checkpoint needs no state of the sampler, and a resumed run sees the same rows as an unbroken run. One
rank with 8 micro-batches, 8 ranks, and a mesh of 2 x 2 x 2 ranks draw the same global batch. Only the generator's raw
bits are used: numpy keeps them equal in every release, but not the distributions that it makes of them.

Rows of documents are drawn without replacement: the key (seed, e) gives the order of all rows in epoch e, and step s
takes the next ones in it.
"""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws the first tokens of the rows of each step, with replacement."""

    seed: int
    num_tokens: int
    sequence_length: int
    """Tokens per row."""
    micro_batch_size: int
    """Rows per rank and micro-batch."""
    accumulation: int = 1
    """Micro-batches per step."""
    rank: int = 0
    world_size: int = 1

    @property
    def rows_per_step(self) -> int:
        """The number of rows of the global batch."""
        return self.accumulation * self.world_size * self.micro_batch_size

    def global_offsets(self, step: int) -> np.ndarray:
        """Draw the index of each row's first token: (accumulation, world size, micro-batch size), int64."""
        key = np.array([self.seed % 2**64, step], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw(self.rows_per_step)
        positions = self.num_tokens - self.sequence_length + 1
        # the modulo prefers low positions by positions / 2**64, which is negligible
        return (
            (raw % np.uint64(positions))
            .astype(np.int64)
            .reshape(self.accumulation, self.world_size, self.micro_batch_size)
        )

    def offsets(self, step: int) -> np.ndarray:
        """Return this rank's part of `global_offsets`: (accumulation, micro-batch size), int64."""
        return self.global_offsets(step)[:, self.rank]


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
