"""The policies of `fully_shard`: frozen objects that check themselves. A job description has them without torch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from laconic.layout.granularity import granularity_of, granularity_text
from laconic.policy import Count, Policy, Positive, Size, keys_of, option

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from laconic.codec import Codec

Where = Literal["none", "host", "device", "rank"]
CacheName = Literal[Where, "auto"]
SumsWhere = Literal["node", "rank"]
Until = Literal["change", "backward"]
OnDamage = Literal["raise", "regather"]
DtypeName = Literal["float32", "bfloat16", "float16"]
WireWeights = Literal["exact", "lossless", "bf16", "int8", "int4"]
WireGradients = Literal["exact", "lossless", "bf16", "int8", "int4", "e2m1", "int2"]
WireName = Literal["exact", "8bit", "4bit", "lossless", "lossless-4bit", "lossless-2bit"]


def _shares_of(shares: Any) -> tuple[float, ...] | None:
    """Shares as `ShardPolicy` has them, from a list of numbers.

    Raises:
        ValueError: it is none.
    """
    if shares is None:
        return None
    is_list = isinstance(shares, Sequence) and not isinstance(shares, str)
    if not is_list or not shares or not all(isinstance(each, Real) for each in shares):
        raise ValueError(f"must be a list of numbers, one for each rank of an island, got {shares!r}")
    return tuple(shares)


@dataclass(frozen=True, kw_only=True)
class Placement(Policy):
    """Where one unit's weights and sums of gradients rest between their uses. The words are those of `Cache`.

    Raises:
        ValueError: a word is unknown.
    """

    weights: Where = "none"
    gradients: SumsWhere = "node"


@dataclass(frozen=True, kw_only=True)
class Cache(Policy):
    """The policy that says where a unit's weights stay between its uses, and for how long.

    Raises:
        ValueError: a value is unknown, a number of bytes is negative or given without the value of `where` that it is
            for, or `until` is given without a cache of node shards.
    """

    where: CacheName = option("none", key="cache")
    """Where a node shard (the part of a unit that a rank holds after the gather across nodes) stays between its uses.
    `none` frees it after each use (ZeRO-3). `host` keeps it in pinned host memory, so that weights cross the network
    once (FCDP): 1 / L of the unit per rank, with L local ranks. `device` keeps it in device memory: 1 / L of the unit
    more (hpZ of ZeRO++, HFSDP). `rank` keeps the whole unit on each rank, in the dtype of forward: weights are gathered
    once a step, frozen ones once in a run, and backward gathers nothing. Gradients and the optimizer's states stay cut
    over all ranks (ZeRO-1 and ZeRO-2). `auto` chooses one of these for each unit after the first step, and where its
    gradients wait: those that save most seconds within `device_bytes` and `host_bytes`."""
    until: Until = option("change", key="cache_until")
    """How long a node shard is used. `change`: until its parameters change, so frozen weights cross once in a run, and
    others once in a step of many micro-batches (FCDP-Comm). `backward`: until the end of backward, so all weights cross
    again in every forward, as ZeRO++ (hpZ) and FCDP-Sched are published; no frozen weights rest in the cache."""
    device_budget_bytes: Size = 0
    """Bytes per rank, for `host` only: the last units, which backward uses first, stay on the device up to this."""
    pin_memory: bool = True
    """For `host` only, as in torch's CPUOffloadPolicy: page-lock the cache. Without it copies are several times slower
    and do not overlap with compute; set it to false where a machine lets a process lock little memory (`ulimit -l`)."""
    gradients: SumsWhere = option("node", key="cache_gradients")
    """Where sums of gradients wait between the micro-batches of a step. `node` sums each micro-batch's inside the node,
    and keeps 1 / L of them with L local ranks. `rank` keeps them whole and sums once, in the last micro-batch, as DDP's
    `no_sync` does. Either way they are added up in float32, or in a wider reduce dtype."""
    device_bytes: Size | None = None
    """For `auto` only: the bytes of device memory on each rank that a step may take more than one in which nothing
    rests. Default: those that are free after the first step, but for 1 / 16 of the device's memory."""
    host_bytes: Size | None = None
    """For `auto` only: the same for host memory. Default: those that are free, but for 1 / 16 of the machine's memory,
    divided by the ranks on a node; 0 where the device is the CPU, whose memory is the host's."""

    def _check_keys(self) -> None:
        message = "is for the host cache: it needs {cache='host'} or 'auto', got {cache=}"
        self._check("pin_memory", self.pin_memory or self.where in ("host", "auto"), message)
        for key in ("device_bytes", "host_bytes"):
            message = "limits what {cache='auto'} may take; got {cache=}"
            self._check(key, getattr(self, key) is None or self.where == "auto", message)
        message = "is what {cache='auto'} chooses itself; leave it out"
        self._check("cache_gradients", self.gradients == "node" or self.where != "auto", message)
        message = "needs {cache='host'}, because it moves a part of the host cache to the device; got {cache=}"
        self._check("device_budget_bytes", not self.device_budget_bytes or self.where == "host", message)
        message = "says how long a cache is used, but {cache='none'} keeps nothing; use {cache='host'} or 'device'"
        self._check("cache_until", self.until == "change" or self.where != "none", message)
        message = (
            "lets weights go after backward, but {cache=} keeps them; use {cache='none'} with "
            "{reshard_after_forward=False}, which keeps them from forward to backward"
        )
        self._check("cache_until", self.until == "change" or self.where not in ("rank", "auto"), message)

    @classmethod
    def of(cls, cache: Cache | CacheName) -> Cache:
        """The policy that `fully_shard(cache=)` was given, as an object or as a word."""
        return cache if isinstance(cache, Cache) else cls(where=cache)

    def placement(self, *, keeps_copies: bool) -> Placement:
        """Where a unit rests at first: with "auto", nowhere, unless it `keeps_copies` for differences on the wire."""
        if self.where == "auto":
            return Placement(weights="host" if keeps_copies else "none")
        return Placement(weights=self.where, gradients=self.gradients)

    def node_gathers_per_step(self, *, num_micro_batches: int) -> int:
        """How often a trainable bucket's weights cross the wire per optimizer step (arXiv 2602.06499)."""
        if self.where == "none":
            return 2 * num_micro_batches
        return num_micro_batches if self.until == "backward" else 1


