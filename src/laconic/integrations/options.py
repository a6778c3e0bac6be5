"""The options of laconic inside another trainer, in the manner of transformers' `TrainingArguments`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, get_args, get_origin

from laconic.errors import JobError
from laconic.islands.policies import Membership
from laconic.policy import documented, keys_of, refusing_as, to_keys, with_keys
from laconic.shard.policies import Cache, ShardPolicy

_DEFAULT = ShardPolicy(cache=Cache(where="host"))


class ArgumentError(JobError):
    """An option is wrong, or does not go with another one; the message names it and the remedy."""


def _help(text: str) -> dict[str, str]:
    return {"help": text.replace("%", "%%")}  # argparse fills in values at a percent sign


def _fields() -> Iterator[tuple[str, Any, Any]]:
    """One field for each key of the policies, with the policy's own documentation."""
    defaults = to_keys(_DEFAULT)
    for name, key in keys_of(ShardPolicy).items():
        yield name, _listed(key.hint), dataclasses.field(default=defaults[name], metadata=_help(key.documentation()))


def _listed(hint: Any) -> Any:
    """A hint for argparse, to which several values are a list: `tuple[float, ...] | None` as `list[float] | None`."""
    items = [get_args(part)[0] for part in get_args(hint) if get_origin(part) is tuple]
    return list[items[0]] | None if items else hint  # type: ignore[valid-type]


_Shared: Any = dataclasses.make_dataclass("_Shared", _fields(), kw_only=True)


@dataclasses.dataclass(kw_only=True)
class LaconicArguments(_Shared):
    """How laconic shards the model of a trainer. The defaults train as DDP does, with ZeRO-3 memory.

    Its fields are those of the policies that it describes, [Note: Keys] in policy.py, and some for trainers.
    `transformers.HfArgumentParser` makes command-line options of them. Names and meanings are those of the sections
    `shard` and `sync` of `laconic train`.

    Raises:
        ArgumentError: a value is unknown, negative or does not go with another one.
    """

    broadcast: bool = True
    """Give all ranks the first rank's weights at the start, as DDP does."""
    broadcast_buffers: bool | None = None
    """Give all ranks the first rank's buffers, such as BatchNorm's statistics, as DDP does. Default: what the trainer
    would tell DDP, which is yes unless you say otherwise there."""
    units: list[str] | None = None
    """Class names of the layers to gather one by one. Default: the model's own list (_no_split_modules)."""
    local_steps: int = 0
    """Steps between two syncs of islands that train on their own (DiLoCo). 0: all ranks average gradients in every
    step."""
    islands: int | None = None
    """With local_steps: the number of islands. Default: every node is one."""

    def __post_init__(self) -> None:
        _ = self.policy, self.membership  # refuse what does not go together
        if not isinstance(self.local_steps, int) or self.local_steps < 0:
            raise ArgumentError(f"local_steps={self.local_steps!r} must be an integer of at least 0")
        if self.islands is not None and not self.local_steps:
            raise ArgumentError(f"islands={self.islands} needs local_steps, the steps between two syncs of islands")
        if isinstance(self.units, str) or self.units == []:
            raise ArgumentError(f"units={self.units!r} must be a list of class names, such as ['LlamaDecoderLayer']")

    @staticmethod
    def in_own_words() -> AbstractContextManager[None]:
        """Let a refusal of a policy in the block name options, and be an ArgumentError."""
        return refusing_as(ArgumentError, "", "=")

    @property
    def policy(self) -> ShardPolicy:
        """How the model is sharded, as these options describe it.

        Raises:
            ArgumentError: a value is unknown, negative or does not go with another one.
        """
        with self.in_own_words():
            return with_keys(_DEFAULT, **{name: getattr(self, name) for name in keys_of(ShardPolicy)})

    @property
    def membership(self) -> Membership:
        """The islands that these options describe."""
        with self.in_own_words():
            return Membership(islands=self.islands)

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


for _field in dataclasses.fields(LaconicArguments):
    if not _field.metadata:
        _field.metadata = MappingProxyType(_help(documented(LaconicArguments)[_field.name]))
