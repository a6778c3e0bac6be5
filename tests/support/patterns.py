"""Versions of weights as patterns of small formats, and gradients: what lossless coders are tried on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.codec.contexts import TILE

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2, "uint8": torch.uint8,
}  # fmt: skip
WILD = (
    torch.tensor([0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001, 0x7F7F, 0xFF7F])
    .to(torch.int16)
    .view(torch.bfloat16)
)
"""NaNs, infinities, zeros of both signs, denormals, the largest numbers."""


def versions(numel: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield cases of held and new values: as optimizers change them, and as they do not. `numel` is above a tile."""
    for name in DTYPES:
        for step in (1e-2, 1e-3, 1e-5) if name == "bfloat16" else (1e-3,):
            held, new = trained(name, numel, step)
            yield f"{name}, {step:g}", held, new
        mixed, others, nbytes = new.clone(), random_patterns(name, numel, 2), TILE * DTYPES[name].itemsize
        bits_of(mixed)[:nbytes] = bits_of(others)[:nbytes]
        yield f"{name}, a tile without any rule", held, mixed
        yield f"{name}, any patterns", held, others
        yield f"{name}, no change", held, held
    for few in (1, 513, TILE):
        yield f"{few} values", *trained("bfloat16", few, 1e-3)
    for step in (1e-2, 1e-5):
        held, new = trained("bfloat16", numel, step)
        new[5 : 5 + 397 * len(WILD) : 397] = WILD
        held[700 : 700 + 401 * len(WILD) : 401] = WILD
        yield f"wild values among {step:g}", held, new


def random_patterns(name: str, numel: int, seed: int) -> Tensor:
    """Any patterns."""
    nbytes = numel * DTYPES[name].itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8).view(DTYPES[name])


def with_outside(num: int) -> Tensor:
    """A block of bf16 of which `num` exponents are far from the others: as a lossless gradient of 353 + num bytes."""
    values = torch.full((256,), 2.0**-10)
    values[:num] = torch.where(torch.arange(num) % 2 == 0, 2.0**50, 2.0**-70)
    return values.to(torch.bfloat16)


def gradients(dtype: torch.dtype, numel: int) -> dict[str, Tensor]:
    """Gradients as they are, and what may be among them, by name."""
    draw = torch.Generator().manual_seed(numel)
    normal, places = torch.randn(numel, generator=draw) * 1e-3, torch.arange(numel)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-7, -1e-7, 6e4])
    found = {
        "usual": normal,
        "blocks of zeros": torch.where(places // 300 % 3 == 1, normal, 0.0),
        "mixed scales": normal * torch.exp(4 * torch.randn(numel, generator=draw)),
        "odd values": torch.where(places % 7 == 3, odd[places % 8], normal),
        "zeros of both signs": torch.where(places % 2 == 1, -0.0, 0.0),
        "zeros": torch.zeros(numel),
        "values outside": with_outside(158 + numel % 2),
    }
    patterns = torch.randint(256, (numel * dtype.itemsize,), generator=draw, dtype=torch.uint8).view(dtype)
    cast = {name: values.to(dtype) for name, values in found.items()}
    then = torch.where(places < 400, patterns, cast["usual"])
    return cast | {"any patterns": patterns, "any patterns, then usual ones": then}


def with_mean(num: int) -> Tensor:
    """A block of bf16 whose exponents are `num` / 256 above 127 in the mean, and one of them far more."""
    values = torch.ones(256)
    values[: num - 10] = 2.0
    values[-1] = 2.0**10
    return values.to(torch.bfloat16)


def trained(name: str, numel: int, step: float, seed: int = 0) -> list[Tensor]:
    """Two versions of values that drift by steps of one size, as weights under Adam do."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(numel, generator=generator)
    weights[:: max(3, numel // 7)] = 0.0
    drift = torch.randn(numel, generator=generator)
    versions = []
    for _ in range(2):
        weights = weights + step * (drift + 0.3 * torch.randn(numel, generator=generator))
        versions.append(shown(name, weights))
    return versions


def shown(name: str, weights: Tensor) -> Tensor:
    """Weights as copies of a format; of whole numbers their tens."""
    if name == "uint8":
        return (40 * weights).clamp(0, 255).to(torch.uint8)
    return weights.to(DTYPES[name])


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
