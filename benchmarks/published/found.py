"""A prediction beside its measurement, and what many of them say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published.sources import Measurement
from laconic.plan.estimates import Estimate

MOST = 0.25
"""A prediction that is off by more needs a reason in its file."""
_TIE = 0.03
"""Published figures this close have no order."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A prediction. It keeps the measurement, so that a file that has changed since is noticed."""

    seconds: float
    """Predicted, of a step."""
    published_s: float
    memory_bytes: float
    """The predicted peak of what a device's allocator holds."""
    published_bytes: float | None
    tokens: int
    """The tokens of a step of one rank."""
    bound_by: str
    """The lane that takes most of a step, by the prediction."""

    @classmethod
    def of(cls, row: Measurement, estimate: Estimate) -> Found:
        """The prediction of a measurement."""
        return cls(
            seconds=estimate.seconds, published_s=row.seconds, memory_bytes=estimate.peak_bytes,
            published_bytes=row.memory_bytes, tokens=estimate.tokens // row.cluster.ranks,
            bound_by=estimate.bound_by.value,
        )  # fmt: skip

    @property
    def off(self) -> float:
        """The predicted seconds against the published ones: 0.1 is a tenth too slow."""
        return self.seconds / self.published_s - 1

    @property
    def memory_off(self) -> float | None:
        """The same of memory; None if none was published."""
        return self.memory_bytes / self.published_bytes - 1 if self.published_bytes else None


def is_right(one: Found, other: Found) -> bool | None:
    """Whether the faster of two, by tokens, is the one that was published as faster; None if neither was."""
    published = (one.tokens / one.published_s) / (other.tokens / other.published_s)
    if abs(published - 1) <= _TIE:
        return None
    return (one.tokens / one.seconds > other.tokens / other.seconds) == (published > 1)


def median(off: Sequence[float]) -> float:
    """The median of the sizes."""
    return statistics.median(map(abs, off))


def worst(off: Sequence[float]) -> float:
    """The one of most size."""
    return max(off, key=abs)
