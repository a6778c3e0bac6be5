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
from dataclasses import dataclass

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
class Section:
    """The place of one tensor of one parameter in a shard of bytes."""

    parameter: int
    index: int
    begin: int
    """In bytes."""
    numel: int


@dataclass(frozen=True, kw_only=True)
class Packing:
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

    def sections(self, shard: int) -> Iterator[Section]:
        """The sections of a shard, in order."""
        begin = 0
        for parameter, own in enumerate(self.numels[shard]):
            for index, numel in enumerate(own):
                yield Section(parameter=parameter, index=index, begin=begin, numel=numel)
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


def agree_on_packing(cluster: Cluster, converted: Sequence[Converted]) -> Packing:
    """Find the form in which a bucket crosses, from what the conversions of each rank make. Collective over the island.

    Raises:
        NotImplementedError: a conversion makes too many tensors, or ranks make other tensors, on all ranks alike.
    """
    own = [cluster.shard_index]
    for item in converted:
        tensors = list(item.tensors)[:_MOST_TENSORS]
        own += [item.numel, len(item.tensors)]
        for index in range(_MOST_TENSORS):
            tensor = tensors[index] if index < len(tensors) else None
            own += [-1, -1] if tensor is None else [tensor.numel(), _DTYPES.index(tensor.dtype)]
    rows = torch.tensor(own, dtype=torch.int64).expand(cluster.size, -1).contiguous()
    table = {row[0]: row[1:] for row in swap_rows(cluster, rows).tolist()}
    width = 2 + 2 * _MOST_TENSORS
    by_shard = [
        [table[shard][begin : begin + width] for begin in range(0, len(own) - 1, width)] for shard in sorted(table)
    ]
    dtypes, have_all, inner = [], [], []
    for number, item in enumerate(converted):
        entries = [entry[number] for entry in by_shard]
        kinds = {(entry[1], *entry[3::2]) for entry in entries}
        count = entries[0][1]
        if len(kinds) > 1 or not 0 < count <= _MOST_TENSORS:
            raise NotImplementedError(
                f"fsdp_pre_all_gather of {item.name} made {sorted({entry[1] for entry in entries})} tensors on the "
                f"ranks, or of several dtypes; laconic gathers 1 to {_MOST_TENSORS} tensors, alike on all ranks. Give "
                "the parameter in ignored_params"
            )
        dtypes.append(tuple(_DTYPES[code] for code in entries[0][3 : 3 + 2 * count : 2]))
        chunk = math.prod(chunk_shape(item.shape, cluster.size))
        have_all.append(
            tuple(
                all(entry[2 + 2 * index] in (entry[0], max(entry[0], chunk)) for entry in entries if entry[0])
                for index in range(count)
            )
        )
        inner.append(tuple(tuple(tensor.shape[1:]) for tensor in item.tensors))
    numels = tuple(
        tuple(
            tuple(
                (entry[0] if have_all[number][index] else entry[2 + 2 * index]) if entry[0] else 0
                for index in range(entry[1])
            )
            for number, entry in enumerate(entries)
        )
        for entries in by_shard
    )
    return Packing(
        shapes=tuple(item.shape for item in converted),
        dtypes=tuple(dtypes),
        have_all=tuple(have_all),
        inner=tuple(inner),
        numels=numels,
    )


def chunk_shape(shape: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The shape of the largest part when FSDP2 cuts a parameter over `num_ranks`: by rows, in equal chunks."""
    return (-(-shape[0] // num_ranks), *shape[1:]) if len(shape) else ()
