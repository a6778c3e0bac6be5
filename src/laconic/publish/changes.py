"""Changes of flat tensors: where bits differ, digests that follow changes, and values as tensors of a file and back.

On a CPU, values of 16 bits go through loops of changes_numba.py, which take less time than torch's operations.

[Note: Digests of published tensors]
A reader must know that it holds the version that a patch is for, and that it holds the right one afterwards. A hash
such as SHA-256 needs all bytes of a tensor in order, and no rank has them. So each element is mixed with its place in
the flattened tensor to a number of 64 bits, and the digest of a tensor is their sum, modulo 2^64. Each rank sums over
its own elements; the sums of ranks add up. A change takes the old number off and adds the new one, so a digest follows
a patch at the cost of the patch.

Two elements with other bits, or at other places, make other numbers that look random. So a wrong tensor has the right
digest once in 2^64 times. It finds mistakes and damage. It is no signature: who can forge a manifest can forge digests.
The files of a version have SHA-256 besides: [Note: A store] in store/folder.py. tests/reference/publish.py says the
same in Python's integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.codec.kernels import kernels_for
from laconic.codec.lossless import decode_in_pieces
from laconic.codec.patterns import pattern_form_of
from laconic.publish.versions import Encoding, Place, PublishedPart
from laconic.store.folder import DamagedError

FACTORS = _PLACE, _FIRST, _SECOND = tuple(
    factor - 2**64 for factor in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9)
)
"""The odd numbers of 64 bits that mix, as torch's whole numbers."""
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 15, 1 << 22
"""The elements that are mixed at once: on a CPU their numbers fit its caches."""
_MODULUS = 1 << 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAP_DTYPES = (torch.uint8, torch.uint16)
_MOST_NUMEL = torch.iinfo(torch.int32).max


def bits_of(values: Tensor) -> Tensor:
    """View the bits of a flat tensor as whole numbers of the same size."""
    return values.view(_WORDS[values.element_size()])


def _loops_for(*tensors: Tensor) -> ModuleType | None:
    """The loops of numba, if they run for all these tensors, which are plain and on a CPU; else None."""
    found = [kernels_for(each, "publish.changes_numba") for each in tensors]
    return found[0] if None not in found else None


def _has_loops(values: Tensor) -> bool:
    """Whether there are loops for published values: each further size would be compiled anew."""
    return values.element_size() == 2


def take_over(held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Make bits equal to new ones, in one pass on a CPU: the places that change, ascending, and the bits before.

    Shapes: held and new (n,), of one type of whole numbers, on one device -> (c,), int32 or int64, and (c,).
    """
    loops = _loops_for(held, new) if _has_loops(new) else None
    if loops is not None and held.dtype == new.dtype and held.shape == new.shape and len(held) <= _MOST_NUMEL:
        changed: tuple[Tensor, Tensor] = loops.taken_over(held, new)
        return changed
    places = (held != new).nonzero().view(-1)
    before = held[places]
    held[places] = new[places]
    return places, before


@torch.no_grad()
def taken(tensor: Tensor, places: Tensor) -> Tensor:
    """The elements at places of the flattened tensor, (c,), on the host."""
    flat = tensor.detach().reshape(-1)
    return flat[places.to(flat.device)].cpu()


@torch.no_grad()
def put(tensor: Tensor, places: Tensor, values: Tensor) -> None:
    """Write elements at places of the flattened tensor, (c,) each, bit by bit."""
    own, places, values = tensor.detach(), places.to(tensor.device), values.to(tensor.device)
    if own.is_contiguous():
        bits_of(own.view(-1))[places] = bits_of(values)
    else:
        own[torch.unravel_index(places, own.shape)] = values


# -- digests: [Note: Digests of published tensors] ---------------------------------------------------------------------


def run_digest(values: Tensor, start: int = 0) -> int:
    """The share of elements [start, start + n) in the digest of their tensor.

    Shapes: values (n,), of any dtype, on any device. Cost: one pass, and one wait for the device.
    Reference: tests/reference/publish.py.
    """
    if _has_loops(values) and (loops := _loops_for(values)) is not None:
        share: int = loops.digest_of_run(bits_of(values), start)
        return share
    size = _HOST_CHUNK if values.device.type == "cpu" else _DEVICE_CHUNK
    places = torch.arange(min(size, len(values)), device=values.device) * _PLACE
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, len(values), size):
        chunk = values[begin : begin + size]
        first = ((start + begin) * _PLACE + 2**63) % _MODULUS - 2**63  # modulo 2^64, with a sign
        total += _mixed(chunk, places[: len(chunk)] + first).sum()
    return int(total) % _MODULUS


def digest_at(positions: Tensor, values: Tensor) -> int:
    """The share of elements at any places, (n,), int64, in the digest of their tensor; see `run_digest`."""
    if _has_loops(values) and (loops := _loops_for(positions, values)) is not None:
        share: int = loops.digest_of_places(positions, bits_of(values))
        return share
    return int(_mixed(values, positions * _PLACE).sum()) % _MODULUS


def added(*digests: int) -> int:
    """The sum of digests. A negative one is taken off."""
    return sum(digests) % _MODULUS


def as_text(digest: int) -> str:
    """A digest as a manifest has it: 16 hexadecimal digits."""
    return f"{digest:016x}"


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of whole tensors. Cost: one pass over them."""
    return {name: as_text(run_digest(tensor.detach().reshape(-1))) for name, tensor in tensors.items()}


def _mixed(values: Tensor, places: Tensor) -> Tensor:
    """Mix elements, (n,), with their places times `_PLACE`, (n,), int64, which this overwrites."""
    width = 8 * values.element_size()
    patterns = bits_of(values).to(torch.int64)
    numbers = places.add_(patterns if width == 64 else patterns & ((1 << width) - 1))
    for shift, factor in ((32, _FIRST), (29, _SECOND)):
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)  # torch's shift repeats the sign
        numbers *= factor
    return numbers


