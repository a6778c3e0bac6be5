"""Tensors in few bits and back: codecs for messages, and coded sums."""

import torch

from laconic.codec.base import Codec, FloatCodec
from laconic.codec.blocked import BlockCodec, E2m1, Even, Nf4, TwoBit
from laconic.codec.sparse import TopK
from laconic.codec.tiles import Tiling

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FloatCodec("fp32", torch.float32),
        FloatCodec("bf16", torch.bfloat16),
        Even(8),
        Even(4),
        TwoBit(),
        E2m1(),
        TopK(64),
    )
}
"""All codecs of messages, by name."""


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
    "E2m1",
    "Even",
    "FloatCodec",
    "Nf4",
    "Tiling",
    "TopK",
    "TwoBit",
    "codec_named",
]