@dataclass(frozen=True, kw_only=True)
class Prefetch(Policy):
    """The policy that says how many units are gathered ahead of the one that computes.

    By default the sizes of the units decide: [Note: Prefetching] in shard/itinerary.py. A list of
    `set_modules_to_forward_prefetch` or `set_modules_to_backward_prefetch` comes before it.

    Raises:
        ValueError: a number is not positive, or both are given.
    """

    units: Count | None = option(None, key="prefetch_units")
    """The number of units that are gathered ahead, whatever their sizes. Default: as many as take no
    more memory than two neighbours."""
    budget_bytes: Count | None = option(None, key="prefetch_bytes")
    """The bytes of gathered weights ahead, on the device of each rank: as many units as fit are gathered, and one at
    least; what is left goes to the node shards of those after them. Default: see prefetch_units."""

    def _check_keys(self) -> None:
        message = "and {prefetch_bytes=} are two limits; give one of them"
        self._check("prefetch_units", self.units is None or self.budget_bytes is None, message)


@dataclass(frozen=True, kw_only=True)
class Wire(Policy):
    """Communication compression: the bits in which weights and gradients cross between nodes.

    Inside a node everything stays exact.

    Gradients also cross between islands that are replicas, which sum them in every step (HSDP). Weights do not. Under
    the cyclic schedule both travel along a ring of workers: [Note: Few bits on the ring] in cyclic/coding.py.

    Two-dimensional and larger parameters that train are coded, in blocks of 128 values. Vectors and, without `frozen`,
    frozen parameters travel as they are, but for lossless gradients, and weights that convert themselves (float8) as
    they do. Sources: SDP4Bit (arXiv 2410.15526), ZeRO++ (arXiv 2306.10209).

    Raises:
        ValueError: a value is unknown, `exact_every` is not positive, or an option has nothing to act on.
    """

    weights: WireWeights = "exact"
    """The codec of weights. "exact" sends weights. The others send differences to the weights in the receivers' caches:
    [Note: Differences] in shard/crossing.py. "lossless" needs gathered weights of 16 bits or fewer, loses nothing, and
    takes about 3 bits a weight at a learning rate of 1e-3, and 1 at 1e-5."""
    gradients: WireGradients = "exact"
    """The codec of gradients, once per optimizer step, after the sums inside the nodes. "lossless" loses nothing, and
    takes some 11 bits of a gradient in bf16 and 27 of one in fp32. Codecs of four bits and fewer rotate them first.
    Sums over islands come back in eight bits, or in bf16 if gradients cross in bf16. int2 is experimental."""
    as_values: bool = False
    """Weights cross as themselves instead of differences, as in ZeRO++: "bf16" or "int8", every time they change.
    Without a cache there is no other way."""
    frozen: bool = False
    """With `as_values`: frozen weights are coded, too, as in ZeRO++. They are rounded for the whole run, so this is for
    frozen weights that cross often."""
    feedback: bool = False
    """Add what the codec lost of a gradient to the next one. It takes N - 1 fp32 shards of device memory with N nodes,
    and less than one more with replicas. Under the cyclic schedule it takes the memory of all gradients."""
    exact_every: Count = 1000
    """Optimizer steps from one exact crossing of the weights to the next."""
    word: WireName | None = field(default=None, init=False, compare=False, repr=False)
    """The word that stood for the policy. What it means may depend on the optimizer: see `for_optimizer`."""

    def _check_keys(self) -> None:
        values = (
            "values need 8 bits or more; use 'int8' or 'bf16', or send differences, with as_values=False and a cache"
        )
        self._check("weights", not self.as_values or self.weights in ("bf16", "int8"), f"with as_values=True: {values}")
        message = "needs as_values=True: the difference between frozen weights and their copy is zero"
        self._check("frozen", not self.frozen or self.as_values, message)
        message = "needs gradients in a codec that loses something, as 'int4'"
        self._check("feedback", not self.feedback or not self.keeps_gradients, message)

    @classmethod
    def of(cls, wire: Wire | WireName | Mapping[str, Any] | None) -> Wire:
        """The policy that `fully_shard(wire=)` or a file was given: an object, a word, or a table of its fields.

        Raises:
            ValueError: the word is unknown, or see `Wire`.
            TypeError: the table has a key that is no field.
        """
        if isinstance(wire, Wire):
            return wire
        if isinstance(wire, Mapping):
            return cls(**wire)
        if wire is not None and wire not in _NAMED:
            raise ValueError(f"wire={wire!r} is not known; use one of {', '.join(_NAMED)}, or a laconic.Wire")
        found = cls(**_NAMED[wire or "exact"])
        object.__setattr__(found, "word", wire)
        return found

    def plain(self) -> str | dict[str, Any] | None:
        """The policy as a file says it: its word, or a table of what is not as by default; None for exact crossings."""
        if self.word is not None or self.is_exact:
            return self.word
        return {name: value for name, key in keys_of(Wire).items() if (value := getattr(self, name)) != key.default}

    def for_optimizer(self, name: str) -> Wire:
        """The policy under an optimizer of this name.

        Muon and Shampoo enlarge small directions of a gradient, and the codec's error with them. So for them a word
        whose gradients have four bits or fewer sends them in eight; a policy that was given as an object or a table is
        followed as it is.
        """
        is_changed = self.word is not None and self.rotates_gradients and name in ("muon", "shampoo")
        return dataclasses.replace(self, gradients="int8") if is_changed else self

    def for_exact_weights(self) -> Wire:
        """The policy of weights that cross no wire, or cross it as they are: that of the gradients alone."""
        return dataclasses.replace(self, weights="exact", as_values=False, frozen=False)

    def warn_of_one_node(self, ranks: str, remedy: str) -> None:
        """Warn that the policy has nothing to act on, because these ranks share a node."""
        warnings.warn(
            f"wire= does nothing here: {ranks} are on one node, where everything stays exact. If they are on several "
            f"nodes, {remedy}",
            stacklevel=4,
        )

    @property
    def is_exact(self) -> bool:
        """True if nothing is coded."""
        return self.weights == self.gradients == "exact"

    @property
    def sends_differences(self) -> bool:
        """True if weights cross as differences, for which a cache must hold the receivers' copies."""
        return self.weights != "exact" and not self.as_values

    @property
    def keeps_weights(self) -> bool:
        """True if gathered weights are those of the shards to the bit."""
        return self.weights in ("exact", "lossless")

    @property
    def keeps_gradients(self) -> bool:
        """True if sums are those of the gradients of all nodes to the bit."""
        return self.gradients in ("exact", "lossless")

    @property
    def weight_codec(self) -> Codec | None:
        """The codec of weights; None if nothing of them is lost."""
        return _codec(self.weights)

    @property
    def gradient_codec(self) -> Codec | None:
        """The codec of gradients; None if nothing of them is lost."""
        return _codec(self.gradients)

    @property
    def rotates_gradients(self) -> bool:
        """True if gradients are rotated before they are coded."""
        return self.gradients in ("int4", "e2m1", "int2")


