"""Loss scaling for narrow gradients, whose overflow is known late.

[Note: Two batches late]
A batch's gradient has overflowed if its global norm is not finite; its update is skipped. The norm is known when the
last sum of the batch is complete. Under a staggered rule the first workers have begun the next batch by then. So the
scale of batch t comes from the batches up to t - 2. All devices receive the norm, so all compute the same scale.
"""

import torch
from torch import Tensor


class LossScale:
    """The loss scale of every batch, by the rule and the settings of a `torch.amp.GradScaler`."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scale, self.good_batches = scaler.get_scale(), 0
        """The scale now, and the number of finite batches in a row."""
        self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self._interval = scaler.get_growth_interval()
        self.by_batch: dict[int, float] = {}  # the scales of the latest batches

    def begin(self, batch: int) -> None:
        """Use the scale for a batch."""
        self.by_batch[batch] = self.scale
        self.by_batch.pop(batch - 4, None)

    def update(self, square: Tensor) -> None:
        """Update the scale with the sum of squares of the next batch's gradient."""
        self.scale, self.good_batches = self.after(square)

    def after(self, square: Tensor) -> tuple[float, int]:
        """The scale and the number of finite batches in a row that an update with this sum of squares would give."""
        if not torch.isfinite(square):
            return self.scale * self._backoff, 0
        if self.good_batches + 1 == self._interval:
            return self.scale * self._growth, 0
        return self.scale, self.good_batches + 1
