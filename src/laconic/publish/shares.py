"""The elements that one rank publishes: the copy that was published last, and the changes since.

[Note: The copy published last]
A rank holds, in host memory, the bits that it has published of its shares: [Note: Who publishes an element] in
holdings.py. To publish, it casts its shares anew, a piece at a time, and compares. What differs is noted, and goes into
the copy. So the copy is that of the new version before the patch has left, and training may go on: a thread encodes
what was noted, and whole values, if they are due, are the copy itself. A patch that could not be written leaves a copy
that no reader has. Then the next version must be whole.

Shares on an accelerator are compared there. A piece of the copy, which is page-locked, comes to the device, and only
what differs leaves it. All of that is in order with the optimizer's kernels on the current stream, and the host waits
for each piece. So the next step may overwrite the shares once `compare` has returned.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.codec.kernels import coder_on
from laconic.codec.lossless import encode_in_pieces
from laconic.publish.changes import (
    EncodedPart,
    added,
    bits_of,
    digest_at,
    encode_gaps,
    flat_places,
    has_lossless_form,
    put,
    run_digest,
    take_over,
    taken,
)
from laconic.publish.holdings import Holding, Share
from laconic.publish.versions import Encoding
from laconic.shard import cache

_HOST_PIECE_NUMEL, _DEVICE_PIECE_NUMEL = 1 << 18, 1 << 22
"""The elements that are cast and compared at once, at most. On a CPU they fit its caches."""
_LEAST_PIECE_NUMEL = 1 << 10
_DEVICE_BYTES = 40
"""More device memory than the comparison of an element takes: cast, before, whether they differ, and where."""
_ALIGNMENT_BYTES = 64


class Changes(NamedTuple):
    """The changed elements of one share, by their places in it: (c,) each, on the host. The copy has the new values."""

    places: Tensor
    old: Tensor


class TensorShare(NamedTuple):
    """The part of one tensor's version that one rank writes."""

    before: int
    """Its share in the digest of the tensor in the last version."""
    after: int
    patch: tuple[EncodedPart, ...]
    """Empty if nothing has changed here."""


class _Owned(NamedTuple):
    """A share, and its copy."""

    share: Share
    copy: Tensor
    """The values published last, (n,), on the host."""


