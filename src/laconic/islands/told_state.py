"""The state of a run, as one island tells it to an island that comes: outer parameters and outer optimizer state."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.entries import EntryError, decode, encode
from laconic.errors import JobError
from laconic.islands.fragments import Position

_POSITION_BYTES = 256


def pair(store: dist.Store, key: str, rank: int, timeout_s: float) -> dist.ProcessGroup:
    """Connect two ranks, 0 tells and 1 listens. Blocks until both are there."""
    return _compat.gloo_group(dist.PrefixStore(key, store), rank, 2, timeout_s)


def tell(link: dist.ProcessGroup, position: Position, vectors: Sequence[Tensor]) -> None:
    """Send a position and vectors to the rank that listens.

    Cost: the vectors' bytes, and 8 for a checksum of each.
    """
    text = encode(position).encode().ljust(_POSITION_BYTES)
    _send(link, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for vector in vectors:
        _send(link, vector)
        _send(link, torch.tensor([_checksum(vector)]))


def listen(link: dist.ProcessGroup, vectors: Sequence[Tensor]) -> Position:
    """Receive the vectors of `tell` into `vectors`, which have the same shapes, and return the position.

    Raises:
        JobError: a bit has flipped on the way.
        RuntimeError: the rank that tells is lost.
    """
    text = torch.empty(_POSITION_BYTES, dtype=torch.uint8)
    _receive(link, text)
    for vector in vectors:
        _receive(link, vector)
        checksum = torch.empty(1, dtype=torch.int64)
        _receive(link, checksum)
        if int(checksum) != _checksum(vector):
            raise JobError("the state that another island told has changed on the way; start this island again")
    try:
        return decode(Position, bytes(text.tolist()).rstrip(b" "))
    except EntryError as error:
        raise JobError(
            f"the position that another island told is damaged ({error}); start this island again"
        ) from error


def checksums(vectors: Sequence[Tensor]) -> list[int]:
    """The CRC-32 of each vector."""
    return [_checksum(vector) for vector in vectors]


def _send(link: dist.ProcessGroup, vector: Tensor) -> None:
    if vector.numel():
        _compat.isend(vector, link, 1).wait()


def _receive(link: dist.ProcessGroup, vector: Tensor) -> None:
    if vector.numel():
        _compat.irecv(vector, link, 0).wait()


def _checksum(vector: Tensor) -> int:
    return zlib.crc32(vector.contiguous().view(-1).view(torch.uint8).numpy()) if vector.numel() else 0  # type: ignore[arg-type]
