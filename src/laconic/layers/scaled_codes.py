"""Products of codes on devices that multiply matrices in few bits: `torch.nn.functional.scaled_mm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from laconic.layers.scaled import ScaledFormat, scaled_format_named


def multiplies_codes(weight_format: ScaledFormat, rows: Tensor, num_outputs: int) -> bool:
    """True if this device multiplies codes of a format: rows (k, n), by a weight (num_outputs, n).

    FP8 in blocks of 128 wants an H100 (compute capability 9.0); MXFP8 and NVFP4 want Blackwell (10.0). Sizes must be
    multiples of 16, and those along blocks of 128 of 128.
    """
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or weight_format not in _RECIPES:
        return False
    major = 9 if weight_format.width == 128 else 10
    sizes = (len(rows), 16), (rows.shape[1], weight_format.width), (num_outputs, max(16, weight_format.height))
    return torch.cuda.get_device_capability(rows.device)[0] == major and all(size % of == 0 for size, of in sizes)


def product_of_codes(
    codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, weight: Any, dtype: torch.dtype
) -> Tensor:
    """Multiply the codes of an input, (k, n), by those of a `ScaledTensor`, (m, n): (k, m), of `dtype`.

    Sums and products are those of `torch.nn.functional.scaled_mm`.
    """
    arrange, of_input, of_weight, swizzle = _RECIPES[weight.weight_format]
    as_codes: Callable[[Tensor], Tensor] = (
        (lambda it: it.view(torch.float4_e2m1fn_x2)) if weight.weight_format.is_packed else (lambda it: it)
    )
    product = functional.scaled_mm(
        as_codes(codes), as_codes(weight.codes).t(),
        scale_a=arrange(scales, of_input), scale_recipe_a=of_input,
        scale_b=arrange(weight.scales, of_weight), scale_recipe_b=of_weight,
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=dtype,
    )  # fmt: skip
    if matrix_scale is None or weight.matrix_scale is None:
        return product
    return product * (matrix_scale * weight.matrix_scale).to(dtype)


def _by_columns(scales: Tensor, recipe: ScalingType) -> Tensor:
    """Scales of blocks of 128 in the order of cuBLAS: column after column, those of tiles in fours."""
    scales = scales.to(torch.float32)
    if recipe is ScalingType.BlockWise128x128:
        return functional.pad(scales, (0, -scales.shape[1] % 4)).t()
    return scales.t().contiguous().t()


def _swizzled(scales: Tensor, _: ScalingType) -> Tensor:
    """Scales in the order of Blackwell's tensor cores: 32 x 4 x 4 by 128 rows and 4 blocks, filled up with zeros.

    Source: cuBLAS documentation, "Block scaling factors layout".
    """
    down, across = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    padded = torch.zeros(128 * down, 4 * across, dtype=torch.uint8, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


_TILES, _RUNS = ScalingType.BlockWise128x128, ScalingType.BlockWise1x128
_RECIPES: dict[ScaledFormat, tuple[Any, ScalingType, ScalingType, SwizzleType]] = {
    scaled_format_named(name): recipe
    for name, recipe in {
        "fp8_128x128": (_by_columns, _RUNS, _TILES, SwizzleType.NO_SWIZZLE),
        "fp8_1x128": (_by_columns, _RUNS, _RUNS, SwizzleType.NO_SWIZZLE),
        "fp8_1x128_e8m0": (_by_columns, _RUNS, _RUNS, SwizzleType.NO_SWIZZLE),
        "mxfp8": (_swizzled, ScalingType.BlockWise1x32, ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4),
        "nvfp4": (_swizzled, ScalingType.BlockWise1x16, ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4),
    }.items()
}
"""The order of scales, the recipes of input and weight, and the swizzle, for `functional.scaled_mm`."""