class OwnShares:
    """The shares of this rank and their copies: [Note: The copy published last]."""

    def __init__(
        self, holdings: Mapping[str, Holding], shares: Mapping[str, list[Share]], dtype: torch.dtype, encoding: str
    ) -> None:
        """Make room for the copies. Floating-point tensors are published in `dtype`, others in their own.

        `encoding` is that of patches: "gaps" or "lossless"; or "smallest", which chooses for each tensor. A tensor with
        so many changes that gaps take more than all its values is dense.

        Cost: host memory for the shares in these dtypes, page-locked if a tensor is on an accelerator. There,
            `take` and `compare` need less memory than the largest share takes, and no more than 200 MB.
        """
        if encoding != "gaps":
            coder_on("cpu", "lossless")  # which may name a package that is missing
        self._encoding = encoding
        self.shapes = {name: holding.shape for name, holding in holdings.items()}
        self.dtypes = {
            name: dtype if holding.dtype.is_floating_point else holding.dtype for name, holding in holdings.items()
        }
        sizes = [
            (name, share, (share.end - share.begin) * self.dtypes[name].itemsize)
            for name, own in shares.items()
            for share in own
        ]
        memory = self._memory_of(sum(_aligned(nbytes) for *_, nbytes in sizes), holdings)
        largest = max((holdings[name].dtype.itemsize * (s.end - s.begin) for name, s, _ in sizes), default=0)
        self._piece_numel = min(max(largest // _DEVICE_BYTES, _LEAST_PIECE_NUMEL), _DEVICE_PIECE_NUMEL)
        self._owned: dict[str, list[_Owned]] = {}
        begin = 0
        for name, share, nbytes in sizes:
            copy = memory[begin : begin + nbytes].view(self.dtypes[name])
            self._owned.setdefault(name, []).append(_Owned(share, copy))
            begin += _aligned(nbytes)
        self._digests = dict.fromkeys(self._owned, 0)

    def _memory_of(self, nbytes: int, holdings: Mapping[str, Holding]) -> Tensor:
        """Take host memory, page-locked for the accelerator of the shares. Not by torch, which takes up to twice it."""
        devices = {held.view.device for each in holdings.values() for held in each.regions}
        accelerator = next((device for device in devices if device.type != "cpu"), None)
        if accelerator is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        memory = cache.make_slab(nbytes, accelerator, holds="the copy of published weights", remedy="Use more nodes")
        weakref.finalize(self, cache.free_slab, memory, accelerator).atexit = False  # keeps the memory until then
        return memory

    @property
    def nbytes(self) -> int:
        """The bytes of all shares, which is what whole values take."""
        return sum(owned.copy.nbytes for own in self._owned.values() for owned in own)

    @torch.no_grad()
    def take(self, holdings: Mapping[str, Holding]) -> None:
        """Copy the present values, without a patch."""
        for name, own in self._owned.items():
            self._digests[name] = 0
            for owned in own:
                for begin, new in self._pieces(name, owned, holdings):
                    copy = owned.copy[begin : begin + len(new)].copy_(new)
                    share = self._digest(name, owned, begin, copy)
                    self._digests[name] = added(self._digests[name], share)

    @torch.no_grad()
    def compare(self, holdings: Mapping[str, Holding]) -> dict[str, list[Changes]]:
        """Compare the present values with the copies, make the copies equal to them, and note the differences.

        Training waits for this. `encoded` must follow before the next call.
        """
        return {name: [self._changes(name, owned, holdings) for owned in own] for name, own in self._owned.items()}

    @torch.no_grad()
    def encoded(self, changes: dict[str, list[Changes]] | None) -> dict[str, TensorShare]:
        """Encode what `compare` has noted, which this takes out tensor by tensor; digests follow it.

        With None nothing is encoded, for a version with whole values alone.
        """
        if changes is None:
            return {name: TensorShare(before=0, after=digest, patch=()) for name, digest in self._digests.items()}
        return {name: self._encoded(name, changes.pop(name)) for name in list(changes)}

    def _encoded(self, name: str, changes: Sequence[Changes]) -> TensorShare:
        before = self._digests[name]
        changed = [(owned, own) for owned, own in zip(self._owned[name], changes, strict=True) if len(own.places)]
        if not changed:
            return TensorShare(before=before, after=before, patch=())
        shape = self.shapes[name]
        places = torch.cat([flat_places(owned.share.place, shape, own.places.long()) for owned, own in changed])
        old = torch.cat([own.old for _, own in changed])
        new = torch.cat([taken(owned.copy, own.places) for owned, own in changed])
        if len(changed) > 1:
            order = places.argsort()
            places, old, new = places[order], old[order], new[order]
        self._digests[name] = added(before, -digest_at(places, old), digest_at(places, new))
        gaps = [encode_gaps(places, new)]
        ways = [] if self._encoding == "lossless" else [gaps]
        if self._encoding != "gaps":
            has_form = has_lossless_form(self.dtypes[name])
            ways.append([_lossless(owned, own) for owned, own in changed] if has_form else gaps)
        ways.append(list(self._dense(name)))
        patch = min(ways, key=lambda way: sum(part.nbytes for part in way))  # of equals the first
        return TensorShare(before=before, after=self._digests[name], patch=tuple(patch))

    def whole(self) -> Iterator[tuple[str, EncodedPart]]:
        """Yield (name, part) with all values of all shares, without a copy."""
        for name in self._owned:
            for part in self._dense(name):
                yield name, part

    def damaged(self) -> list[str]:
        """The tensors whose copies have other digests than those that patches have led to. Cost: one pass."""
        found = {
            name: added(*(self._digest(name, owned, 0, owned.copy) for owned in own))
            for name, own in self._owned.items()
        }
        return [name for name, digest in found.items() if digest != self._digests[name]]

    def _dense(self, name: str) -> Iterator[EncodedPart]:
        shape = self.shapes[name]
        for (*_, place), copy in self._owned[name]:
            is_all = place == ((0,), (math.prod(shape),))
            yield EncodedPart(Encoding.DENSE, *place, {"": copy.view(shape if is_all else place[1])})

    def _changes(self, name: str, owned: _Owned, holdings: Mapping[str, Holding]) -> Changes:
        """Find what has changed in one share, and change its copy."""
        pieces = []
        dtype = torch.int32 if len(owned.copy) <= torch.iinfo(torch.int32).max else torch.int64
        for begin, new in self._pieces(name, owned, holdings):
            copy, bits = bits_of(owned.copy[begin : begin + len(new)]), bits_of(new)
            if bits.is_cpu:
                places, old = take_over(copy, bits)
            else:
                local = (bits != copy.to(bits.device, non_blocking=True)).nonzero().view(-1)  # waits for the copy
                changed, places = bits[local].cpu(), local.cpu()
                old = copy[places]
                copy[places] = changed
            if len(places):
                pieces.append(Changes(places.to(dtype) + begin, old.view(new.dtype)))
        if not pieces:
            return Changes(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=owned.copy.dtype))
        return Changes(*(torch.cat(each) for each in zip(*pieces, strict=True)))

    def _pieces(self, name: str, owned: _Owned, holdings: Mapping[str, Holding]) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the share, present values where they are) a piece at a time."""
        values = holdings[name].regions[owned.share.region].values(owned.share.begin, owned.share.end)
        size = _HOST_PIECE_NUMEL if values.device.type == "cpu" else self._piece_numel
        for begin in range(0, len(values), size):
            yield begin, values[begin : begin + size].to(self.dtypes[name])

    def _digest(self, name: str, owned: _Owned, begin: int, values: Tensor) -> int:
        place = owned.share.place
        if len(place[0]) == 1:
            return run_digest(values, place[0][0] + begin)
        return digest_at(flat_places(place, self.shapes[name], torch.arange(len(values)) + begin), values)


def _lossless(owned: _Owned, changes: Changes) -> EncodedPart:
    """Encode a share by what it was before its copy changed."""
    earlier = owned.copy.clone()
    put(earlier, *changes)
    return EncodedPart(Encoding.LOSSLESS, *owned.share.place, {"": encode_in_pieces(earlier, owned.copy).read()})


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