def _codec(name: str) -> Codec | None:
    from laconic.codec import CODECS

    return CODECS.get(name)


_NAMED: dict[str, dict[str, Any]] = {
    "exact": {},
    "8bit": {"weights": "int8", "gradients": "int8"},
    "4bit": {"weights": "int4", "gradients": "int4"},
    "lossless": {"weights": "lossless", "gradients": "lossless"},
    "lossless-4bit": {"weights": "lossless", "gradients": "int4"},
    "lossless-2bit": {"weights": "lossless", "gradients": "int2"},
}


@dataclass(frozen=True, kw_only=True)
class Checks(Policy):
    """The policy against silent data corruption: how often a unit compares checksums, and what follows from damage.

    Raises:
        ValueError: `interval` is negative, or `on_damage` is unknown or given without an interval.
    """

    interval: Size = option(100, key="check_every")
    """Optimizer steps from one step that compares checksums of weights and gradients that cross, and of cached weights,
    on all ranks, to the next; the first step is checked, too. A forward without gradients is a step of its own. 0: no
    checksums. 100 costs less than 1 % of a step."""
    on_damage: OnDamage = "raise"
    """For a node shard that was damaged while it rested in a cache. `raise` ends training with a `CorruptionError` at
    the end of the step, before the optimizer's. `regather` warns, and gathers the unit again before it is used. Other
    damage always raises."""
    unnoticed_edits: bool = False
    """Look in every forward and every backward for weights that have changed without notice, as through
    `to_local().data` or a raw pointer. For finding mistakes: it takes a pass over the shard and a message each time."""

    def _check_keys(self) -> None:
        message = "is for steps that are checked; set {check_every} too"
        self._check("on_damage", self.on_damage == "raise" or self.interval > 0, message)


