"""The values of a part as tensors of a file, and back: [Note: A published version] in versions.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.codec.lossless import decode_in_pieces, encode_in_pieces
from laconic.codec.patterns import pattern_form_of
from laconic.publish.changes import loops_for
from laconic.publish.versions import Encoding, PublishedPart
from laconic.store.folder import DamagedError

_GAP_DTYPES = (torch.uint8, torch.uint16)


class EncodedPart(NamedTuple):
    """A part that is not in a file yet."""

    encoding: Encoding
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    tensors: dict[str, Tensor]
    """The tensors of the part by the ending of their keys."""

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def stored_as(self, file: str, key: str) -> PublishedPart:
        """The part in a file, in which its tensors have `key` and their endings as keys."""
        return PublishedPart(file=file, key=key, encoding=self.encoding, start=self.start, sizes=self.sizes)


def encode_gaps(positions: Tensor, values: Tensor) -> EncodedPart:
    """Encode changed elements.

    Shapes: positions (c,), int64, ascending, all different; values (c,), the new ones, of any dtype. On the host.
    Reference: tests/reference/publish.py.
    """
    start = int(positions[0]) if len(positions) else 0
    tensors = {".gaps": _gaps_of(positions), ".values": values}
    return EncodedPart(Encoding.GAPS, (start,), (len(positions),), tensors)


def _gaps_of(positions: Tensor) -> Tensor:
    if (loops := loops_for(positions)) is not None:
        found: Tensor = loops.gaps_of(positions)
        return found
    distances = positions.diff(prepend=positions[:1])
    dtype = min(_GAP_DTYPES, key=lambda dtype: _gap_bytes(distances, dtype))
    largest = torch.iinfo(dtype).max
    ends = (distances // largest + 1).cumsum(0)
    gaps = torch.full((int(ends[-1]) if len(ends) else 0,), largest, dtype=torch.int32)
    gaps[ends - 1] = (distances % largest).to(torch.int32)
    return gaps.to(dtype)


def _gap_bytes(distances: Tensor, dtype: torch.dtype) -> int:
    further = distances // torch.iinfo(dtype).max
    return dtype.itemsize * (len(distances) + int(further.sum()))


def encode_dense(start: tuple[int, ...], sizes: tuple[int, ...], values: Tensor) -> EncodedPart:
    """All values of a run or a box, in its shape."""
    return EncodedPart(Encoding.DENSE, start, sizes, {"": values})


def encode_lossless(start: tuple[int, ...], sizes: tuple[int, ...], held: Tensor, new: Tensor) -> EncodedPart:
    """Encode all values of a run or a box, (n,) each, for readers that hold the old ones."""
    return EncodedPart(Encoding.LOSSLESS, start, sizes, {"": encode_in_pieces(held, new).read()})


def has_lossless_form(dtype: torch.dtype) -> bool:
    """Whether the lossless coder knows the dtype."""
    try:
        pattern_form_of(dtype)
    except ValueError:
        return False
    return dtype != torch.uint8  # bytes of who knows what


def decode_gaps(
    part: PublishedPart, data: Mapping[str, Tensor], numel: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The places, (c,), int64, and the new values, (c,), of a part with gaps in a tensor of `numel` elements.

    Raises:
        DamagedError: the tensors of the file are no such part.
    """
    gaps, values = _of(part, data, ".gaps"), _of(part, data, ".values")
    _check(part, gaps.dtype in _GAP_DTYPES and gaps.ndim == 1 and values.shape == part.sizes and values.dtype == dtype)
    positions = _positions_of(gaps, part.start[0], len(values), numel)
    if positions is None:
        raise _damaged(part)
    return positions, values


def _positions_of(gaps: Tensor, start: int, num: int, numel: int) -> Tensor | None:
    """The places to which gaps lead, (num,), int64; None if these are more or fewer, or not in order in the tensor."""
    if (loops := loops_for(gaps)) is not None:
        found: Tensor | None = loops.positions_of(gaps, start, num, numel)
        return found
    distances = gaps.to(torch.int64)
    positions = (distances.cumsum(0) + start)[distances < torch.iinfo(gaps.dtype).max]
    is_ascending = len(positions) < 2 or bool((positions.diff() > 0).all())
    is_sound = len(positions) == num and is_ascending and (not num or int(positions[-1]) < numel)
    return positions if is_sound else None


def decode_dense(part: PublishedPart, data: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """All values of a part, in the shape of its place. Raises: DamagedError if the file has no such part."""
    values = _of(part, data, "")
    _check(part, values.numel() == part.numel and values.dtype == dtype)
    return values.view(part.sizes)


def decode_lossless(part: PublishedPart, data: Mapping[str, Tensor], held: Tensor) -> Tensor:
    """All values of a part, in the shape of its place, from those held there before, of that shape.

    Raises:
        DamagedError: the payload does not fit the held values.
    """
    payload = _of(part, data, "")
    _check(part, payload.dtype is torch.uint8 and payload.ndim == 1 and has_lossless_form(held.dtype))
    values = held.reshape(-1).clone()
    try:
        decode_in_pieces(values, payload)
    except (ValueError, RuntimeError, IndexError) as error:
        raise DamagedError(f"{part.file}: the payload of {part.key} does not fit the held values ({error})") from error
    return values.view(part.sizes)


def smallest(parts: Sequence[Sequence[EncodedPart]]) -> Sequence[EncodedPart]:
    """Of several ways to encode the same changes, the one with the fewest bytes; of equals the first."""
    return min(parts, key=lambda way: sum(part.nbytes for part in way))


def _of(part: PublishedPart, data: Mapping[str, Tensor], ending: str) -> Tensor:
    if part.key + ending not in data:
        raise DamagedError(f"{part.file} has no tensor {part.key + ending}, which the manifest names")
    return data[part.key + ending]


def _check(part: PublishedPart, is_sound: bool) -> None:
    if not is_sound:
        raise _damaged(part)


def _damaged(part: PublishedPart) -> DamagedError:
    return DamagedError(f"{part.file}: the tensors of {part.key} are not those of {part.encoding} at {part.start}")
