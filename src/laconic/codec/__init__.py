"""Tensors in few bits and back: codecs for messages, and blocks and maps for 8-bit states. Knows nothing but torch."""

import torch

from laconic.codec.base import Codec, FloatCodec
from laconic.codec.blocked import E2M1, E3M0, BlockCodec, Fp4, Int8, Nf4
from laconic.codec.tiles import Tiling

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FloatCodec("fp32", torch.float32),
        FloatCodec("bf16", torch.bfloat16),
        Int8(),
        Fp4("fp4", E3M0),
        Fp4("fp4-e2m1", E2M1),
    )
}
"""All codecs by name. `fp4` is e3m0, with three exponent bits, for values of many scales (arXiv 2501.18512)."""


WEIGHT_CODECS: dict[str, BlockCodec] = {"nf4": Nf4(), "int8": Int8(block=64, clip=16.0)}
"""The codecs of frozen weights. No block of 64 reaches 16 times its root mean square, so this int8 clips nothing."""


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
    "FloatCodec",
    "Fp4",
    "Int8",
    "Nf4",
    "Tiling",
    "codec_named",
]
