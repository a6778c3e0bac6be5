"""Which rows a step sees.

[Note: Resuming is an integer]
A sampler with state has to be saved, restored and agreed on by all ranks. This one has none: the rows of step s are
drawn by a counter-based generator keyed by (seed, s), all of them at once, and rank r takes its own by position. So the
position in the data is the step, a resumed run sees what the unbroken one would have seen, and the same global batch
is drawn by 1 rank with 8 micro-batches, by 8 ranks, or by 2 x 2 x 2. Only the generator's raw bits are used, because
numpy promises those (and not its distributions) to be the same in every release.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws the starts of the rows of each step, with replacement."""

    seed: int
    """Key of the run."""
    num_tokens: int
    """Length of the corpus."""
    sequence_length: int
    """Tokens per row."""
    micro_batch_size: int
    """Rows per rank and micro-batch."""
    accumulation: int = 1
    """Micro-batches per step."""
    rank: int = 0
    """This rank."""
    world_size: int = 1
    """All ranks."""

    @property
    def rows_per_step(self) -> int:
        """Rows of the global batch."""
        return self.accumulation * self.world_size * self.micro_batch_size

    def global_offsets(self, step: int) -> np.ndarray:
        """First token of each row of the global batch, shape (accumulation, world size, micro-batch size)."""
        key = np.array([self.seed % 2**64, step], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw(self.rows_per_step)
        positions = self.num_tokens - self.sequence_length + 1
        # the bias of a modulo is positions / 2**64: nothing
        return (
            (raw % np.uint64(positions))
            .astype(np.int64)
            .reshape(self.accumulation, self.world_size, self.micro_batch_size)
        )

    def offsets(self, step: int) -> np.ndarray:
        """This rank's part, shape (accumulation, micro-batch size)."""
        return self.global_offsets(step)[:, self.rank]
