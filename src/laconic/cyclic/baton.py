"""The baton: workers begin their batches one after the other.

[Note: Baton]
Messages alone do not keep workers apart: in its first batch a worker that needs nothing from the others would start at
once, and the activations of all workers would be alive together. So worker i begins a batch only when it has received a
baton from worker i - 1. Worker i - 1 passes the baton after a share of its own batch: `stagger` times 1/N of the time
that the batch takes. On CPU the ops are timed. On CUDA the host does not wait for the device, so the time is unknown.
There, and in the first batch, worker i - 1 passes the baton after `stagger` times 2 of its 2N ops. The baton carries
the size of the batch, which must be equal on all workers. Without stagger a worker passes the baton at once, and waits
for the previous worker's baton only after its first N ops.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from laconic.cyclic.links import Links


class Baton:
    """The baton of worker `number`, one of `count` workers; see [Note: Baton]. One worker alone passes no baton."""

    def __init__(self, links: Links, number: int, count: int, stagger: float) -> None:
        self._links, self._number, self._count, self._stagger = links, number, count, stagger
        self._pass_after = round(2 * stagger)
        self._durations_s: list[float] = []
        self._size = 0
        self.is_passed = True  # whether the next worker may run; until then this worker must not wait for it
        self._wait: Callable[[], int] | None = None

    def begin(self, size: int) -> None:
        """Begin a batch of this many rows."""
        self._size, self.is_passed = size, self._number == self._count - 1
        self._wait = self._links.request_baton() if self._number > 0 else None
        self.after_op(0)

    def before_op(self, done: int) -> None:
        """Wait for the baton if the next op of the batch needs it; `done` ops have run.

        Raises:
            ValueError: the previous worker has a batch of another size.
        """
        if self._wait is not None and done == (0 if self._stagger else self._count):
            previous_size, self._wait = self._wait(), None
            if previous_size != self._size:
                raise ValueError(
                    f"worker {self._number} has a batch of {self._size}, but worker {self._number - 1} one of "
                    f"{previous_size}; gradients are averaged over workers with equal weight, so give all workers "
                    "batches of equal size"
                )

    def after_op(self, done: int) -> None:
        """Pass the baton if enough ops of the batch have run; `done` is their number."""
        if not self.is_passed and done >= self._pass_after:
            self.is_passed = True
            self._links.pass_baton(self._size)

    def end(self, durations_s: Sequence[float]) -> None:
        """End a batch whose ops had these durations; they decide after which op the next batch passes the baton."""
        if not self._stagger:
            return
        previous = self._durations_s or durations_s
        self._durations_s = [(old + new) / 2 for old, new in zip(previous, durations_s, strict=True)]
        self._pass_after = ops_before_baton(self._durations_s, self._stagger, self._count)


def ops_before_baton(durations_s: Sequence[float], stagger: float, count: int) -> int:
    """The ops of a batch after which one of `count` workers passes the baton, if its ops take as long."""
    share_s = stagger * sum(durations_s) / count
    # Count the ops whose middle comes before the share: no other number of ops ends closer to the share.
    middles_s = (end_s - s / 2 for end_s, s in zip(accumulate(durations_s), durations_s, strict=True))
    done = sum(middle_s < share_s for middle_s in middles_s)
    return min(max(done, 1), count + 1)
