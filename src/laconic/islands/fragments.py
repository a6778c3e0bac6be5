"""Which parameters agree together, and in which step: arithmetic on a counter that all islands share.

[Note: Streaming]
Every parameter is in one fragment, and every fragment is sent once in `every` inner steps, in turn, so that a link sees
small messages all the time instead of a large one now and then. What is sent after step t is applied after step
t + overlap, and the link works behind that many steps. At most one fragment is under way, and which one follows from
the step alone, so all islands and all their ranks exchange in one order (arXiv 2501.18512, section 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FragmentPattern = Literal["strided", "sequential"]

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """When fragments are sent and applied. Steps are counted from 1."""

    every: int
    """Inner steps between two syncs of the same fragment."""
    fragments: int = 1
    """Parts of the model that are synced in turn; must divide `every`."""
    overlap: int = 0
    """Inner steps between sending a fragment and applying what comes back; less than every / fragments."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.fragments < 1 or self.overlap < 0:
            raise ValueError(
                f"every={self.every} and fragments={self.fragments} must be positive, overlap={self.overlap} not "
                "negative"
            )
        if self.every % self.fragments:
            raise ValueError(
                f"fragments={self.fragments} does not divide every={self.every}, so fragments could not be synced at "
                f"even distances; use every={-(-self.every // self.fragments) * self.fragments}, or other fragments"
            )
        if self.overlap >= self.interval:
            raise ValueError(
                f"overlap={self.overlap} must be less than every / fragments = {self.interval}: one fragment at "
                "most is under way"
            )

    @property
    def interval(self) -> int:
        """Steps between two fragments' syncs."""
        return self.every // self.fragments

    def sends(self, step: int) -> int | None:
        """The fragment that is sent after inner step `step`; None: none is."""
        if step < 1 or step % self.interval:
            return None
        return step // self.interval % self.fragments

    def applies(self, step: int) -> int | None:
        """The fragment whose mean is applied after inner step `step`."""
        return self.sends(step - self.overlap)


def fragment_of(names: Iterable[str], fragments: int, pattern: FragmentPattern = "strided") -> dict[str, int]:
    """Each parameter's fragment: layer l goes to fragment l mod P, or, sequential, to l P // L; the rest to 0.

    A layer is the first number in a parameter's name. Strided fragments keep the link evenly busy, as the parameters
    of a fragment are used all over the step (arXiv 2501.18512).

    Raises:
        ValueError: more fragments than layers.
    """
    names = list(names)
    layers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    num_layers = max(layers.values(), default=-1) + 1
    if fragments > max(1, num_layers):
        raise ValueError(
            f"fragments={fragments}, but the model has {num_layers} numbered layers; use at most {max(1, num_layers)}"
        )
    if pattern == "strided":
        return {name: layers.get(name, 0) % fragments for name in names}
    return {name: layers.get(name, 0) * fragments // max(1, num_layers) for name in names}
