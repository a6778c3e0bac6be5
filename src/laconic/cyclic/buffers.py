"""The buffer of a message: several tensors as one run of bytes, and what a receiver must know to unpack it.

[Note: Message buffers are not buckets]
The engine's flat buffers (layout/bucket.py, shard/ledger.py) share no code with message buffers. They differ:
  - A bucket has one dtype. A message mixes dtypes (a bf16 hidden state with a bool mask), so it is laid out in bytes.
  - A bucket is cut into equal shards of whole blocks. A message is never cut.
  - A bucket is contiguous per tensor. A message keeps strides, so that channels_last parameters stay channels_last.
  - A bucket is filled again under the same views. A message's buffer never is: [Note: Versions by pointer swap].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEADER_BYTES = 4096  # the size of the message that carries an `ActivationMeta`
_ALIGNMENT_BYTES = 16  # a tensor of any dtype may begin there, and vector loads are aligned


class ByteLayout:
    """The place of every tensor of a list in one buffer of bytes. A gradient has the place of its parameter."""

    def __init__(self, like: Iterable[Tensor]) -> None:
        self._places: list[tuple[slice, torch.dtype, torch.Size, tuple[int, ...]]] = []
        self.num_bytes = 0
        for tensor in like:
            is_dense = tensor.is_contiguous() or (
                tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            )
            stride = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
            stop = self.num_bytes + tensor.nbytes
            self._places.append((slice(self.num_bytes, stop), tensor.dtype, tensor.shape, stride))
            self.num_bytes = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def empty(self, device: torch.device) -> Tensor:
        """A new buffer of zeros, (num_bytes,) of uint8."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, without a copy."""
        return [buffer[place].view(dtype).as_strided(shape, stride) for place, dtype, shape, stride in self._places]

    def pack(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """A new buffer with the values of `tensors`, which must have the shapes of the layout's tensors."""
        buffer = self.empty(device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer


@dataclass(frozen=True)
class ActivationMeta:
    """The shapes, dtypes and `requires_grad` flags of the activations that one stage sends to the next.

    The receiver needs them to make room. A header carries them before the first activations of each new batch shape.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """(shape, dtype, requires_grad) of each activation."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> ActivationMeta:
        """The metadata of these activations."""
        return ActivationMeta(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))

    def gradients(self) -> ActivationMeta:
        """The metadata of the gradients that the receiver returns, one for each activation that requires one."""
        return ActivationMeta(
            tuple((shape, dtype, False) for shape, dtype, requires_grad in self.tensors if requires_grad)
        )

    @property
    def layout(self) -> ByteLayout:
        """The places of the activations in one buffer."""
        return ByteLayout(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in self.tensors)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The activations in a buffer of this layout, without a copy."""
        flags = (requires_grad for *_, requires_grad in self.tensors)
        return [view.requires_grad_(flag) for view, flag in zip(self.layout.views(buffer), flags, strict=True)]

    def header(self, device: torch.device) -> Tensor:
        """The metadata as a tensor, (HEADER_BYTES,) of uint8. Raises ValueError if they do not fit."""
        text = json.dumps([[shape, str(dtype).removeprefix("torch."), flag] for shape, dtype, flag in self.tensors])
        if len(text) > HEADER_BYTES:
            raise ValueError(
                f"a stage hands on {len(self.tensors)} tensors, whose shapes take {len(text)} bytes to send, expected "
                f"at most {HEADER_BYTES}; hand on fewer tensors, for example one stacked tensor"
            )
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), dtype=torch.uint8).to(device)

    @staticmethod
    def from_header(header: Tensor) -> ActivationMeta:
        """The metadata that a header carries."""
        entries = json.loads(bytes(header.cpu().tolist()).decode())
        return ActivationMeta(tuple((tuple(shape), getattr(torch, dtype), flag) for shape, dtype, flag in entries))
