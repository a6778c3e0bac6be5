"""The interface of codecs, pure functions between fp32 values and bytes, and the simplest codec.

[Note: Only decoded values count]
Ranks that exchange encoded values stay equal only if all of them apply the same numbers. So a sender, too, uses the
decoded values instead of its own. As the sender has both, it can measure the error of the codec.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.rotation import rotate, rotated_numel

_F = TypeVar("_F", bound=Callable[..., int])


def by_size(method: _F) -> _F:
    """Keep what a method of a codec returns, by the number of values: a codec lives as long as the process."""
    return lru_cache(maxsize=4096)(method)  # type: ignore[return-value]


class Codec(ABC):
    """Two pure functions between fp32 values and bytes. Each block of values stands alone; the last may be short."""

    name: str
    """The key in `CODECS`, which job descriptions use."""
    block = 1
    """The number of values that are coded together."""
    is_sparse = False
    """True if most values become zero, so that the sum of several vectors has more that are not zero than each."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """The bytes that `numel` encoded values take."""

    def encode(self, values: Tensor, *, check: bool = True) -> Tensor:
        """Encode values (numel,), fp32, contiguous, as (payload_bytes(numel),), uint8, on the same device.

        Without `check`, NaN and infinity are not refused, but make their block NaN.

        Raises:
            ValueError: a value is NaN or infinite, or `values` is not a flat fp32 tensor.
        """
        if values.ndim != 1 or values.dtype != torch.float32:
            raise ValueError(
                f"a codec takes flat fp32 tensors, got shape {tuple(values.shape)}, {values.dtype}; use "
                "x.float().view(-1)"
            )
        if check and not bool(torch.isfinite(values).all()):
            raise ValueError(
                f"{self.name} cannot encode NaN or infinity: training has diverged. Lower the (inner) learning rate, "
                "clip gradients, or resume from an earlier checkpoint"
            )
        return self._encode(values) if values.numel() else values.new_empty(0, dtype=torch.uint8)

    def decode(self, payload: Tensor, numel: int, *, rotates: bool = False) -> Tensor:
        """Decode what `encode` returned: (payload_bytes(numel),), uint8 -> (numel,), fp32, on the same device.

        `rotates` is that of `encode_into`. The payload then is that of `rotated_numel(numel)` values.

        Raises:
            ValueError: the payload of `numel` values has another length.
        """
        wanted = self.payload_bytes(rotated_numel(numel) if rotates else numel)
        if payload.shape != (wanted,):
            raise ValueError(f"{numel} values in {self.name} take {wanted} bytes, got {tuple(payload.shape)}")
        if not numel:
            return payload.new_empty(0, dtype=torch.float32)
        return self._decode_rotated(payload, numel) if rotates else self._decode(payload, numel)

    def encode_into(
        self, out: Tensor, values: Tensor, base: Tensor | None = None, *, check: bool = True, rotates: bool = False
    ) -> None:
        """Write the codes of `values`, or of their difference to `base`, into `out`, where `encode` would return them.

        With `rotates`, runs of 32 values are rotated first, of which the last is filled up with zeros.

        Shapes: values and base (numel,), of any floating dtypes; out (payload_bytes(numel),), uint8, or with `rotates`
            (payload_bytes(rotated_numel(numel)),).
        """
        if values.is_cuda and not check and self._encodes_by_kernel(out, values, base, rotates=rotates):
            return
        wide = values.to(torch.float32)
        if base is not None:
            wide = wide - base
        if rotates:
            filling = rotated_numel(len(wide)) - len(wide)
            wide = functional.pad(wide, (0, filling)) if filling else wide
            wide = rotate(wide, overwrites=wide is not values)
        out.copy_(self.encode(wide, check=check))

    def decode_into(self, out: Tensor, payload: Tensor, *, adds: bool = False, rotates: bool = False) -> None:
        """Decode into `out`, (numel,), of any floating dtype; with `adds`, add the values to what is there."""
        if payload.is_cuda and self._decodes_by_kernel(out, payload, adds=adds, rotates=rotates):
            return
        values = self.decode(payload, out.numel(), rotates=rotates)
        if adds:
            out.add_(values)
        else:
            out.copy_(values)

    @abstractmethod
    def _encode(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, numel: int) -> Tensor: ...

    def _encodes_by_kernel(self, out: Tensor, values: Tensor, base: Tensor | None, *, rotates: bool) -> bool:
        """Do what `encode_into` does in one kernel. Returns False if there is none."""
        return False

    def _decodes_by_kernel(self, out: Tensor, payload: Tensor, *, adds: bool, rotates: bool) -> bool:
        """Do what `decode_into` does in one kernel. Returns False if there is none."""
        return False

    def _decode_rotated(self, payload: Tensor, numel: int) -> Tensor:
        return rotate(self._decode(payload, rotated_numel(numel)), overwrites=True)[:numel]


class FloatCodec(Codec):
    """Values rounded to a floating-point type, without scales."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype

    def payload_bytes(self, numel: int) -> int:
        """See `Codec.payload_bytes`: the size of the type for each value."""
        return numel * self._dtype.itemsize

    def _encode(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).view(torch.uint8)

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        return self._numbers(payload).to(torch.float32, copy=True)

    def encode_into(
        self, out: Tensor, values: Tensor, base: Tensor | None = None, *, check: bool = True, rotates: bool = False
    ) -> None:
        """See `Codec.encode_into`."""
        if check or base is not None or rotates or not self._is_aligned(out):
            super().encode_into(out, values, base, check=check, rotates=rotates)
        else:
            out.view(self._dtype).copy_(values)

    def decode_into(self, out: Tensor, payload: Tensor, *, adds: bool = False, rotates: bool = False) -> None:
        """See `Codec.decode_into`."""
        numbers = self.decode(payload, len(out), rotates=True) if rotates else self._numbers(payload)
        if adds:
            out.add_(numbers)
        else:
            out.copy_(numbers)

    def _numbers(self, payload: Tensor) -> Tensor:
        """The payload in its type; a view, if it lies where one may."""
        return (payload if self._is_aligned(payload) else payload.clone()).view(self._dtype)

    def _is_aligned(self, payload: Tensor) -> bool:
        return payload.storage_offset() % self._dtype.itemsize == 0
