"""The whole of a sliced parameter for checkpoints and for loading, while its parts stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.ragged.boxed import Box, BoxedTensor
from laconic.ragged.parts import SlicedParameter, sliced_parts


class JoinedTensor(BoxedTensor):
    """The whole of a sliced parameter, or of one of its optimizer states, as DCP sees it.

    It has the shape of the whole and no memory of its own: its boxes are views of the parts. So a checkpoint has the
    unsliced layout, loads into any number of slices, and needs no gather. Every tensor operation raises
    NotImplementedError.
    """

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

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"JoinedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, parts={self._sliced.part_names})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as in ragged/tensor.py
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a JoinedTensor, which is for checkpoints alone; use its parts")

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