# -- parts of files: [Note: A published version] in versions.py --------------------------------------------------------


def flat_places(place: Place, shape: tuple[int, ...], local: Tensor) -> Tensor:
    """The places in the flattened tensor of elements `local`, (n,), int64, of a run or a box, in its order."""
    start, sizes = place
    if len(start) == 1:
        return local + start[0]
    total, stride = torch.zeros_like(local), 1
    rest = local
    for begin, size, bound in zip(reversed(start), reversed(sizes), reversed(shape), strict=True):
        total += (rest % size + begin) * stride
        rest, stride = rest // size, stride * bound
    return total


def region_of(tensor: Tensor, place: Place) -> Tensor:
    """The elements of a run or a box, in the shape of its sizes; a view, if the tensor is contiguous."""
    region = tensor.reshape(-1) if len(place[0]) == 1 else tensor
    for dim, (begin, size) in enumerate(zip(*place, strict=True)):
        region = region.narrow(dim, begin, size)
    return region


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

    def key_in(self, name: str, shape: tuple[int, ...]) -> str:
        """Its key in a file. All values of a tensor have the tensor's own name, which any program can then read."""
        values = self.tensors.get("")
        is_all = values is not None and tuple(values.shape) == shape and not any(self.start)
        return name if is_all else f"{name}@{','.join(map(str, self.start))}"

    def stored_as(self, file: str, key: str) -> PublishedPart:
        """The part in a file, in which its tensors have `key` and their endings as keys."""
        return PublishedPart(file=file, key=key, encoding=self.encoding, start=self.start, sizes=self.sizes)


def encode_gaps(positions: Tensor, values: Tensor) -> EncodedPart:
    """Encode changed elements.

    Shapes: positions (c,), int64, ascending, all different; values (c,), the new ones, of any dtype. On the host.
    Reference: tests/reference/publish.py.
    """
    start = int(positions[0]) if len(positions) else 0
    loops = _loops_for(positions)
    gaps = _gaps_of(positions) if loops is None else loops.gaps_of(positions)
    return EncodedPart(Encoding.GAPS, (start,), (len(positions),), {".gaps": gaps, ".values": values})


def _gaps_of(positions: Tensor) -> Tensor:
    distances = positions.diff(prepend=positions[:1])
    further = {dtype: distances // torch.iinfo(dtype).max for dtype in _GAP_DTYPES}
    dtype = min(_GAP_DTYPES, key=lambda each: each.itemsize * (len(distances) + int(further[each].sum())))
    largest, ends = torch.iinfo(dtype).max, (further[dtype] + 1).cumsum(0)
    gaps = torch.full((int(ends[-1]) if len(ends) else 0,), largest, dtype=torch.int32)
    gaps[ends - 1] = (distances % largest).to(torch.int32)
    return gaps.to(dtype)


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
    if gaps.dtype not in _GAP_DTYPES or gaps.ndim != 1 or values.shape != part.sizes or values.dtype != dtype:
        raise _damaged(part)
    find = _positions_of if (loops := _loops_for(gaps)) is None else loops.positions_of
    positions: Tensor | None = find(gaps, part.start[0], len(values), numel)
    if positions is None:
        raise _damaged(part)
    return positions, values


def _positions_of(gaps: Tensor, start: int, num: int, numel: int) -> Tensor | None:
    """The places to which gaps lead, (num,), int64; None if these are more or fewer, or not in order in the tensor."""
    distances = gaps.to(torch.int64)
    positions = (distances.cumsum(0) + start)[distances < torch.iinfo(gaps.dtype).max]
    is_ascending = len(positions) < 2 or bool((positions.diff() > 0).all())
    is_sound = len(positions) == num and is_ascending and (not num or int(positions[-1]) < numel)
    return positions if is_sound else None


def decode_dense(part: PublishedPart, data: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """All values of a part, in the shape of its place. Raises: DamagedError if the file has no such part."""
    values = _of(part, data, "")
    if values.numel() != part.numel or values.dtype != dtype:
        raise _damaged(part)
    return values.view(part.sizes)


def decode_lossless(part: PublishedPart, data: Mapping[str, Tensor], held: Tensor) -> Tensor:
    """All values of a part, in the shape of its place, from those held there before, of that shape.

    Raises:
        DamagedError: the payload does not fit the held values.
    """
    payload, values = _of(part, data, ""), held.reshape(-1).clone()
    if payload.dtype is not torch.uint8 or payload.ndim != 1 or not has_lossless_form(held.dtype):
        raise _damaged(part)
    try:
        decode_in_pieces(values, payload)
    except (ValueError, RuntimeError, IndexError) as error:
        raise DamagedError(f"{part.file}: the payload of {part.key} does not fit the held values ({error})") from error
    return values.view(part.sizes)


def _of(part: PublishedPart, data: Mapping[str, Tensor], ending: str) -> Tensor:
    if part.key + ending not in data:
        raise DamagedError(f"{part.file} has no tensor {part.key + ending}, which the manifest names")
    return data[part.key + ending]


def _damaged(part: PublishedPart) -> DamagedError:
    return DamagedError(f"{part.file}: the tensors of {part.key} are not those of {part.encoding} at {part.start}")
