"""A sliced parameter under its own name again, while its parts stay where they are: for checkpoints and for loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from laconic.ragged.parts import SlicedParameter, sliced_of
from laconic.ragged.tensor import RaggedTensor


class JoinedTensor(torch.Tensor):
    """The whole of a sliced parameter, or of something kept for it, as torch.distributed.checkpoint (DCP) sees it.

    It has the whole's shape and no memory: asked which boxes of the whole this rank holds, it answers with views of the
    parts. So a checkpoint is written in the unsliced layout, and read from it into any slices, and no rank gathers
    anything. A part may be None: then it is not written from here, and not read.
    """

    parts: tuple[Tensor | None, ...]
    """Cut over ranks, or plain; in the order of `SlicedParameter.part_names`."""
    _sliced: SlicedParameter

    @staticmethod
    def __new__(cls, sliced: SlicedParameter, parts: Sequence[Tensor | None]) -> JoinedTensor:
        some = next(part for part in parts if part is not None)
        self = torch.Tensor._make_wrapper_subclass(cls, sliced.shape, dtype=some.dtype, device=some.device)
        self._sliced, self.parts = sliced, tuple(parts)
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"JoinedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, parts={self._sliced.part_names})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as in ragged/tensor.py
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a JoinedTensor, which is for checkpoints alone; take its parts")

    def _held(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Boxes of the whole that lie on this rank: where they begin, and views of the parts."""
        dim = self._sliced.dim
        for index, part in enumerate(self.parts):
            for offset, box in _boxes(part) if part is not None else ():
                for piece in self._sliced.pieces:
                    low = max(piece.offset, offset[dim])
                    high = min(piece.offset + piece.length, offset[dim] + box.shape[dim])
                    if piece.part == index and low < high:
                        at = piece.start + low - piece.offset
                        yield (*offset[:dim], at, *offset[dim + 1 :]), box.narrow(dim, low - offset[dim], high - low)

    # -- the protocol of DCP -------------------------------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        for part in self.parts:
            if isinstance(part, RaggedTensor):
                part.__create_chunk_list__()  # [Note: Versions] in ragged/tensor.py: it is about to be filled
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.shape)
            for offset, box in self._held()
            if box.numel()
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.shape),
                    properties=TensorProperties.create_from_tensor(box),
                    size=self.size(),
                ),
            )
            for offset, box in self._held()
            if box.numel()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, box in self._held():
            if index.offset is not None and tuple(index.offset) == offset:
                return box
        raise ValueError(f"{index} is not a part of {self!r} that this rank holds")


def joined(tensors: Mapping[str, Tensor], places: Mapping[str, tuple[str, SlicedParameter, int]]) -> dict[str, Tensor]:
    """`tensors` in their order, with those that are parts joined under the name of the whole.

    Args:
        tensors: by name; of a parameter's parts some may be missing.
        places: for every part by name, the whole's name, how it is cut, and the part's index (`sliced_parts`).
    """
    found: dict[str, list[Tensor | None]] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in places:
            result[name] = tensor
            continue
        whole, sliced, index = places[name]
        found.setdefault(whole, [None] * len(sliced.part_names))[index] = tensor
        result[whole] = JoinedTensor(sliced, found[whole])
    return result


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters by the names they have without slices; sliced ones as JoinedTensors."""
    places = {
        name: (sliced.name, sliced, index)
        for sliced in sliced_of(module).values()
        for index, name in enumerate(sliced.part_names)
    }
    return joined({name: p for name, p in module._parameters.items() if p is not None}, places)


def _boxes(part: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """What lies on this rank of a part: where it begins in it, and a view."""
    if not isinstance(part, RaggedTensor):
        yield (0,) * part.ndim, part
        return
    for chunk in part._checkpoint_chunks():
        if 0 not in chunk.sizes:
            yield tuple(chunk.offsets), part.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
