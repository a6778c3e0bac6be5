"""Learning-rate schedules, which are pure functions of the step."""

import math

from laconic.config import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * _decay(step, config, total_steps)


def _decay(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The learning rate of a step after the warm-up, as a share of the peak."""
    floor = config.min_lr_ratio
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "cosine":
            length = config.decay_steps or max(total_steps - config.warmup_steps, 1)
            progress = min((step - config.warmup_steps) / length, 1.0)
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            length = config.decay_steps or max(total_steps // 5, 1)
            # The first step of the decay is below the plateau already, and the last step is at the floor.
            progress = min(max(step + 1 - (total_steps - length), 0) / length, 1.0)
            return 1.0 - (1.0 - floor) * progress
