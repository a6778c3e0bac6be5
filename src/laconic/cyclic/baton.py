"""The baton: workers begin their batches one after the other.

[Note: Baton]
Messages alone do not keep workers apart: in its first batch a worker that needs nothing from the others would start at
once, and all activations would be alive together. So worker i begins a batch only when it has received a baton from
worker i - 1, which passes it after a share of its own batch: `stagger` times the N-th part of the batch's duration.
Durations are measured on CPU. On CUDA the host does not wait for the device, so durations are unknown; there, and in
the first batch, the share is `stagger` times 2 of the 2N ops. The baton carries the size of the batch, which must be
equal on all workers. Without stagger a worker passes the baton at once, and reads the size only after its first N ops.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from laconic.cyclic.links import Links


class Baton:
    """The baton as worker `number` of `count` sees it; see [Note: Baton]. With a count of 1 it does nothing."""

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
        """Wait for the baton if this op, after `done` others, needs it.

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
        """Pass the baton if enough ops are done."""
        if not self.is_passed and done >= self._pass_after:
            self.is_passed = True
            self._links.pass_baton(self._size)

    def end(self, durations_s: Sequence[float]) -> None:
        """Choose the op after which the next batch's baton is passed, from the durations of this batch's ops."""
        if not self._stagger:
            return
        previous = self._durations_s or durations_s
        self._durations_s = [(old + new) / 2 for old, new in zip(previous, durations_s, strict=True)]
        share_s = self._stagger * sum(self._durations_s) / self._count
        middles_s = (end_s - s / 2 for end_s, s in zip(accumulate(self._durations_s), self._durations_s, strict=True))
        done = sum(middle_s < share_s for middle_s in middles_s)
        self._pass_after = min(max(done, 1), self._count + 1)
