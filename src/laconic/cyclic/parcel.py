"""What one stage hands the next, when the next is on another device: a few tensors in one buffer.

The receiver must know the tensors' shapes to make room. They follow from the shapes of the batch, so they are told
once for every shape of batch, in a header before the first parcel, and remembered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.cyclic.flat import Layout

HEADER_BYTES = 4096


@dataclass(frozen=True)
class Form:
    """Shapes, dtypes, and which of the tensors want a gradient."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Form:
        """The form of these."""
        return Form(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))

    def gradients(self) -> Form:
        """The form of what comes back: one gradient for each that wants one."""
        return Form(tuple((shape, dtype, False) for shape, dtype, wants in self.tensors if wants))

    @property
    def layout(self) -> Layout:
        """Where they lie in the buffer."""
        return Layout(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in self.tensors)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer that has arrived."""
        views = self.layout.views(buffer)
        return [view.requires_grad_(wants) for view, (_, _, wants) in zip(views, self.tensors, strict=True)]

    def header(self, device: torch.device) -> Tensor:
        """(HEADER_BYTES,) of uint8. Raises ValueError if the form does not fit."""
        text = json.dumps([[shape, str(dtype).removeprefix("torch."), wants] for shape, dtype, wants in self.tensors])
        if len(text) > HEADER_BYTES:
            raise ValueError(
                f"a stage hands on {len(self.tensors)} tensors, whose shapes take {len(text)} bytes to tell, expected "
                f"at most {HEADER_BYTES}; hand on fewer tensors, such as one stacked one"
            )
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), dtype=torch.uint8).to(device)

    @staticmethod
    def from_header(header: Tensor) -> Form:
        """The form that a header tells."""
        told = json.loads(bytes(header.cpu().tolist()).decode())
        return Form(tuple((tuple(shape), getattr(torch, dtype), wants) for shape, dtype, wants in told))
