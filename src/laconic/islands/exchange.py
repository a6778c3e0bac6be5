"""What an island asks of the others, and how islands that stay answer it.

[Note: An island's life]
An island is outside until it takes part, and begins to train when it has the outer state of a sync that all shards
agree on. One island that has this state, the lead, tells it to those that are new. So much holds for all islands, and
`LocalSteps` knows no more. Where they differ:

| | they stay: here, recovery.py | they come and go: elastic.py |
|---|---|---|
| who is in | the ranks of the job | the roster that the store has |
| who has died | who is not in the job that torchelastic starts | who gives no sign of life after a failed try |
| which state counts | of the newest sync of which every shard is on a machine | after the last round with a verdict |
| who has it | with `recovery`, a folder of each machine | the memory of each island |
| when the others hear it | at the start of the job | as they found the run, or in their first rounds |

[Note: Agreed before anything is sent]
NaN in one island's pseudo-gradient would become NaN on all islands, or end one rank while the others wait for it. So
the ranks of an island first learn whether all of their parts are finite. Each tells the ranks at its place in other
islands before it sends values. All ranks of all islands know the same flags and raise the same error at the same step.

[Note: Weights by tokens]
An island that has trained on twice as many tokens knows twice as much about the direction. So each island tells how
many tokens its pseudo-gradient comes from, beside the flag of the note above, and the mean weighs by them. If all
islands tell the same number, the mean is the plain one, to the bit. Slices are averaged by the number of their holders.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from laconic.codec import Codec
from laconic.comm.cluster import Cluster
from laconic.errors import JobError
from laconic.islands.all_reduce import IslandGroup, Mean, mean_over_islands
from laconic.islands.outer_optimizer import OuterFragment


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
    codec: Codec | None = None
    """The format of the values on the wire, if another than usual."""


class Exchange:
    """What `LocalSteps` asks of the other islands. Here they stay until the job ends: [Note: An island's life]."""

    comes_and_goes = False
    """True if islands come and go while the others train."""

    def __init__(self, cluster: Cluster, codec: Codec, fragments: Sequence[OuterFragment]) -> None:
        """Take this rank's place, the format of values on the wire, and the outer state."""
        self._cluster, self._codec, self._fragments = cluster, codec, fragments
        self.is_inside = False
        """Whether this island takes part: [Note: An island's life]."""
        self.number = self.slot = cluster.island_rank
        """This island's number, and the slot that no other island has; -1 outside, where islands come and go."""
        self._islands = IslandGroup.of(cluster)

    def enter(self, steps: int) -> tuple[int, bool]:
        """Take over the outer state that all islands share. Collective over the ranks of the island.

        This island's state is that after `steps` inner steps. Returns the steps after which it is the shared one, and
        whether it is news: not, such as after a restart of all islands from checkpoints, if this island had it already.
        """
        self._share([fragment.flat for fragment in self._fragments], lead=0)
        return steps, True

    def look(self) -> None:
        """Raise what this island has heard of the others since the last step."""

    def mean(self, own: Contribution) -> Mean:
        """Return the mean of all islands' contributions. Collective over islands, in the background thread.

        Raises: JobError if the values of any island are not finite, or islands differ in their codecs.
        """
        return self._reduce(own, self._islands)

    def _reduce(self, own: Contribution, islands: IslandGroup) -> Mean:
        """The mean over a group of islands; see `mean`."""
        told = islands.gather(int(not own.is_sound) | (own.codec is not None) << 1, own.tokens)
        bad = [str(island) for island, (flags, _) in enumerate(told) if flags & 1]
        if bad:
            raise diverged(own, f"island {', '.join(bad)} (of 0 to {len(told) - 1}), so islands have sent nothing")
        if len({flags for flags, _ in told}) > 1:
            raise JobError(
                f"islands do not agree whether the exchange after step {own.step} is the last of fragment "
                f"{own.fragment}, which has last_codec; give LocalSteps the same total_steps on all of them"
            )
        weights = None if own.divisor is not None else [tokens for _, tokens in told]
        codec, traffic = own.codec or self._codec, self._cluster.traffic
        return mean_over_islands(own.values, islands, codec, traffic, divisor=own.divisor, weights=weights)

    def settle(self) -> bool:
        """Wait until nobody reads the outer state. Returns whether this rank has kept every state so far."""
        return True

    def keep(self, steps: int, fragment: int, *, is_whole: bool) -> None:
        """Keep the state of step `steps`, after a sync of `fragment`, for the start after a crash.

        `is_whole`: all ranks of the island have kept the state before.
        """

    def forget(self) -> None:
        """Note that a checkpoint is about to change the outer state."""

    def leave(self) -> None:
        """Go in order: the others do not wait for this island. Nothing may be in flight."""

    def _create_state(self) -> None:
        """Make the outer optimizer's state, all zero, to fill with what another island or a file has."""
        for fragment in self._fragments:
            fragment.create_state()

    def _vectors(self) -> list[Tensor]:
        """The outer state, in an order that all islands share."""
        return [vector for fragment in self._fragments for vector in fragment.vectors()]

    def _share(self, vectors: Sequence[Tensor], lead: int) -> None:
        """Bring vectors of one island to all others, which all are inside then. Collective over islands."""
        if self._cluster.island_group is not None:
            for vector in vectors:
                dist.broadcast(vector, group=self._cluster.island_group, group_src=lead)
        self.is_inside = True


def diverged(own: Contribution, where: str) -> JobError:
    """The error of an island whose pseudo-gradient is not finite."""
    return JobError(
        f"training has diverged: the pseudo-gradient of fragment {own.fragment} after step {own.step} is NaN, infinite "
        f"or too large on {where}. Lower the (inner) learning rate, clip gradients, or go on from an earlier checkpoint"
    )


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
