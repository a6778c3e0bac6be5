"""The compute and the activations of one stretch of a step.

[Note: Seconds of an operation]
An operation takes as long as its products at the device's rate, or as long as its reads and writes at the memory's
rate, whichever is longer (the roofline model: Williams, Waterman and Patterson, CACM 52(4), 2009), and a fixed time to
launch. Fused attention reaches a share of that rate. Operations of a phase run one after the other, so their times add
up. A phase therefore keeps operations apart by their FLOPs and bytes, as far as that can matter: operations without
products are one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Operations of equal cost: [Note: Seconds of an operation]."""

    dtype: str | None
    """The dtype of the factors of products; None for operations without products."""
    flops: float
    """The FLOPs of one operation: two for each multiplication of a product, which a sum follows."""
    memory_bytes: float
    """The bytes that one operation reads and writes."""
    count: int
    """The number of operations. For those without products, the other figures are means."""
    is_attention: bool = False
    """True if the products are those of fused attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInput:
    """A tensor with which layers are called: hidden states, a mask, positions, rotary angles."""

    nbytes: int
    requires_grad: bool


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
    """One uninterrupted stretch of one unit's forward or backward.

    Activations are all tensors but parameters, buffers, the batch and the gradients that have arrived at parameters:
    saved tensors, temporaries, casts, logits, the loss, and a parameter's gradient until autograd hands it over.
    """

    work: tuple[Operations, ...]
    """The operations. Views take nothing."""
    peak_bytes: int
    """The most bytes of activations alive at once, minus those alive at the start."""
    end_bytes: int
    """The bytes of activations alive at the end, minus those alive at the start."""
    gradient_bytes: int = 0
    """The bytes of all gradients of parameters that autograd handed over. `peak_bytes` has each until then."""
    peak_with_gradients_bytes: int = 0
    """As `peak_bytes`, but the gradients that were handed over in this phase stay."""
    arrivals: tuple[Arrival, ...] = ()
    """The gradients of parameters, in the order in which they come."""

    def seconds(
        self,
        flops_per_s: Mapping[str, float],
        memory_bytes_per_s: float,
        launch_s: float = 0.0,
        attention_share: float = 1.0,
    ) -> float:
        """Return the seconds of the phase on a device: [Note: Seconds of an operation].

        Args:
            flops_per_s: the rate of products by dtype.
            memory_bytes_per_s: the rate of the device's memory, reads and writes together.
            launch_s: the time that every operation takes in addition.
            attention_share: the rate of fused attention, as a share of `flops_per_s`.

        Raises:
            ValueError: a dtype has no rate.
        """
        total = 0.0
        for work in self.work:
            product_s = 0.0
            if work.dtype is not None:
                if work.dtype not in flops_per_s:
                    raise ValueError(
                        f"the model multiplies in {work.dtype}, and flops_per_s has rates for "
                        f"{', '.join(flops_per_s) or 'nothing'} only; add device_flops_per_s.{work.dtype}"
                    )
                rate = flops_per_s[work.dtype] * (attention_share if work.is_attention else 1.0)
                product_s = work.flops / rate
            total += work.count * (max(product_s, work.memory_bytes / memory_bytes_per_s) + launch_s)
        return total
