"""Single flipped bits: on the wire, in gathered weights that are in use, and in gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.collectives import Communicator
from laconic.comm.journal import Ticket
from laconic.comm.messages import HostExchange
from laconic.comm.traffic import Level, Purpose
from laconic.shard.bucket import Bucket
from laconic.shard.buffer import Buffer
from laconic.shard.gather import UnitGather
from laconic.shard.reduce import BucketGradients

VICTIM = 1
"""The rank on which weights and gradients are damaged."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit of what arrives at a rank from another one."""

    rank: int
    purpose: Purpose
    level: Level
    bit: int
    """The bit within a word of four bytes."""
    seed: int = 0
    """Chooses the sender and the word."""


def flip_bit(tensor: Tensor, *, bit: int, seed: int) -> None:
    """Flip a bit of some word of four bytes of a contiguous tensor."""
    memory = tensor.detach().view(-1).view(torch.uint8)
    word = seed * 7919 % max(1, len(memory) // 4)
    place = min(4 * word + bit // 8, len(memory) - 1)
    memory[place] ^= 1 << bit % 8


@contextmanager
def _replaced(rank: int, owner: type, name: str, damaged: Any) -> Iterator[None]:
    """Let one rank call `damaged` with the real method before its arguments.

    Ranks in one process share their functions, so only that rank replaces one, and the others call the real one.
    """
    real = getattr(owner, name)

    def method(*arguments: Any, **options: Any) -> Any:
        return (damaged if dist.get_rank() == rank else _plainly)(real, *arguments, **options)

    if dist.is_initialized() and dist.get_rank() != rank:
        yield
    else:
        with mock.patch.object(owner, name, method):
            yield


def _plainly(real: Any, *arguments: Any, **options: Any) -> Any:
    return real(*arguments, **options)


class _Damaging:
    """Messages of which one bit arrives wrong."""

    def __init__(self, exchange: HostExchange, landing: Tensor, flip: Flip) -> None:
        self._exchange, self._landing, self._flip = exchange, landing, flip

    def wait(self) -> None:
        """Wait, and flip the bit."""
        self._exchange.wait()
        flip_bit(self._landing, bit=self._flip.bit, seed=self._flip.seed)


def flipping(flip: Flip) -> AbstractContextManager[None]:
    """Damage one transfer to one rank. The transfers are those that laconic sends on Gloo."""
    has_flipped = False

    def damaged(
        begin: Any, self: Communicator, group: Any, ticket: Ticket, landings: Any, *more: Any, **options: Any
    ) -> Any:
        nonlocal has_flipped
        exchange = begin(self, group, ticket, landings, *more, **options)
        if has_flipped or (ticket.label[0], self.level) != (flip.purpose, flip.level):
            return exchange
        has_flipped = True
        return _Damaging(exchange, landings[self._peers[flip.seed % len(self._peers)]], flip)

    return _replaced(flip.rank, Communicator, "_exchange", damaged)


def flipping_in_use(number: int, *, bit: int, seed: int) -> AbstractContextManager[None]:
    """Damage gathered weights on one rank, just after the engine's `number`-th look at them."""
    count = itertools.count()

    def damaged(show: Any, self: UnitGather) -> None:
        show(self)
        if next(count) == number:
            bucket = self.buckets[0]
            _flip_in_slot(bucket, bucket.full.allocate(), bit=bit, seed=seed)

    return _replaced(VICTIM, UnitGather, "show_begun", damaged)


def flipping_in_gradients(number: int, *, bit: int, seed: int) -> AbstractContextManager[None]:
    """Damage the `number`-th bucket of gradients on one rank before they are summed."""
    count = itertools.count()

    def damaged(take: Any, self: BucketGradients) -> Buffer:
        full: Buffer = take(self)
        if next(count) == number:
            _flip_in_slot(self.bucket, full.memory, bit=bit, seed=seed)
        return full

    return _replaced(VICTIM, BucketGradients, "take_unreduced", damaged)


def _flip_in_slot(bucket: Bucket, full: Tensor, *, bit: int, seed: int) -> None:
    slot = bucket.layout.slots[seed % len(bucket.layout.slots)]
    flip_bit(full[slot.offset : slot.offset + slot.numel], bit=bit, seed=seed)
