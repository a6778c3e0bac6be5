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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from laconic.comm.agreement import ranks_or_self
from laconic.comm.cluster import Cluster

_ALIGNMENT = 16
_MOST_TENSORS = 8


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
class PackedTensor:
    """One of the tensors that the conversion of one parameter makes, as all ranks hold it."""

    parameter: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the gathered tensor."""
    has_all: bool
    """True if it has an element for each of the parameter."""
    numels: tuple[int, ...]
    """Its elements in each shard."""

    def section_nbytes(self, shard: int) -> int:
        """The bytes of its section in a shard."""
        return -(-self.numels[shard] * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def elements(self, shard: int, begin: int, message: Tensor) -> Tensor:
        """View its elements in a shard of bytes, `message`, in which its section begins at byte `begin`."""
        return message[begin : begin + self.numels[shard] * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ShardPacking:
    """The form in which the parameters of one bucket cross: [Note: Packed conversions]."""

    tensors: tuple[PackedTensor, ...]
    """Those of all parameters, in order."""
    num_shards: int

    @property
    def is_elements(self) -> bool:
        """True if shards have elements in their places, and no sections."""
        parameters = [each.parameter for each in self.tensors]
        are_alone = len(set(parameters)) == len(parameters) and len({each.dtype for each in self.tensors}) == 1
        return are_alone and all(each.has_all for each in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of shards."""
        return self.tensors[0].dtype if self.is_elements else torch.uint8

    def _begins(self, shard: int) -> list[int]:
        """The byte at which the section of each tensor begins in a shard."""
        *begins, _ = accumulate((each.section_nbytes(shard) for each in self.tensors), initial=0)
        return begins

    @property
    def shard_nbytes(self) -> int:
        """The bytes of a shard with sections: those of the longest, so that all are alike."""
        shards = range(self.num_shards)
        return max(_ALIGNMENT, *(sum(each.section_nbytes(shard) for each in self.tensors) for shard in shards))

    def write(self, own: Tensor, shard: int, converted: Sequence[Converted]) -> None:
        """Write what the conversions made into this rank's shard, (shard_nbytes,), uint8. Gaps have zeros.

        Raises:
            RuntimeError: a conversion makes tensors of other sizes than before the first gather.
        """
        own.zero_()
        made = [(item, tensor.reshape(-1)) for item in converted for tensor in item.tensors]
        for packed, begin, (item, tensor) in zip(self.tensors, self._begins(shard), made, strict=True):
            numel = packed.numels[shard]
            if item.numel and not packed.has_all and tensor.numel() != numel:
                raise RuntimeError(
                    f"fsdp_pre_all_gather of {item.name} made {tensor.numel()} elements, and {numel} before the first "
                    "gather: the sizes of its tensors must not change"
                )
            packed.elements(shard, begin, own).copy_(tensor[:numel])

    def join(self, full: Tensor, wholes: Sequence[Tensor]) -> None:
        """Copy all gathered tensors out of all shards, (R * shard_nbytes,), into `wholes`, which have their shapes."""
        flat, ends = [whole.view(-1) for whole in wholes], [0] * len(wholes)
        for shard, message in enumerate(full.view(self.num_shards, -1)):
            for index, (packed, begin) in enumerate(zip(self.tensors, self._begins(shard), strict=True)):
                start, ends[index] = ends[index], ends[index] + packed.numels[shard]
                flat[index][start : ends[index]].copy_(packed.elements(shard, begin, message))


def agree_on_packing(cluster: Cluster, converted: Sequence[Converted], numels: Sequence[Sequence[int]]) -> ShardPacking:
    """Find the form in which a bucket crosses, from what the conversions of each rank make. Collective over the island.

    `numels` has the elements of each parameter in each shard.

    Raises:
        NotImplementedError: a conversion makes too many tensors, or ranks make other tensors, on all ranks alike.
    """
    own = [[item.numel, [[each.numel(), str(each.dtype)] for each in item.tensors]] for item in converted]
    told: list[Any] = sorted(ranks_or_self(cluster.flag_group).gather([cluster.shard_index, own]))
    tensors: list[PackedTensor] = []
    for parameter, item in enumerate(converted):
        made = [each[parameter] for _, each in told]
        kinds = [[dtype for _, dtype in theirs] for _, theirs in made]
        if any(each != kinds[0] for each in kinds) or not 0 < len(kinds[0]) <= _MOST_TENSORS:
            raise NotImplementedError(
                f"fsdp_pre_all_gather of {item.name} made {sorted(set(map(len, kinds)))} tensors on the ranks, or of "
                f"several dtypes; laconic gathers 1 to {_MOST_TENSORS} tensors, alike on all ranks. Give the "
                "parameter in ignored_params"
            )
        row_numel = max(1, math.prod(item.shape[1:]))
        held = [each[parameter] for each in numels]
        for index, tensor in enumerate(item.tensors):
            sizes = [
                _size_of(theirs[index][0], given or row_numel, numel)
                for (given, theirs), numel in zip(made, held, strict=True)
            ]
            tensors.append(_packed(parameter, item, tensor, held, sizes, cluster.size))
    return ShardPacking(tensors=tuple(tensors), num_shards=len(numels))


def _size_of(size: int, given: int, numel: int) -> int:
    """The elements that a conversion makes of `numel`, if it makes `size` of those `given`.

    The numbers differ if one rank speaks for all, as in a rehearsal; and a rank without elements has converted a row.
    """
    return size if given == numel else size * numel // given


def _packed(
    parameter: int, item: Converted, tensor: Tensor, held: Sequence[int], sizes: Sequence[int], num_ranks: int
) -> PackedTensor:
    """A tensor of which each rank, which holds some of the parameter's elements, makes so many."""
    chunk_numel = math.prod(chunk_shape(item.shape, num_ranks))
    # an element for each of the rank's, or up to an equal chunk with padding
    has_all = all(size in (numel, max(numel, chunk_numel)) for size, numel in zip(sizes, held, strict=True) if numel)
    numels = tuple(held) if has_all else tuple(size if numel else 0 for size, numel in zip(sizes, held, strict=True))
    inner = tuple(tensor.shape[1:])
    shape = item.shape if has_all else (sum(numels) // max(1, math.prod(inner)), *inner)
    return PackedTensor(parameter=parameter, dtype=tensor.dtype, shape=shape, has_all=has_all, numels=numels)


def chunk_shape(shape: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The shape of the largest part when FSDP2 cuts a parameter over `num_ranks`: by rows, in equal chunks."""
    return (-(-shape[0] // num_ranks), *shape[1:]) if len(shape) else ()
