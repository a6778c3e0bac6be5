"""What devices do and tell each other: ops, messages, and the instructions that programs are made of.

[Note: Messages of a batch]
N workers, N stages; s_j is the rule's switch (rule.py).
  gradient     The sum over workers 0..i of stage j's gradients, from i to i + 1, after i's backward.
  total        The sum over all workers; from the last worker to whoever applies it.
  weights      Parameters of a version, along a ring that begins with the stage's owner, worker s_j mod N. Everyone
               hands them on when it takes them into use itself, two steps after the one before.
  rear weights The same for the backward, where parameters are not kept between forward and backward.
  activation, activation gradient   Between stages on different devices.
  square, norm The sum of squares of the totals of stages j..N-1, from each to the one before; and of all stages, to
               everybody. Only where the global norm is asked for.

states        parameters                 optimizer state   total goes to              version reaches others by
replicated    all on every worker        owner             owner                      weights
sharded       owner                      owner             owner                      weights and rear weights, always
shared        one stage per device       every device      every device of the stage  total, in the order of first use
single        one device                 the device        stays                      stays

A run begins with batch 0. Version t of a run has seen the gradients of batches 0..t-1 of the run. Version -1, which
stale workers use in batch 0, is version 0 without the gradient that was waiting when the run began, if one was (a run
resumed from the middle of things); otherwise it is version 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MessageKind = Literal[
    "gradient", "total", "weights", "rear weights", "activation", "activation gradient", "square", "norm"
]


@dataclass(frozen=True, slots=True)
class Op:
    """One stage's forward or backward of one micro-batch."""

    step: int
    worker: int
    """Whose micro-batch it is, 0..N-1; where it runs is `device`."""
    device: int
    stage: int
    batch: int
    is_forward: bool

    @property
    def label(self) -> str:
        """As papers print it, stages from 1: F1, B4."""
        return f"{'F' if self.is_forward else 'B'}{self.stage + 1}"


@dataclass(frozen=True, slots=True)
class Message:
    """What one device sends another, or leaves for itself."""

    kind: MessageKind
    source: int
    target: int
    stage: int
    index: int
    """The version, for weights and rear weights; the batch of the gradient for all others."""
    worker: int
    """Whose micro-batch: of an activation, or the last one in a sum of gradients; of weights, who will use them."""
    step: int
    """It leaves at the beginning of this time step."""
    due: int
    """It is needed at the beginning of this time step."""
    sent_in: int
    """The sender's batch."""
    due_in: int
    """The receiver's batch."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Names its content at the receiver."""
        return self.kind, self.stage, self.index, self.worker


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the op with this version of its stage."""

    op: Op
    version: int


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for the message; then use it, or throw it away."""

    message: Message
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class Send:
    """Let the message go; do not wait."""

    message: Message


@dataclass(frozen=True, slots=True)
class Update:
    """Apply totals until the stage has this version."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Square:
    """Add the squares of the total that was just completed to those of later stages."""

    stage: int
    batch: int


Instruction = Compute | Take | Send | Update | Square


@dataclass(frozen=True)
class Run:
    """What a program must know of the run besides its batch."""

    is_pending: bool = False
    """A gradient of the batch before was waiting when the run began."""
    num_batches: int | None = None
    """Batches with a gradient, known when the run is drained; programs of later batches only pass on what is left."""

    def has_gradient(self, batch: int) -> bool:
        """Whether this batch was, or will be, computed."""
        return batch >= 0 and (self.num_batches is None or batch < self.num_batches)

    def has_version(self, version: int) -> bool:
        """Whether this version differs from the one before, and will exist."""
        first = 0 if self.is_pending else 1
        return version >= first and (self.num_batches is None or version <= self.num_batches)
