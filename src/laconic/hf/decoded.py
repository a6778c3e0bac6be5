"""A checkpoint of a model with weights in few bits, read as if the weights were plain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.checkpoint import StoredCheckpoint
from laconic.codec import WEIGHT_CODECS, BlockCodec


@dataclass(frozen=True, kw_only=True)
class DecodedCheckpoint(StoredCheckpoint):
    """A `StoredCheckpoint` that decodes the weights of `QuantizedLinear`s when they are read, one at a time."""

    codec: BlockCodec
    coded: dict[str, Tensor]
    """The tensors, on meta, that are stored as codes and scales."""

    @classmethod
    def of(cls, stored: StoredCheckpoint, model: nn.Module, weight_format: str) -> DecodedCheckpoint:
        """Read `stored` for `model`, on meta, whose parameters have the names, shapes and dtypes of decoded weights."""
        coded: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if f"{name}_codes" in stored.tensors
        }
        tensors = {**stored.tensors, **{name: (tuple(p.shape), p.dtype) for name, p in coded.items()}}
        return cls(**{**vars(stored), "tensors": tensors}, codec=WEIGHT_CODECS[weight_format], coded=coded)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `StoredCheckpoint.read`."""
        names = list(names)
        plain = [name for name in names if name not in self.coded]
        return {**super().read(plain), **{name: self._decode(name) for name in names if name in self.coded}}

    def _decode(self, name: str) -> Tensor:
        parameter = self.coded[name]
        stored = super().read([f"{name}_codes", f"{name}_scales"])
        scales = stored[f"{name}_scales"].view(torch.bfloat16)
        decoded = self.codec.dequantize(stored[f"{name}_codes"], scales, parameter.numel())
        return decoded.view(parameter.shape).to(parameter.dtype)
