"""The figures of one sync, as one island sees it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One fragment's sync on this island."""

    step: int
    """The inner step after which the mean was applied."""
    fragment: int
    drift_norm: float
    """The norm of this island's pseudo-gradient."""
    mean_norm: float
    """The norm of the mean of all islands' pseudo-gradients."""
    cosine: float
    """The cosine between this pseudo-gradient and the mean: 1 if all islands agree, 1 / sqrt(I) if unrelated."""
    codec_error: float
    """The relative error |decoded - own| / |own| of the pseudo-gradient that this island sent."""
    sent_bytes: int
    num_islands: int
    """The number of islands whose pseudo-gradients the mean has."""
    hidden_s: float
    """The seconds of the all-reduce that ran behind inner steps."""
    exposed_s: float
    """The seconds that training waited for the all-reduce."""
