"""The protocol of torch.distributed.checkpoint (DCP) for tensors of which a rank holds boxes, DCP's "chunks"."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], Tensor]
"""The coordinates at which a box begins in the whole tensor, and its elements, a view."""


class BoxedTensor(torch.Tensor):
    """A tensor of which this rank holds axis-aligned boxes. DCP writes them and fills them in place."""

    @abstractmethod  # only mypy enforces it: torch.Tensor has a metaclass of its own
    def held_boxes(self) -> list[Box]:
        """The boxes on this rank. An empty tensor has one box, on one rank, so that DCP learns of the tensor."""

    def note_change(self) -> None:
        """Count a change of the elements: [Note: Versions] in ragged/tensor.py."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.note_change()  # DCP asks for the boxes before it fills them in place
        return [_chunk(offset, box) for offset, box in self.held_boxes()]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(offset, box), properties=TensorProperties.create_from_tensor(box), size=self.size()
                ),
            )
            for offset, box in self.held_boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, box in self.held_boxes():
            if index.offset is None or tuple(index.offset) == offset:
                return box
        raise ValueError(f"this rank does not hold {index} of {self!r}")


def _chunk(offset: tuple[int, ...], box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.shape)
