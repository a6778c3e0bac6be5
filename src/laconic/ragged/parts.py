"""Parameters that are parts of a named whole, and the whole as torch.distributed.checkpoint (DCP) sees it.

[Note: Parts of a whole]
A module may hold several parameters in place of one: `weight_slice0`, `weight_slice1`, ... in place of `weight`. Then
it has a `SlicedParameter` for each such weight, which `partial/` makes. The engine, checkpoints, islands and model
loading ask only the functions below about slices, so none of them imports `partial`.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], Tensor]
"""The coordinates at which a box begins in the whole tensor, and its elements, a view."""


class BoxedTensor(torch.Tensor):
    """A tensor of which this rank holds axis-aligned boxes. DCP writes them and fills them in place.

    multiprocessing sends copies of the boxes to another process of this machine, which may save them. To pickle the
    tensor by other means, such as torch.save, stays an error.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ForkingPickler.register(cls, _send_boxes)

    @abstractmethod  # only mypy enforces it: torch.Tensor has a metaclass of its own
    def held_boxes(self) -> list[Box]:
        """The boxes on this rank. An empty tensor has one box, on one rank, so that DCP learns of the tensor."""

    def note_change(self) -> None:
        """Count a change of the elements: [Note: Versions] in ragged/tensor.py."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.note_change()  # DCP asks for the boxes before it fills them in place
        return [_chunk(offset, box) for offset, box in self.held_boxes()]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        boxes = self.held_boxes()
        _refuse_lossy_storage(fqn, len(boxes), sys._getframe(1))
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(offset, box), properties=TensorProperties.create_from_tensor(box), size=self.size()
                ),
            )
            for offset, box in boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, box in self.held_boxes():
            if index.offset is None or tuple(index.offset) == offset:
                return box
        raise ValueError(f"this rank does not hold {index} of {self!r}")


def _send_boxes(tensor: BoxedTensor) -> tuple[Any, ...]:
    """Reduce a tensor to copies of its boxes: their own memory must not become shared, as torch would make it."""
    boxes = [(offset, box.detach().to("cpu", copy=True)) for offset, box in tensor.held_boxes()]
    return SentBoxes, (tensor.shape, boxes, tensor.dtype)


def _refuse_lossy_storage(name: str, num_boxes: int, frame: FrameType | None) -> None:
    """Refuse a storage that would lose parts of a tensor, before it writes. DCP does not say which it plans for.

    Raises:
        NotImplementedError: a frame above has a storage writer of safetensors, which keeps one tensor a name and file,
            or lets all ranks write one file.
    """
    while frame is not None:
        writer = frame.f_locals.get("storage_writer")
        is_safetensors = getattr(writer, "serialization_format", None) is SerializationFormat.SAFETENSORS
        if is_safetensors and not getattr(writer, "save_distributed", True) and dist.get_world_size() > 1:
            raise NotImplementedError(
                f"{type(writer).__name__} without save_distributed=True expects whole tensors on rank 0: all ranks "
                f"would write one file, and parts of {name} would be lost. Use laconic.save_safetensors, which writes "
                "such a folder, or give a full state dict (StateDictOptions(full_state_dict=True))"
            )
        if is_safetensors and num_boxes > 1:
            raise NotImplementedError(
                f"{type(writer).__name__} keeps one tensor a name and file, but this rank's part of {name} is no box: "
                f"it is {num_boxes} boxes, of which all but one would be lost. Use laconic.save_safetensors, which "
                "writes such a folder, or dcp.FileSystemWriter, or shard with granularity=laconic.whole()"
            )
        frame = frame.f_back if writer is None else None


def _chunk(offset: tuple[int, ...], box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.shape)


_ATTRIBUTE = "_laconic_sliced"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePiece:
    """A run of `length` indices in the cut dim, from index `start` of the whole and from index `offset` of `part`."""

    start: int
    length: int
    part: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class SlicedParameter:
    """A parameter that is cut into several: one part per slice, and a shared part if some elements are in no slice.

    `name` and `shape` describe the whole in its module, and `dim` is the dim that is cut. The parts and their shapes
    are the same on all islands, whichever slice an island trains.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    num_slices: int
    pieces: tuple[SlicePiece, ...]
    """All runs, in the order of the whole."""
    is_factor: bool = True
    """True if inputs are multiplied with the parameter; False for a bias, which is added."""

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts in the module."""
        names = [f"{self.name}_slice{index}" for index in range(self.num_slices)]
        has_shared = any(piece.part == self.num_slices for piece in self.pieces)
        return tuple(names + [f"{self.name}_shared"] * has_shared)

    @property
    def dim_from_end(self) -> int:
        """The cut dim as a negative number: -1 is the last dim."""
        return self.dim - len(self.shape)

    def slice_of(self, part: int) -> int | None:
        """Return the slice of a part; None for the shared part, which every island trains."""
        return part if part < self.num_slices else None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts to the whole, in a new tensor. Differentiable.

        Shapes: the parts may lack leading dims of the whole (the weight of one expert), but not the cut dim.
        """
        dim = self.dim_from_end
        return torch.cat([parts[piece.part].narrow(dim, piece.offset, piece.length) for piece in self.pieces], dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Cut the whole into its parts. A part that is one run is a view."""
        return [self.take(whole, index, self.dim_from_end) for index in range(len(self.part_names))]

    def take(self, whole: Tensor, part: int, dim: int) -> Tensor:
        """Select the elements of `whole` that belong to one part, along `dim`: a view if the part is one run."""
        runs = [whole.narrow(dim, piece.start, piece.length) for piece in self.pieces if piece.part == part]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def add_sliced(module: nn.Module, sliced: SlicedParameter) -> None:
    """Register that `module` holds the parts of `sliced` as parameters."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[sliced.name] = sliced


def sliced_of(module: nn.Module) -> dict[str, SlicedParameter]:
    """Return the sliced parameters of one module by the names of the wholes in the module."""
    return module.__dict__.get(_ATTRIBUTE, {})


def walk_sliced(model: nn.Module) -> Iterator[tuple[str, nn.Module, SlicedParameter]]:
    """Yield (prefix of the names in the module, module, sliced parameter) for all sliced parameters of a model."""
    for name, module in model.named_modules():
        for sliced in sliced_of(module).values():
            yield f"{name}." if name else "", module, sliced


def sliced_parameters(model: nn.Module) -> dict[str, SlicedParameter]:
    """Return all sliced parameters by their names in the unsliced model. The names of parts begin with this name."""
    return {prefix + sliced.name: sliced for prefix, _, sliced in walk_sliced(model)}


def sliced_parts(model: nn.Module) -> dict[str, tuple[str, SlicedParameter, int]]:
    """Return (name of the whole, sliced parameter, index of the part) for every part by its name in the model."""
    return {
        prefix + name: (prefix + sliced.name, sliced, index)
        for prefix, _, sliced in walk_sliced(model)
        for index, name in enumerate(sliced.part_names)
    }


def slice_of_parameters(model: nn.Module) -> dict[str, int | None]:
    """Return the slice of every parameter of the model by name; None for a parameter that all islands train."""
    slices = {name: sliced.slice_of(index) for name, (_, sliced, index) in sliced_parts(model).items()}
    return {name: slices.get(name) for name, _ in model.named_parameters()}


def slice_of_parameter(module: nn.Module, name: str) -> int | None:
    """Return the slice of the parameter that a module has under `name`; None if all islands train it."""
    owners = [sliced for sliced in sliced_of(module).values() if name in sliced.part_names]
    return owners[0].slice_of(owners[0].part_names.index(name)) if owners else None


class SentBoxes(BoxedTensor):
    """The boxes of a tensor in another process, which saves them: DCP's `AsyncCheckpointerType.PROCESS` sends them.

    It has no memory of its own. Every tensor operation raises NotImplementedError.
    """

    _instead = "use .full_tensor() of the model"
    _boxes: list[Box]

    def __new__(cls, shape: torch.Size, boxes: Sequence[Box], dtype: torch.dtype) -> SentBoxes:
        """Take the boxes that a rank holds of a tensor of the global shape."""
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self._boxes = list(boxes)
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={len(self.held_boxes())})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as in ragged/tensor.py
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError(f"{func} of {cls.__name__}, which is for checkpoints alone; {cls._instead}")

    def held_boxes(self) -> list[Box]:
        """See `BoxedTensor.held_boxes`."""
        return self._boxes


