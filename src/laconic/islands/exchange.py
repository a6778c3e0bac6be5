"""The sync of one fragment among islands that stay, in the background thread.

[Note: Agreed before anything is sent]
NaN in one island's pseudo-gradient would become NaN on all islands, or end one rank while the others wait for it. So
the ranks of an island first learn whether all of their parts are finite. Each tells the ranks at its place in other
islands before it sends values. All ranks of all islands know the same flags and raise the same error at the same step.

[Note: Weights by tokens]
An island that has trained on twice as many tokens knows twice as much about the direction. So each island tells how
many tokens its pseudo-gradient comes from, beside the flag of the note above, and the mean weighs by them. If all
islands tell the same number, the mean is the plain one, to the bit. Slices are averaged by the number of their holders.
"""

from dataclasses import dataclass

from torch import Tensor

from laconic.codec import Codec
from laconic.comm.cluster import Cluster
from laconic.errors import JobError
from laconic.islands.all_reduce import CompressedAllReduce, IslandGroup, Mean


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One island's part in the sync of a fragment; of it, this rank's elements."""

    fragment: int
    step: int
    """The inner step after which the island sends it."""
    values: Tensor
    """The pseudo-gradient, (numel,), fp32, on the host."""
    tokens: int = 0
    """The tokens that the pseudo-gradient comes from."""
    is_sound: bool = True
    """Whether the values of all ranks of the island are finite."""
    divisor: Tensor | None = None
    """The number of islands that train each coordinate, (numel,); None if all islands train all."""


class Exchange:
    """Means over islands that stay until the job ends."""

    def __init__(self, cluster: Cluster, codec: Codec) -> None:
        self._islands = IslandGroup.of(cluster)
        self._all_reduce = CompressedAllReduce(self._islands, codec, cluster.traffic)

    def begins(self, *, is_ready: bool) -> bool:
        """Whether a sync begins after this step. `is_ready`: this island has taken all steps up to the next sync."""
        return is_ready

    def mean(self, own: Contribution) -> Mean:
        """Return the mean of all islands' contributions. Collective over islands, in the background thread.

        Raises: JobError if the values of any island are not finite.
        """
        told = self._islands.gather(int(not own.is_sound), own.tokens)
        bad = [str(island) for island, (is_bad, _) in enumerate(told) if is_bad]
        if bad:
            raise diverged(own, f"island {', '.join(bad)} (of 0 to {len(told) - 1}), so islands have sent nothing")
        weights = None if own.divisor is not None else [tokens for _, tokens in told]
        return self._all_reduce.mean(own.values, own.divisor, weights)


def diverged(own: Contribution, where: str) -> JobError:
    """The error of an island whose pseudo-gradient is not finite."""
    return JobError(
        f"training has diverged: the pseudo-gradient of fragment {own.fragment} after step {own.step} is NaN, infinite "
        f"or too large on {where}. Lower the (inner) learning rate, clip gradients, or go on from an earlier checkpoint"
    )
