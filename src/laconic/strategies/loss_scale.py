"""Loss scaling for float16, whose small gradients vanish otherwise.

[Note: Loss scaling]
The loss of every micro-batch is multiplied by the scale, and the gradients are divided by it before they are clipped.
If gradients overflow, their global norm is not finite. All ranks see this norm, so all of them skip the step and halve
the scale, without a message. `torch.amp.GradScaler` looks at each rank's own gradients instead, and ranks would have to
agree. A skipped step uses up its rows, but the learning-rate schedule waits: it counts the optimizer's steps. If the
scale has fallen to 1 and gradients still overflow, it is not the scale's fault, and training ends.
"""

from dataclasses import dataclass
from typing import Any

_SMALLEST = 1.0


@dataclass(kw_only=True)
class LossScale:
    """The scale and its history, with the rule of `torch.amp.GradScaler`: [Note: Loss scaling]."""

    scale: float
    growth_steps: int
    """The steps in a row without overflow that double the scale."""
    good_steps: int = 0
    """The steps without overflow since the scale last changed."""
    num_skipped: int = 0
    """The steps of the whole run that were skipped."""

    @property
    def is_exhausted(self) -> bool:
        """True if a smaller scale would not help."""
        return self.scale <= _SMALLEST

    def update(self, *, overflowed: bool) -> None:
        """Note a step whose gradients overflowed, and which was skipped, or one whose gradients did not."""
        if overflowed:
            self.num_skipped += 1
            self.good_steps = 0
            self.scale = max(self.scale / 2, _SMALLEST)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.scale *= 2
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        """The part that a checkpoint needs."""
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from the `state` of another run."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])