class JoinedTensor(SentBoxes):
    """The whole of a sliced parameter, or of one of its optimizer states, as DCP sees it.

    It has the shape of the whole and no memory of its own: its boxes are views of the parts. So a checkpoint has the
    unsliced layout, loads into any number of slices, and needs no gather.
    """

    _instead = "use its parts"
    parts: tuple[Tensor | None, ...]
    """RaggedTensors or plain tensors, in the order of `SlicedParameter.part_names`; None where DCP neither writes nor
    fills a part from this rank."""
    _sliced: SlicedParameter

    def __new__(cls, sliced: SlicedParameter, parts: Sequence[Tensor | None]) -> JoinedTensor:
        """Join `parts`, at least one of which is not None."""
        some = next(part for part in parts if part is not None)
        self = torch.Tensor._make_wrapper_subclass(cls, sliced.shape, dtype=some.dtype, device=some.device)
        self._sliced, self.parts = sliced, tuple(parts)
        return self

    def join(self, wholes: Sequence[Tensor]) -> Tensor:
        """Make the whole from the whole values of all parts; see `SlicedParameter.join`."""
        return self._sliced.join(wholes)

    def held_boxes(self) -> list[Box]:
        """See `BoxedTensor.held_boxes`; boxes without elements are left out."""
        dim, boxes = self._sliced.dim, []
        for index, part in enumerate(self.parts):
            for offset, box in _boxes(part):
                for piece in self._sliced.pieces:
                    low = max(piece.offset, offset[dim])
                    high = min(piece.offset + piece.length, offset[dim] + box.shape[dim])
                    if piece.part == index and low < high and box.numel():
                        start = piece.start + low - piece.offset
                        place = (*offset[:dim], start, *offset[dim + 1 :])
                        boxes.append((place, box.narrow(dim, low - offset[dim], high - low)))
        return boxes

    def note_change(self) -> None:
        """See `BoxedTensor.note_change`."""
        for part in self.parts:
            if isinstance(part, BoxedTensor):
                part.note_change()


def joined(tensors: Mapping[str, Tensor], places: Mapping[str, tuple[str, SlicedParameter, int]]) -> dict[str, Tensor]:
    """Replace the tensors that are parts by JoinedTensors under the names of the wholes; keep the order.

    Some parts of a whole may be missing. `places` holds the parts by name, as `sliced_parts` returns them.
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
    """The parameters that a module itself has, under their unsliced names; sliced parameters as JoinedTensors."""
    return joined({name: p for name, p in module._parameters.items() if p is not None}, sliced_parts(module))


def _boxes(part: Tensor | None) -> list[Box]:
    if part is None:
        return []
    return part.held_boxes() if isinstance(part, BoxedTensor) else [((0,) * part.ndim, part)]