@dataclass(frozen=True, kw_only=True)
class Audits(Policy):
    """How often a trainer lets ranks repeat each other's work: `laconic.audit`.

    Raises:
        ValueError: `interval` is negative.
    """

    interval: Size = option(0, key="audit_every")
    """In a trainer: steps between two in which each rank repeats its neighbour's first micro-batch, and both compare
    their gradients to the bit; the first step is one. 0: never. It takes two more forwards and backwards in such a
    step."""

    def check_ranks(self, ranks_per_island: int) -> None:
        """Refuse audits where no two ranks share a model.

        Raises:
            ValueError: an island has one rank.
        """
        message = "compares ranks that share a model, but each island has one rank; leave it out, or use fewer islands"
        self._check("audit_every", not self.interval or ranks_per_island > 1, message)


@dataclass(frozen=True, kw_only=True)
class Precision(Policy):
    """The names of the types that torch's `MixedPrecisionPolicy` takes, for a file or an option."""

    param_dtype: DtypeName | None = None
    """The type of parameters in forward, in backward and on the wire. Default: that of the trainer's own mixed
    precision, or else the model's own."""
    reduce_dtype: DtypeName | None = None
    """The type of gradients when they are reduced. Default: float32 with a trainer's own mixed precision, or else
    param_dtype, on every release of torch."""

    def mp_policy(
        self, *, autocast: torch.dtype | None = None, model_dtype: torch.dtype | None = None
    ) -> MixedPrecisionPolicy:
        """The policy that `fully_shard` takes.

        Args:
            autocast: the type of a trainer's own mixed precision (`bf16=True`, `precision="bf16-mixed"`). It is
                `param_dtype` where that is not given; gradients are then reduced in float32.
            model_dtype: the type of the model's parameters, in which gradients are reduced if nothing else says.
        """
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        param_dtype = getattr(torch, self.param_dtype) if self.param_dtype else autocast
        reduce_dtype = getattr(torch, self.reduce_dtype) if self.reduce_dtype else None
        if reduce_dtype is None:
            reduce_dtype = torch.float32 if autocast is not None else param_dtype or model_dtype
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


