"""The policies of `LocalSteps`: frozen objects that check themselves. A job description has them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from laconic.islands.fragments import SyncSchedule
from laconic.policy import Policy, Positive, ProperShare, Switch, option

if TYPE_CHECKING:
    import torch

CodecName = Literal["fp32", "bf16", "int8", "int4", "int3", "int2", "e2m1", "e3m0", "top64"]


@dataclass(frozen=True, kw_only=True)
class Coding(Policy):
    """The policy that says in which format pseudo-gradients cross between islands.

    Raises:
        ValueError: a value is out of its range.
    """

    codec: Any = option("int4", hint=CodecName)
    """The format of pseudo-gradients on the wire: 32, 16, 8, 4, 3, 2, 4, 4 or 0.23 bits a parameter. Python also takes
    a `Codec`. One island alone sends nothing, and uses fp32."""
    error_feedback: Switch = False
    """Add to each pseudo-gradient what the codec has lost of the earlier ones: all of it, or this share at each sync.
    `top64` needs it."""


@dataclass(frozen=True, kw_only=True)
class OuterSGD(Policy):
    """The outer optimizer of `LocalSteps`: SGD with Nesterov momentum (arXiv 2311.08105), which a call makes.

    Raises:
        ValueError: a value is out of its range.
    """

    lr: Positive = option(0.7, key="outer_lr")
    """Learning rate of the outer optimizer, SGD along the mean pseudo-gradient."""
    momentum: ProperShare = option(0.9, key="outer_momentum")
    """Nesterov momentum of the outer optimizer; 0: none."""
    sliced_lr: Positive | None = option(None, key="outer_sliced_lr")
    """The outer learning rate of slices that only some islands train. Default: that of all others."""
    sliced_momentum: ProperShare | None = option(None, key="outer_sliced_momentum")
    """The outer momentum of slices that only some islands train. Default: that of all others."""

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of parameter groups: [Note: Outer parameter groups] in islands/outer_optimizer.py."""
        import torch

        for group in groups:
            is_sliced = group["holders"] < group["islands"]
            group["lr"] = self.sliced_lr if is_sliced and self.sliced_lr is not None else self.lr
            has_own = is_sliced and self.sliced_momentum is not None
            group["momentum"] = self.sliced_momentum if has_own else self.momentum
            group["nesterov"] = group["momentum"] > 0
        return torch.optim.SGD(groups, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class SyncPolicy(Policy):
    """When islands sync, in which format, and the step that they take then: `[sync]` and `LocalSteps` contain it."""

    schedule: SyncSchedule = SyncSchedule()
    coding: Coding = Coding()
    outer: OuterSGD = OuterSGD()


outer_sgd = OuterSGD
"""The name of `OuterSGD` in earlier releases."""
