"""Loss scaling for narrow gradients, when overflow is known late.

[Note: Two batches late]
Whether a batch's gradient overflowed is known when its last sum is, and under a staggered rule the first workers have
then begun the next batch. So the scale of batch t follows from the batches up to t - 2, on every device alike: all hear
the global norm, which is not finite after an overflow. The update of such a batch is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """The scale of every batch, by the rule of `torch.amp.GradScaler` with its settings."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scale, self.good_batches = scaler.get_scale(), 0
        self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self._interval = scaler.get_growth_interval()
        self.by_batch: dict[int, float] = {}

    def use(self, batch: int) -> float:
        """The scale of a batch that is computed now."""
        self.by_batch[batch] = self.scale
        self.by_batch.pop(batch - 4, None)
        return self.scale

    def saw(self, square: Tensor) -> None:
        """The sum of squares of the next batch's gradient."""
        self.scale, self.good_batches = self.after(square)

    def after(self, square: Tensor) -> tuple[float, int]:
        """The scale, and how many batches in a row were finite, once this has been seen."""
        if not torch.isfinite(square):
            return self.scale * self._backoff, 0
        if self.good_batches + 1 == self._interval:
            return self.scale * self._growth, 0
        return self.scale, self.good_batches + 1
