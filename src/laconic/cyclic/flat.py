"""One stage's trainable parameters, or their gradients, as one buffer of bytes: what a message carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # any dtype may begin there, and vector loads are whole


@dataclass(frozen=True)
class _Piece:
    begin: int
    end: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Layout:
    """Where every tensor of a list lies in the buffer; gradients lie as their parameters do."""

    def __init__(self, like: Iterable[Tensor]) -> None:
        pieces, begin = [], 0
        for tensor in like:
            is_dense = tensor.is_contiguous() or (
                tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            )
            stride = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
            end = begin + tensor.numel() * tensor.element_size()
            pieces.append(_Piece(begin, end, tensor.dtype, tensor.shape, stride))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._pieces: Sequence[_Piece] = tuple(pieces)
        self.num_bytes = begin

    def empty(self, device: torch.device) -> Tensor:
        """A new buffer, (num_bytes,) of uint8; what lies between tensors is zero."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, without a copy."""
        return [
            buffer[piece.begin : piece.end].view(piece.dtype).as_strided(piece.shape, piece.stride)
            for piece in self._pieces
        ]

    def pack(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """A new buffer with these values."""
        buffer = self.empty(device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer
