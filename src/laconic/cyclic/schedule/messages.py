"""The ops, messages and instructions of a device's program.

[Note: Messages of a batch]
There are N workers and N stages; s_j is the switch of stage j under the rule (rule.py). A batch sends these messages:

  gradient      The gradient of stage j, summed over workers 0..i. Worker i sends it to worker i + 1 after its backward.
  total         The sum over all workers. The last worker sends it to the devices that step the stage's optimizer.
  weights       One version of a stage's parameters. It travels along a ring of workers, from the stage's owner, worker
                s_j mod N. Each worker uses it two time steps after the previous worker, and sends it on before its
                forward or after it: [Note: One message at a time] in program.py.
  rear weights  The same version once more for the backward, if workers do not keep parameters after the forward.
  activation, activation gradient
                The output of a stage, and the gradient of its input, between stages on different devices.
  square        The sum of squares of the totals of stages j..N-1. It travels from the last stage to the first.
  norm          The sum of squares over all stages, for every device. Square and norm are sent if updates need the norm.

states        parameters                 optimizer state   total goes to              other devices get a version by
replicated    all stages, every worker   owner             owner                      weights
sharded       owner                      owner             owner                      weights and rear weights
shared        one stage per device       every device      every device of the stage  applying the total themselves
single        one device                 that device       that device                -

A run begins with batch 0. Version t of a stage contains the gradients of batches 0..t-1 of the run. Stale workers use
version t - 1 in batch t, hence version -1 in batch 0. If the run was resumed while a gradient waited to be applied,
version -1 lacks that gradient and version 0 contains it. In every other run the two versions are equal.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

MessageKind = Literal[
    "gradient", "total", "weights", "rear weights", "activation", "activation gradient", "square", "norm"
]
Key = tuple[str, int, int, int]
"""The kind, stage, index and worker of a message, which name its content at the receiver."""


@dataclass(frozen=True, slots=True)
class Op:
    """The forward or the backward of one stage on one micro-batch."""

    step: int
    worker: int
    """The worker whose micro-batch the op computes, 0..N-1. The number of the `device` may be another."""
    device: int
    stage: int
    batch: int
    is_forward: bool

    @property
    def label(self) -> str:
        """The name of the op in papers, which count stages from 1: F1, B4."""
        return f"{'F' if self.is_forward else 'B'}{self.stage + 1}"


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer from one device to another, or a value that a device keeps for itself if both are the same."""

    kind: MessageKind
    source: int
    target: int
    stage: int
    index: int
    """The version, for weights and rear weights. The batch of the gradient, for all other kinds."""
    worker: int
    """The worker whose activation is sent, the last worker of a sum of gradients, or the worker that uses weights."""
    step: int
    """The time step at whose beginning the message leaves."""
    due: int
    """The time step at whose beginning the receiver needs it."""
    sent_in: int
    """The sender's batch when it sends."""
    due_in: int
    """The receiver's batch when it needs the message."""

    @property
    def key(self) -> Key:
        """The name of the content at the receiver."""
        return self.kind, self.stage, self.index, self.worker

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage} between devices {self.source} and {self.target}"


class Compute(NamedTuple):
    """Run the op with this version of its stage."""

    op: Op
    version: int


class Receive(NamedTuple):
    """Wait for the message; then use it, or throw it away if it is not needed."""

    message: Message
    is_needed: bool = True


class Send(NamedTuple):
    """Start to send the message, without waiting for the receiver."""

    message: Message


class Update(NamedTuple):
    """Apply the total of batch `version - 1` to the stage, unless the stage has this version already."""

    stage: int
    version: int


class Square(NamedTuple):
    """Add the squares of this stage's total, which is now complete, to the squares of later stages."""

    stage: int


Instruction = Compute | Receive | Send | Update | Square


@dataclass(frozen=True)
class Run:
    """The facts about a run on which its programs depend."""

    is_pending: bool = False
    """Whether a gradient waited to be applied when the run began."""
    num_batches: int | None = None
    """The number of batches, known once the run is drained. Programs of later batches only pass messages on."""

    def has_gradient(self, batch: int) -> bool:
        """Whether the run computes this batch."""
        return batch >= 0 and (self.num_batches is None or batch < self.num_batches)

    def has_version(self, version: int) -> bool:
        """Whether the run makes this version, and it differs from the version before."""
        first = 0 if self.is_pending else 1
        return version >= first and (self.num_batches is None or version <= self.num_batches)
