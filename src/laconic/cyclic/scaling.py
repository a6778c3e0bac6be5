"""Loss scaling for narrow gradients, whose overflow is known late.

[Note: Two batches late]
A batch's gradient has overflowed if its global norm is not finite. Then the update is skipped. The norm is known when
the last total of the batch is complete. Under a staggered rule the first workers have begun the next batch by then. So
the scale of batch t depends on the batches up to t - 2. All devices receive the norm, so all compute the same scale.
"""

import torch
from torch import Tensor

KEPT_BATCHES = 4  # scales, settings and norms of this many batches are kept


class LossScale:
    """The loss scale of every batch, by the rule and the settings of a `torch.amp.GradScaler`."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scale, self.good_batches = scaler.get_scale(), 0
        """The scale now, and the number of batches in a row that have not overflowed."""
        self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self._interval = scaler.get_growth_interval()
        self.by_batch: dict[int, float] = {}  # the scales of the latest batches

    def begin(self, batch: int) -> None:
        """Record that a batch uses the current scale."""
        self.by_batch[batch] = self.scale
        self.by_batch.pop(batch - KEPT_BATCHES, None)

    def update(self, square: Tensor) -> None:
        """Change the scale as the sum of squares of a batch's gradient asks for; call it once per batch, in order."""
        self.scale, self.good_batches = self.after(square)

    def after(self, square: Tensor) -> tuple[float, int]:
        """The values that `update` would give to `scale` and `good_batches`."""
        if not torch.isfinite(square):
            return self.scale * self._backoff, 0
        if self.good_batches + 1 == self._interval:
            return self.scale * self._growth, 0
        return self.scale, self.good_batches + 1
