"""Tensors in few bits and back: codecs for messages, maps for 8-bit states, coded sums."""

import torch

from laconic.codec.base import Codec, FloatCodec
from laconic.codec.blocked import E2M1, E3M0, BlockCodec, Even, Float4, Nf4, Ternary, TwoBit
from laconic.codec.sparse import TopK
from laconic.codec.tiles import Tiling

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FloatCodec("fp32", torch.float32),
        FloatCodec("bf16", torch.bfloat16),
        Even(8),
        Even(4),
        Even(3),
        TwoBit(),
        Ternary(),
        Float4("e2m1", E2M1),
        Float4("e3m0", E3M0),
        TopK(64),
        TopK(128),
    )
}
"""All codecs of messages, by name. `e3m0` is for values of many scales (arXiv 2501.18512)."""


WEIGHT_CODECS: dict[str, BlockCodec] = {"nf4": Nf4(), "int8": Even(8, block=64)}
"""The codecs of frozen weights."""


def codec_named(codec: str | Codec) -> Codec:
    """The codec of a name; a `Codec` is returned as it is.

    Raises:
        ValueError: no codec has the name.
    """
    if isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise ValueError(f"codec={codec!r} is not known; use one of {', '.join(CODECS)}")
    return CODECS[codec]


__all__ = [
    "CODECS",
    "WEIGHT_CODECS",
    "BlockCodec",
    "Codec",
    "Even",
    "Float4",
    "FloatCodec",
    "Nf4",
    "Ternary",
    "Tiling",
    "TopK",
    "TwoBit",
    "codec_named",
]
