"""Single flipped bits: on the wire, in gathered weights that are in use, and in gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.collectives import Communicator, Pending
from laconic.comm.traffic import Level, Purpose
from laconic.shard.bucket import Bucket
from laconic.shard.gather import UnitGather
from laconic.shard.ledger import Held
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


def _is_spared(rank: int) -> bool:
    """True on another rank. Ranks in one process share their functions, so only the victim replaces one."""
    return dist.is_initialized() and dist.get_rank() != rank


class _Damaging(Pending):
    """A transfer of which one bit arrives wrong."""

    def __init__(self, pending: Pending, landing: Tensor, flip: Flip) -> None:
        self._pending, self._landing, self._flip = pending, landing, flip

    def wait(self) -> None:
        """Wait, and flip the bit."""
        self._pending.wait()
        flip_bit(self._landing, bit=self._flip.bit, seed=self._flip.seed)


@contextmanager
def flipping(flip: Flip) -> Iterator[None]:
    """Damage one transfer to one rank. The transfers are those that laconic sends on Gloo."""
    exchange, has_flipped = Communicator._exchange, False

    def damaged(self: Communicator, purpose: Purpose, group: Any, landings: Any, messages: Any) -> Pending:
        nonlocal has_flipped
        pending = exchange(self, purpose, group, landings, messages)
        is_meant = dist.get_rank() == flip.rank and (purpose, self.level) == (flip.purpose, flip.level)
        if has_flipped or not is_meant:
            return pending
        has_flipped = True
        return _Damaging(pending, landings[self._peers[flip.seed % len(self._peers)]], flip)

    with nullcontext() if _is_spared(flip.rank) else mock.patch.object(Communicator, "_exchange", damaged):
        yield


@contextmanager
def flipping_in_use(number: int, *, bit: int, seed: int) -> Iterator[None]:
    """Damage gathered weights on one rank, just after the engine's `number`-th look at them."""
    show, count = UnitGather.show, 0

    def damaged(self: UnitGather) -> None:
        nonlocal count
        show(self)
        if _is_spared(VICTIM):
            return
        if count == number:
            bucket = self.buckets[0]
            _flip_in_slot(bucket, bucket.full.allocate(), bit=bit, seed=seed)
        count += 1

    with nullcontext() if _is_spared(VICTIM) else mock.patch.object(UnitGather, "show", damaged):
        yield


@contextmanager
def flipping_in_gradients(number: int, *, bit: int, seed: int) -> Iterator[None]:
    """Damage the `number`-th bucket of gradients on one rank before they are summed."""
    take, count = BucketGradients.take_unreduced, 0

    def damaged(self: BucketGradients) -> Held[Tensor]:
        nonlocal count
        full = take(self)
        if _is_spared(VICTIM):
            return full
        if count == number:
            _flip_in_slot(self.bucket, full.memory, bit=bit, seed=seed)
        count += 1
        return full

    replaces = mock.patch.object(BucketGradients, "take_unreduced", damaged)
    with nullcontext() if _is_spared(VICTIM) else replaces:
        yield


def _flip_in_slot(bucket: Bucket, full: Tensor, *, bit: int, seed: int) -> None:
    slot = bucket.layout.slots[seed % len(bucket.layout.slots)]
    flip_bit(full[slot.offset : slot.offset + slot.numel], bit=bit, seed=seed)
