"""The rows of the corpus that a step trains on.

[Note: A sampler without state]
A counter-based generator with the key (seed, s) draws all rows of step s at once, and rank r takes its rows by
position. So nothing need be saved, and a resumed run sees the same rows as an unbroken run. One rank with 8
micro-batches, 8 ranks, or 2 x 2 x 2 draw the same global batch. Only the generator's raw bits are used, because numpy
keeps these the same in every release, but not its distributions.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws the starts of the rows of each step, with replacement."""

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
        """The first token of each row of the global batch, of shape (accumulation, world size, micro-batch size)."""
        key = np.array([self.seed % 2**64, step], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw(self.rows_per_step)
        positions = self.num_tokens - self.sequence_length + 1
        # a modulo has a bias of positions / 2**64, which is negligible
        return (
            (raw % np.uint64(positions))
            .astype(np.int64)
            .reshape(self.accumulation, self.world_size, self.micro_batch_size)
        )

    def offsets(self, step: int) -> np.ndarray:
        """This rank's part of `global_offsets`, of shape (accumulation, micro-batch size)."""
        return self.global_offsets(step)[:, self.rank]
