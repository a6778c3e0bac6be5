"""The work of operations, and the compute and the activations of one stretch of a step.

[Note: Seconds of an operation]
An operation takes as long as its products at the device's rate, or as long as its reads and writes at the memory's
rate, whichever is longer (the roofline model: Williams, Waterman and Patterson, CACM 52(4), 2009), and a fixed time to
launch. Fused attention reaches a share of that rate. Operations of a phase run one after the other, so their times add
up. A phase therefore keeps operations apart by their FLOPs and bytes, as far as that can matter: operations without
products are one sum.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpWork:
    """Operations of equal cost, on the device or on the host: [Note: Seconds of an operation]."""

    nbytes: float
    """The bytes that all of them read and write."""
    on_host: bool = False
    flops: float = 0.0
    """The FLOPs of all their products: two for each multiplication of a product, which a sum follows."""
    dtype: str | None = None
    """The dtype of the factors of products; None without products."""
    count: float = 1.0
    """The number of operations."""
    is_attention: bool = False
    """True if the products are those of fused attention."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The moment at which autograd has the gradient of a parameter, and whoever waits for it may take memory for it."""

    name: str
    """The parameter's name in its unit."""
    at_bytes: int
    """The activations alive then, minus those alive at the start of the phase. A gradient of autograd's is one."""
    after_bytes: int
    """The most from then on until the next gradient. Without this gradient, of which its taker knows."""
    is_in_place: bool = False
    """Whether a linear layer offers to add it to whoever takes it. The weight of a tied head comes so, and once more as
    the embedding's."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One uninterrupted stretch of one unit's forward or backward, in a step.

    Activations are all tensors but parameters, buffers, the batch and the gradients that have arrived at parameters:
    saved tensors, temporaries, casts, logits, the loss, and a parameter's gradient until autograd hands it over.
    """

    unit: int
    is_backward: bool
    work: tuple[OpWork, ...]
    """The operations. Views take nothing."""
    peak_bytes: int
    """The most bytes of activations alive at once, minus those alive at the start."""
    end_bytes: int
    """The bytes of activations alive at the end, minus those alive at the start."""
    arrivals: tuple[Arrival, ...] = ()
    """The gradients of parameters, in the order in which they come. `peak_bytes` has each until then."""
