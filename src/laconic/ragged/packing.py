"""The wire's form of parameters that convert themselves: elements in their places, or bytes in sections.

[Note: Packed conversions]
A conversion that makes one tensor with an element for each element keeps the bucket's own form: shards of elements,
which land in their places, so that the gathered tensors are views. Any other conversion is *packed*: one that makes
several tensors, such as elements in few bits and their scales, or that makes more or fewer elements. A shard is then
bytes. Each tensor has a section in it, which begins at a multiple of 16 bytes. All shards are as long as the longest.
Ranks hold different numbers of elements, so the lengths of sections differ; the ranks tell each other once, before the
first gather. Behind a gather, the sections of a tensor are joined in the order of shards.

A conversion may fill its tensor up to the length of FSDP2's equal chunks. What it added is cut off again, so that the
joined tensor has the parameter's shape. Other tensors are joined along their first dim, as FSDP2 joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import swap_rows

_ALIGNMENT = 16
_MOST_TENSORS = 8
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What one conversion makes of this rank's elements."""

    name: str
    shape: tuple[int, ...]
    """The parameter's shape."""
    numel: int
    """The number of this rank's elements."""
    tensors: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class ShardSection:
    """The place of one tensor of one parameter in a shard of bytes."""

    parameter: int
    index: int
    begin: int
    """In bytes."""
    numel: int


