"""The policies of `fully_shard`: frozen objects that check themselves. A job description has them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from laconic.codec import Codec

Where = Literal["none", "host", "device"]
OnDamage = Literal["raise", "regather"]
WireWeights = Literal["exact", "bf16", "int8", "int4", "int3"]
WireGradients = Literal["exact", "bf16", "int8", "int4", "int3", "e2m1", "int2"]
WireName = Literal["exact", "8bit", "4bit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """The policy that says where a unit's node shard stays between its uses.

    Raises:
        ValueError: `where` is unknown, or `device_budget_bytes` is negative or given without `where="host"`.
    """

    where: Where = "none"
    """`none` frees the node shard after each use (ZeRO-3). `host` keeps it in pinned host memory (FCDP): 1 / L of the
    unit per rank, with L local ranks. `device` keeps it in device memory: 1 / L of the unit more (ZeRO++ hpZ)."""
    device_budget_bytes: int = 0
    """Bytes per rank, for `host` only: the last units, which backward uses first, stay on the device up to this."""

    def __post_init__(self) -> None:
        if self.where not in get_args(Where):
            raise ValueError(f"cache={self.where!r} is not known; use one of {', '.join(map(repr, get_args(Where)))}")
        if self.device_budget_bytes < 0:
            raise ValueError(f"device_budget_bytes={self.device_budget_bytes} must not be negative")
        if self.device_budget_bytes and self.where != "host":
            raise ValueError(
                f"device_budget_bytes={self.device_budget_bytes} needs cache='host', because it moves a part of the "
                f"host cache to the device; got cache={self.where!r}"
            )

    @classmethod
    def of(cls, cache: Cache | Where) -> Cache:
        """The policy that `fully_shard(cache=)` was given, as an object or as a word."""
        return cache if isinstance(cache, Cache) else cls(where=cache)

    def node_gathers_per_step(self, *, num_micro_batches: int) -> int:
        """How often a trainable bucket's weights cross the wire per optimizer step (arXiv 2602.06499)."""
        return 2 * num_micro_batches if self.where == "none" else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """The bits in which weights and gradients cross between nodes. Inside a node everything stays exact.

    Gradients also cross between islands that are replicas, which sum them in every step (HSDP). Weights do not.

    Two-dimensional and larger parameters that train are coded, in blocks of 128 values. Vectors, frozen parameters and
    parameters that convert themselves (float8) travel as they are. Sources: SDP4Bit (arXiv 2410.15526), ZeRO++
    (arXiv 2306.10209).

    Raises:
        ValueError: a value is unknown, `exact_every` is not positive, or an option has nothing to act on.
    """

    weights: WireWeights = "exact"
    """The codec of weights. "exact" sends weights. The others send differences to the weights in the receivers' caches:
    [Note: Differences] in shard/difference.py. int3 is experimental."""
    gradients: WireGradients = "exact"
    """The codec of gradients, once per optimizer step, after the sums inside the nodes. Codecs of four bits and fewer
    rotate them first. Sums over islands come back in eight bits, or in bf16 if gradients cross in bf16. int3 and int2
    are experimental; int2 wants `feedback`."""
    as_values: bool = False
    """Weights cross as themselves instead of differences, as in ZeRO++: "bf16" or "int8", every time they change.
    Without a cache there is no other way."""
    feedback: bool = False
    """Add what the codec lost of a gradient to the next one. It takes N - 1 fp32 shards of device memory with N nodes,
    and less than one more with replicas."""
    exact_every: int = 1000
    """Optimizer steps from one exact crossing of the weights to the next."""

    def __post_init__(self) -> None:
        for name, value, kind in (("weights", self.weights, WireWeights), ("gradients", self.gradients, WireGradients)):
            if value not in get_args(kind):
                raise ValueError(f"Wire({name}={value!r}) is not known; use one of {', '.join(get_args(kind))}")
        if self.exact_every < 1:
            raise ValueError(f"Wire(exact_every={self.exact_every}) must be positive")
        if self.as_values and self.weights not in ("bf16", "int8"):
            raise ValueError(
                f"Wire(weights={self.weights!r}, as_values=True): values need 8 bits or more; use 'int8' or 'bf16', or "
                "send differences, with as_values=False and a cache"
            )
        if self.feedback and self.gradients == "exact":
            raise ValueError("Wire(feedback=True) needs gradients other than 'exact', which lose nothing")

    @classmethod
    def of(cls, wire: Wire | WireName) -> Wire:
        """The policy that `fully_shard(wire=)` was given, as an object or as a word.

        Raises:
            ValueError: the word is unknown.
        """
        if isinstance(wire, Wire):
            return wire
        if wire not in get_args(WireName):
            raise ValueError(
                f"wire={wire!r} is not known; use one of {', '.join(get_args(WireName))}, or a laconic.Wire"
            )
        return _NAMED[wire]

    @property
    def is_exact(self) -> bool:
        """True if nothing is coded."""
        return self.weights == self.gradients == "exact"

    @property
    def sends_differences(self) -> bool:
        """True if weights cross as differences, for which a cache must hold the receivers' copies."""
        return self.weights != "exact" and not self.as_values

    @property
    def weight_codec(self) -> Codec | None:
        """The codec of weights; None if they are exact."""
        return _codec(self.weights)

    @property
    def gradient_codec(self) -> Codec | None:
        """The codec of gradients; None if they are exact."""
        return _codec(self.gradients)

    @property
    def rotates_gradients(self) -> bool:
        """True if gradients are rotated before they are coded."""
        return self.gradients in ("int4", "int3", "e2m1", "int2")


def _codec(name: str) -> Codec | None:
    from laconic.codec import CODECS

    return CODECS.get(name)


_NAMED: dict[str, Wire] = {
    "exact": Wire(),
    "8bit": Wire(weights="int8", gradients="int8"),
    "4bit": Wire(weights="int4", gradients="int4"),
}

ZERO_PLUS_PLUS = Wire(weights="int8", as_values=True, gradients="int4")
"""The crossings of ZeRO++ (arXiv 2306.10209), for comparisons: qwZ and qgZ, in blocks of 128. DeepSpeed's groups are
larger, and it codes gradients inside the node, too. So these losses flatter it; the bytes between nodes are its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """The policy that says how often a unit compares checksums between ranks, and what follows from damage.

    Raises:
        ValueError: `interval` is negative, or `on_damage` is unknown.
    """

    interval: int = 100
    """Optimizer steps from one step that is checked to the next; the first step is checked, too. A forward without
    gradients is a step of its own. 0 for no checksums."""
    on_damage: OnDamage = "raise"
    """For a node shard that was damaged while it rested in a cache. `raise` ends training with a `CorruptionError` at
    the end of the step. `regather` warns, and gathers the unit again before it is used. Other damage always raises."""
    unnoticed_edits: bool = False
    """Look in every forward and every backward for weights that have changed without notice, as through
    `to_local().data` or a raw pointer. For finding mistakes: it takes a pass over the shard and a message each time."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"Checks(interval={self.interval}) must be a number of steps, or 0 for no checksums")
        if self.on_damage not in get_args(OnDamage):
            words = ", ".join(map(repr, get_args(OnDamage)))
            raise ValueError(f"Checks(on_damage={self.on_damage!r}) is not known; use one of {words}")
