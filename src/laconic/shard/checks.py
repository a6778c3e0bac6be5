"""The policy of checks against silent corruption, and the error that they raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

OnDamage = Literal["raise", "regather"]


class CorruptionError(RuntimeError):
    """Ranks have other bits than they should: weights or gradients were damaged, or changed unnoticed.

    All ranks of the mesh raise it alike. No optimizer has used the damaged values if the error comes out of a backward.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """The policy that says how often a unit compares checksums between ranks, and what follows from damage.

    Raises:
        ValueError: `interval` is negative, or `on_damage` is unknown.
    """

    interval: int = 100
    """Optimizer steps from one step that is checked to the next; the first step is checked, too. A forward without
    gradients is a step of its own. 0 for no checksums."""
    on_damage: OnDamage = "raise"
    """For a node shard that was damaged while it rested in a cache. `raise` ends training with a `CorruptionError` at
    the end of the step. `regather` warns, and gathers the unit again before it is used. Other damage always raises."""
    unnoticed_edits: bool = False
    """Look in every forward and every backward for weights that have changed without notice, as through
    `to_local().data` or a raw pointer. For finding mistakes: it takes a pass over the shard and a message each time."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"Checks(interval={self.interval}) must be a number of steps, or 0 for no checksums")
        if self.on_damage not in get_args(OnDamage):
            words = ", ".join(map(repr, get_args(OnDamage)))
            raise ValueError(f"Checks(on_damage={self.on_damage!r}) is not known; use one of {words}")