@dataclass(frozen=True, kw_only=True)
class ShardPacking:
    """The form in which the parameters of one bucket cross: [Note: Packed conversions]."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[torch.dtype, ...], ...]
    """Of each tensor of each parameter."""
    have_all: tuple[tuple[bool, ...], ...]
    """True for a tensor that has an element for each of the parameter."""
    inner: tuple[tuple[tuple[int, ...], ...], ...]
    """The shape of each tensor without its first dim."""
    numels: tuple[tuple[tuple[int, ...], ...], ...]
    """The elements of each tensor, for each shard and parameter."""

    @property
    def is_elements(self) -> bool:
        """True if shards have elements in their places, and no sections."""
        dtypes = {dtype for own in self.dtypes for dtype in own}
        return all(len(own) == 1 and own[0] for own in self.have_all) and len(dtypes) == 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of shards."""
        return self.dtypes[0][0] if self.is_elements else torch.uint8

    def sections(self, shard: int) -> Iterator[ShardSection]:
        """The sections of a shard, in order."""
        begin = 0
        for parameter, own in enumerate(self.numels[shard]):
            for index, numel in enumerate(own):
                yield ShardSection(parameter=parameter, index=index, begin=begin, numel=numel)
                begin += -(-numel * self.dtypes[parameter][index].itemsize // _ALIGNMENT) * _ALIGNMENT

    @property
    def shard_nbytes(self) -> int:
        """The bytes of a shard with sections: those of the longest, so that all are alike."""
        return max(_ALIGNMENT, *(self._end_of(shard) for shard in range(len(self.numels))))

    def _end_of(self, shard: int) -> int:
        *_, last = self.sections(shard)
        nbytes = last.numel * self.dtypes[last.parameter][last.index].itemsize
        return last.begin + -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def write(self, own: Tensor, shard: int, converted: Sequence[Converted]) -> None:
        """Write what the conversions made into this rank's shard, (shard_nbytes,), uint8. Gaps have zeros.

        Raises:
            RuntimeError: a conversion makes tensors of other sizes than before the first gather.
        """
        own.zero_()
        for part in self.sections(shard):
            item = converted[part.parameter]
            tensor = item.tensors[part.index].reshape(-1)
            if item.numel and not self.have_all[part.parameter][part.index] and tensor.numel() != part.numel:
                raise RuntimeError(
                    f"fsdp_pre_all_gather of {item.name} made {tensor.numel()} elements, and {part.numel} before the "
                    "first gather: the sizes of its tensors must not change"
                )
            dtype = self.dtypes[part.parameter][part.index]
            nbytes = part.numel * dtype.itemsize
            own[part.begin : part.begin + nbytes].view(dtype).copy_(tensor[: part.numel])

    def joined_shape(self, parameter: int, index: int) -> tuple[int, ...]:
        """The shape of a gathered tensor."""
        if self.have_all[parameter][index]:
            return self.shapes[parameter]
        numel = sum(own[parameter][index] for own in self.numels)
        inner = self.inner[parameter][index]
        return (numel // max(1, math.prod(inner)), *inner)

    def join(self, full: Tensor, parameter: int, index: int, whole: Tensor) -> None:
        """Copy a gathered tensor out of all shards, (R * shard_nbytes,), into `whole`, of `joined_shape`."""
        flat, begin, dtype = whole.view(-1), 0, self.dtypes[parameter][index]
        for shard, message in enumerate(full.view(len(self.numels), -1)):
            for part in self.sections(shard):
                if (part.parameter, part.index) == (parameter, index) and part.numel:
                    piece = message[part.begin : part.begin + part.numel * dtype.itemsize].view(dtype)
                    flat[begin : begin + part.numel].copy_(piece)
                    begin += part.numel


def agree_on_packing(cluster: Cluster, converted: Sequence[Converted], numels: Sequence[Sequence[int]]) -> ShardPacking:
    """Find the form in which a bucket crosses, from what the conversions of each rank make. Collective over the island.

    `numels` has the elements of each parameter in each shard.

    Raises:
        NotImplementedError: a conversion makes too many tensors, or ranks make other tensors, on all ranks alike.
    """
    row_numels = [max(1, math.prod(item.shape[1:])) for item in converted]
    by_shard = [
        [told.of_share(numel, row) for told, numel, row in zip(shard, own, row_numels, strict=True)]
        for shard, own in zip(_told_by_shards(cluster, converted), numels, strict=True)
    ]
    by_parameter = list(zip(*by_shard, strict=True))
    for item, told in zip(converted, by_parameter, strict=True):
        _refuse_odd_tensors(item.name, told)
    have_all = tuple(
        _have_all(told, math.prod(chunk_shape(item.shape, cluster.size)))
        for item, told in zip(converted, by_parameter, strict=True)
    )
    return ShardPacking(
        shapes=tuple(item.shape for item in converted),
        dtypes=tuple(told[0].dtypes for told in by_parameter),
        have_all=have_all,
        inner=tuple(tuple(tuple(tensor.shape[1:]) for tensor in item.tensors) for item in converted),
        numels=tuple(tuple(map(_section_numels, told, have_all)) for told in by_shard),
    )


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What one rank's conversion of one parameter makes, in the form that the other ranks read."""

    numel: int
    """The rank's elements of the parameter."""
    num_tensors: int
    numels: tuple[int, ...]
    """Of the tensors, up to the most that laconic gathers."""
    dtypes: tuple[torch.dtype, ...]

    WIDTH = 2 + 2 * _MOST_TENSORS
    """The numbers in a row."""

    @staticmethod
    def of(item: Converted) -> _Told:
        tensors = item.tensors[:_MOST_TENSORS]
        return _Told(
            numel=item.numel,
            num_tensors=len(item.tensors),
            numels=tuple(tensor.numel() for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
        )

    def of_share(self, numel: int, row_numel: int) -> _Told:
        """What a rank with `numel` elements makes: this, unless one rank speaks for all, as in a rehearsal.

        A rank without elements has converted a row.
        """
        if numel == self.numel:
            return self
        each = self.numel or row_numel
        return replace(self, numel=numel, numels=tuple(made * numel // each for made in self.numels))

    def to_row(self) -> list[int]:
        row = [self.numel, self.num_tensors, *self.numels, *(_DTYPES.index(each) for each in self.dtypes)]
        return row + [0] * (self.WIDTH - len(row))

    @staticmethod
    def from_row(row: Sequence[int]) -> _Told:
        numel, num_tensors, *rest = row
        count = min(num_tensors, _MOST_TENSORS)
        codes = rest[count : 2 * count]
        return _Told(
            numel=numel,
            num_tensors=num_tensors,
            numels=tuple(rest[:count]),
            dtypes=tuple(_DTYPES[code] for code in codes),
        )


def _told_by_shards(cluster: Cluster, converted: Sequence[Converted]) -> list[list[_Told]]:
    """Tell the other ranks what this one makes; return what each shard's rank makes of each parameter."""
    own = [cluster.shard_index, *(number for item in converted for number in _Told.of(item).to_row())]
    rows = torch.tensor(own, dtype=torch.int64).expand(cluster.size, -1).contiguous()
    in_order = sorted(swap_rows(cluster, rows).tolist())  # a row begins with its shard
    begins = range(1, len(own), _Told.WIDTH)
    return [[_Told.from_row(row[begin : begin + _Told.WIDTH]) for begin in begins] for row in in_order]


def _refuse_odd_tensors(name: str, told: Sequence[_Told]) -> None:
    if len({(each.num_tensors, each.dtypes) for each in told}) > 1 or not 0 < told[0].num_tensors <= _MOST_TENSORS:
        raise NotImplementedError(
            f"fsdp_pre_all_gather of {name} made {sorted({each.num_tensors for each in told})} tensors on the ranks, "
            f"or of several dtypes; laconic gathers 1 to {_MOST_TENSORS} tensors, alike on all ranks. Give the "
            "parameter in ignored_params"
        )


def _have_all(told: Sequence[_Told], chunk_numel: int) -> tuple[bool, ...]:
    """Which tensors have, on every rank, an element for each of the rank's, or up to `chunk_numel` with padding."""
    holders = [each for each in told if each.numel]
    return tuple(
        all(each.numels[index] in (each.numel, max(each.numel, chunk_numel)) for each in holders)
        for index in range(told[0].num_tensors)
    )


def _section_numels(told: _Told, have_all: Sequence[bool]) -> tuple[int, ...]:
    """The elements of each tensor that cross: none for a rank without elements, and no padding."""
    made = zip(have_all, told.numels, strict=True)
    return tuple((told.numel if is_whole else numel) if told.numel else 0 for is_whole, numel in made)


def chunk_shape(shape: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The shape of the largest part when FSDP2 cuts a parameter over `num_ranks`: by rows, in equal chunks."""
    return (-(-shape[0] // num_ranks), *shape[1:]) if len(shape) else ()