@dataclass(frozen=True, kw_only=True)
class ShardPolicy(Policy):
    """How a whole model is sharded. Job descriptions, trainers' options and the planner contain it: [Note: Keys].

    Raises:
        ValueError: policies do not go together.
    """

    cache: Cache = option(Cache(), of=Cache.of)
    wire: Wire = option(Wire(), of=Wire.of, plain=Wire.plain, hint=dict[str, Any] | str | None)
    """The bits in which weights and gradients cross between nodes: "exact"; "8bit" or "4bit", which round both;
    "lossless", which sends weights of bf16 in some 3 bits and gradients in 11, without loss; "lossless-4bit" or
    "lossless-2bit", which round gradients alone. All but "exact" need a cache. Or a table with the fields of
    `laconic.Wire`, such as { weights = "exact", gradients = "int4" }. With Muon and Shampoo the words for four and two
    bits send gradients in eight. Default: exact."""
    precision: Precision = Precision()
    reshard_after_forward: bool | None = None
    """Free gathered parameters after forward and gather them again in backward. Default: yes, the root too."""
    prefetch: Prefetch = Prefetch()
    offload: bool = False
    """Parameters, gradients and the optimizer's states rest in host memory, where the optimizer steps; each shard is
    copied to the device before its gather, as under torch's `CPUOffloadPolicy`."""
    checks: Checks = Checks(interval=0)
    audits: Audits = Audits()
    shares: tuple[Positive, ...] | None = option(None, of=_shares_of)
    """The memory of each rank, such as [24, 24, 12, 12] GB, in the order of ranks within an island. Only the ratio
    counts. Each rank then holds as large a part of parameters, gradients and the optimizer's states. Activations and
    gathered weights take as much on all ranks. Default: equal parts."""
    granularity: Any = option(None, of=granularity_of, plain=granularity_text, hint=dict[str, Any] | str | None)
    """The blocks that are never cut: "32 rows", "256 elements" or "whole" for every parameter. Or a table from patterns
    of a parameter's name in its layer, such as "self_attn.*", to blocks: the first pattern that matches counts, and
    cuts of other parameters fall between rows. Python also takes what `fully_shard` takes. Default: as the optimizer
    needs, 32 rows for `adamw8bit`, or 256 elements in flat blocks; else one row."""

    def _check_keys(self) -> None:
        message = (
            "sends differences to the copies that a cache keeps, but {cache='none'} keeps none; use {cache='host'} or "
            "'device', or Wire(weights='int8', as_values=True, ...), or weights='exact'"
        )
        self._check("wire", not self.wire.sends_differences or self.cache.where != "none", message)
        message = (
            "sends differences to the copies that a cache keeps, but {cache_until='backward'} keeps none until the "
            "next step; leave {cache_until} out, or use Wire(weights='int8', as_values=True, ...), or weights='exact'"
        )
        self._check("wire", not self.wire.sends_differences or self.cache.until == "change", message)
        message = (
            "sends patterns of 16 bits or fewer, but {param_dtype='float32'} gathers 32, of which most change in every "
            "step; use {param_dtype='bfloat16'}, or weights='exact' or 'int4'"
        )
        is_wide = self.wire.weights == "lossless" and self.precision.param_dtype == "float32"
        self._check("wire", not is_wide, message)
        message = "cannot feed errors back with {param_dtype='float16'}, whose loss scale changes; leave it out"
        self._check("wire", not self.wire.feedback or self.precision.param_dtype != "float16", message)
        message = "frees weights after forward, but {cache='rank'} keeps them; leave it out, or use {cache='none'}"
        frees = self.reshard_after_forward is True
        self._check("reshard_after_forward", not frees or self.cache.where != "rank", message)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `laconic.fully_shard` that it decides, without `mp_policy`, for every unit and the root."""
        may_stay = self.cache.where in ("rank", "auto")  # whole on the rank, or in the root while its units run
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {
            "cache": self.cache,
            "shares": self.shares,
            "wire": self.wire,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.cache.pin_memory) if self.offload else None,
            "checks": self.checks,
            "prefetch": self.prefetch,
            "granularity": self.granularity,
            "reshard_after_forward": self.reshard_after_forward
            if may_stay
            else self.reshard_after_forward is not False,
        }
