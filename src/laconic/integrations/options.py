"""The options of laconic inside another trainer, in the manner of transformers' `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.errors import JobError
from laconic.layout.granularity import Block, Granularity, block_of
from laconic.shard.policies import Cache, Checks, OnDamage, Wire, WireName

DtypeName = Literal["float32", "bfloat16", "float16"]


class ArgumentError(JobError):
    """An option is wrong, or does not go with another one; the message names it and the remedy."""


@dataclass(kw_only=True)
class LaconicArguments:
    """How laconic shards the model of a trainer. The defaults train as DDP does, with ZeRO-3 memory.

    `transformers.HfArgumentParser` makes command-line options of the fields. Names and meanings are those of the
    sections `shard` and `sync` of `laconic train`.

    Raises:
        ArgumentError: a value is unknown, negative or does not go with another one.
    """

    cache: Literal["none", "host", "device"] = field(
        default="host",
        metadata={
            "help": "Where gathered weights rest between forward and backward, so that they cross the network once: "
            "in pinned host memory, on the device, or nowhere (ZeRO-3)."
        },
    )
    wire: Any | str | None = field(
        default=None,
        metadata={
            "help": "The bits in which weights and gradients cross between nodes: 'exact', '8bit' or '4bit'. In Python "
            "also a laconic.Wire. Default: exact."
        },
    )
    device_budget_bytes: int = field(
        default=0,
        metadata={
            "help": "With cache='host': the last layers' weights stay on the device up to this many bytes per rank."
        },
    )
    # Any on the left: HfArgumentParser takes the second alternative as the type of the text.
    granularity: Any | str | None = field(
        default=None,
        metadata={
            "help": "The blocks of parameters that are never cut: '32 rows', '256 elements' or 'whole'. In Python also "
            "a laconic block, a mapping of name patterns to these, or a function as fully_shard takes it. "
            "Default: one row."
        },
    )
    reshard_after_forward: bool | None = field(
        default=None,
        metadata={"help": "Free gathered weights after forward and gather them again in backward. Default: yes."},
    )
    param_dtype: DtypeName | None = field(
        default=None,
        metadata={
            "help": "The type of weights in forward, in backward and on the wire. Default: that of the trainer's bf16 "
            "or fp16, or else the model's own."
        },
    )
    reduce_dtype: DtypeName | None = field(
        default=None,
        metadata={
            "help": "The type of gradients on the wire. Default: float32 with bf16 or fp16, or else param_dtype."
        },
    )
    broadcast: bool = field(
        default=True,
        metadata={"help": "Give all ranks the first rank's weights at the start, as DDP does."},
    )
    broadcast_buffers: bool | None = field(
        default=None,
        metadata={
            "help": "Give all ranks the first rank's buffers, such as BatchNorm's statistics, as DDP does. Default: "
            "what the trainer would tell DDP, which is yes unless you say otherwise there."
        },
    )
    check_every: int = field(
        default=0,
        metadata={
            "help": "Steps between two that compare checksums of weights and gradients between ranks. 0: never. A "
            "flipped bit ends the run before the optimizer's step."
        },
    )
    on_damage: Literal["raise", "regather"] = field(
        default="raise",
        metadata={"help": "With check_every: end the run if cached weights are damaged, or gather them again."},
    )
    audit_every: int = field(
        default=0,
        metadata={
            "help": "In a Trainer: steps between two in which every rank repeats its neighbour's micro-batch and "
            "compares gradients to the bit; the first step is one. 0: never."
        },
    )
    units: list[str] | None = field(
        default=None,
        metadata={
            "help": "Class names of the layers to gather one by one. Default: the model's own list (_no_split_modules)."
        },
    )
    local_steps: int = field(
        default=0,
        metadata={
            "help": "Steps between two syncs of islands that train on their own (DiLoCo). 0: all ranks average "
            "gradients in every step."
        },
    )
    islands: int | None = field(
        default=None,
        metadata={"help": "With local_steps: the number of islands. Default: every node is one."},
    )

    def __post_init__(self) -> None:
        _check_choice("cache", self.cache, ("none", "host", "device"))
        if not isinstance(self.wire, Wire):
            _check_choice("wire", self.wire, (None, *get_args(WireName)))
        if self.wire_policy().sends_differences and self.cache == "none":
            raise ArgumentError(f"wire={self.wire!r} sends differences to cached weights; use cache='host' or 'device'")
        for key in ("param_dtype", "reduce_dtype"):
            _check_choice(key, getattr(self, key), (None, *get_args(DtypeName)))
        _check_choice("on_damage", self.on_damage, get_args(OnDamage))
        if self.on_damage != "raise" and not self.check_every:
            raise ArgumentError(f"on_damage={self.on_damage!r} needs check_every, the steps between two checks")
        limits = {"device_budget_bytes": 0, "check_every": 0, "audit_every": 0, "local_steps": 0, "islands": 1}
        for key, least in limits.items():
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ArgumentError(f"{key}={value!r} must be an integer of at least {least}")
        if self.device_budget_bytes and self.cache != "host":
            raise ArgumentError(
                f"device_budget_bytes={self.device_budget_bytes} moves a part of the host cache to the device, so it "
                f"needs cache='host', got {self.cache!r}"
            )
        if self.islands is not None and not self.local_steps:
            raise ArgumentError(f"islands={self.islands} needs local_steps, the steps between two syncs of islands")
        if isinstance(self.units, str) or self.units == []:
            raise ArgumentError(f"units={self.units!r} must be a list of class names, such as ['LlamaDecoderLayer']")
        self.blocks()  # refuses a wrong text

    def blocks(self) -> Granularity | None:
        """Return `granularity` as `fully_shard` takes it.

        Raises:
            ArgumentError: a text is no block.
        """
        given = self.granularity
        if isinstance(given, Mapping):
            return {pattern: _block(text) for pattern, text in given.items()}
        return given if given is None or callable(given) else _block(given)

    def wire_policy(self) -> Wire:
        """Return the policy that `wire` describes."""
        return Wire.of(cast("Wire | WireName", self.wire or "exact"))

    def cache_policy(self) -> Cache:
        """Return the policy that `cache` and `device_budget_bytes` describe."""
        return Cache(where=self.cache, device_budget_bytes=self.device_budget_bytes)

    def checks(self) -> Checks:
        """Return the policy that `check_every` and `on_damage` describe."""
        return Checks(interval=self.check_every, on_damage=self.on_damage)

    def refuse_trainers_own(self, place: str) -> None:
        """Refuse the options that need a Trainer's loop. `place` says whose loop it is instead.

        Raises:
            ArgumentError: `local_steps` or `audit_every` is set.
        """
        if self.local_steps:
            raise ArgumentError(
                f"local_steps={self.local_steps}: {place} averages gradients in every step; use laconic.fully_shard "
                "and laconic.LocalSteps in a loop of your own, or `laconic train`"
            )
        if self.audit_every:
            raise ArgumentError(
                f"audit_every={self.audit_every}: {place} calls no audit; leave it out, and call laconic.audit(model, "
                "batch, loss_fn) between two steps"
            )

    def mixed_precision(self, trainer_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
        """Return the policy of `param_dtype` and `reduce_dtype`.

        Args:
            trainer_dtype: the type of the trainer's own mixed precision (`bf16=True`, `precision="bf16-mixed"`), or
                None without. It is `param_dtype` where that is not given; gradients are then reduced in float32.
        """
        param_dtype = getattr(torch, self.param_dtype) if self.param_dtype else trainer_dtype
        reduce_dtype = getattr(torch, self.reduce_dtype) if self.reduce_dtype else None
        if reduce_dtype is None and trainer_dtype is not None:
            reduce_dtype = torch.float32
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype or param_dtype)


def _check_choice(key: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{key}={value!r} is not known; use one of {', '.join(map(repr, choices))}")


def _block(given: Any) -> Block:
    """Return the block that "32 rows", "256 elements" or "whole" describes; a block stays as it is."""
    if isinstance(given, Block):
        return given
    try:
        return block_of(given)
    except ValueError as error:
        raise ArgumentError(f"granularity: {error}") from None
