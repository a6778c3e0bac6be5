"""Formats of few bits in which matrices are multiplied: small floating-point numbers, and a scale for each block.

[Note: Scaled formats]
A format says which elements of a matrix share a scale, and in which bits elements and scales rest. A block's largest
magnitude takes the largest number of the format, so nothing is clipped. A block depends on its own elements alone, but
for NVFP4, whose scales are themselves multiples of one fp32 number per matrix. That number follows from the largest
magnitude of the whole matrix, which ranks that share a matrix must tell each other. So ranks that hold whole blocks
make the same bits as one process that holds the matrix. NaN or infinity makes its block NaN, and an NVFP4 matrix whole.

A stack of matrices, such as the weights of experts, is encoded as its rows one below the other. No block reaches from
one matrix into the next, and each matrix in NVFP4 has its own fp32 number. So a matrix has the same bits in any stack,
whichever ranks hold the others.

- *FP8 in blocks*, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3): e4m3 with an fp32 scale per 128 x 128 or 1 x 128.
  With e8m0 scales, which are powers of two, as in DeepSeek-V3.1, a 1 x 128 block takes three bytes less.
- *MXFP8* (OCP Microscaling 1.0): e4m3 with an e8m0 scale per 1 x 32. The scale is rounded up, as in arXiv 2506.08027,
  where OCP's own rule would clip the largest values.
- *NVFP4* (arXiv 2509.25149): e2m1, two values in a byte, with an e4m3 scale per 1 x 16, and one fp32 scale per matrix.

[Note: Shared blocks]
A block of 128 x 128 lies in 128 whole rows, so a rank must hold 128 rows to encode it alone. On thousands of ranks that
is many times a rank's share: 128 of the longest rows of Llama 405B have 6.8 million elements, a share of a layer on
10,240 ranks 0.3 million. With `shares_blocks` ranks may cut blocks anywhere. Each finds the largest magnitude of its
part of each block, an all-reduce of one fp32 number per block takes the largest of all, and then each rank encodes its
part as if it had the block. A maximum does not depend on its order, so codes and scales have the bits of whole blocks.
Codes are gathered alone and in their places, as all ranks know the scales by then. So the reduction replaces the gather
of scales. It is one message more that a gather must wait for, which nobody needs where blocks fit into shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.bits import pack_bits, unpack
from laconic.codec.blocked import E2M1
from laconic.codec.kernels import kernels_for
from laconic.codec.tiles import Grid
from laconic.layout.granularity import Block, elements, rows

ScaledName = Literal["fp8_128x128", "fp8_1x128", "fp8_1x128_e8m0", "mxfp8", "nvfp4"]

_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
_SMALLEST_SCALE = 2.0**-6  # the smallest normal number of e4m3: a smaller scale would lose bits
_MOST_IN_KERNELS = 128 * 128  # values of a block: a program has the whole of one
_SMALLEST_MAGNITUDE = 1e-12  # what a block of zeros counts as
_E8M0_BIAS, _E8M0_NAN = 127, 255


@dataclass(frozen=True, kw_only=True)
class ScaledFormat:
    """Which elements of a matrix share a scale, and the bits of elements and scales: [Note: Scaled formats].

    Raises:
        ValueError: a size is below 1; or scales of e4m3, which are relative to one of the matrix, are not those of
            e2m1 elements in blocks of one row and an even number of columns.
    """

    name: str
    height: int
    width: int
    element: Literal["e4m3", "e2m1"] = "e4m3"
    scale: Literal["fp32", "e8m0", "e4m3"] = "fp32"
    scales_input: bool = True
    """Encode the matrix that it multiplies, too: [Note: Scaled weights] in layers/scaled_linear.py."""
    sums_over: Literal["columns", "rows"] = "columns"
    """The index of a weight over which a product with it sums. Blocks of an input lie along the same index."""
    shares_blocks: bool = field(default=False, compare=False)
    """Ranks may cut blocks of several rows: [Note: Shared blocks]. The bits are the same, so such formats are equal."""

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1:
            raise ValueError(f"{self.name}: blocks of {self.height} x {self.width} cut nothing; sizes are at least 1")
        if (self.element == "e2m1") != (self.scale == "e4m3") or (
            self.is_packed and (self.height > 1 or self.width % 2)
        ):
            raise ValueError(
                f"{self.name}: {self.element} elements in blocks of {self.height} x {self.width} with {self.scale} "
                "scales are no format that laconic knows; e2m1 goes with e4m3 scales of 1 x 16, e4m3 with fp32 or e8m0"
            )

    @property
    def is_packed(self) -> bool:
        """True if a byte holds two elements."""
        return self.element == "e2m1"

    @property
    def has_matrix_scale(self) -> bool:
        """True if scales are multiples of one number per matrix, which follows from `largest_of` all of it."""
        return self.scale == "e4m3"

    @property
    def for_rows(self) -> ScaledFormat:
        """The format for weights of shape (n, m), of which a product takes columns: its blocks are turned.

        Raises:
            ValueError: two elements of a column do not share a byte.
        """
        if self.is_packed:
            raise ValueError(f"{self.name} packs two elements of a row, and this weight is multiplied by its columns")
        return replace(self, height=self.width, width=self.height, sums_over="rows")

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of codes: one for each element, or bytes with two."""
        return torch.uint8 if self.is_packed else _E4M3

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales."""
        return {"fp32": torch.float32, "e8m0": _E8M0, "e4m3": _E4M3}[self.scale]

    @property
    def agrees_on_scales(self) -> bool:
        """True if ranks may cut blocks, and agree on scales: [Note: Shared blocks]. A block of one row is never cut."""
        return self.shares_blocks and self.height > 1

    @property
    def uncut_block(self) -> Block:
        """The block that must lie on one rank, for `fully_shard(granularity=)`."""
        return elements(1) if self.agrees_on_scales else rows(self.height)

    @property
    def of_rows(self) -> ScaledFormat:
        """The format with blocks of one row: that of the matrix that multiplies one of this format."""
        width = self.width if self.sums_over == "columns" else self.height
        return replace(self, height=1, width=width, sums_over="columns")

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse a tensor that has no such blocks.

        Raises:
            ValueError: it is no matrix and no stack of them, is empty, or two of its elements in one byte would lie in
                different rows, or a block in two matrices.
        """
        if len(shape) not in (2, 3) or 0 in shape:
            raise ValueError(f"{self.name} is for matrices and stacks of them, got shape {tuple(shape)}")
        if len(shape) == 3 and shape[1] % self.height:
            raise ValueError(
                f"{self.name} needs matrices of a multiple of {self.height} rows in a stack, got shape {tuple(shape)}"
            )
        if self.is_packed and shape[1] % self.width:
            raise ValueError(f"{self.name} needs rows of a multiple of {self.width} elements, got shape {tuple(shape)}")

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the codes of a matrix, or of a stack."""
        return (*shape[:-1], shape[-1] // 2 if self.is_packed else shape[-1])

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a matrix, or of a stack. Blocks at an edge may be smaller."""
        return (*shape[:-2], -(-shape[-2] // self.height), -(-shape[-1] // self.width))

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of the codes and scales of a matrix, or of a stack, without the scale of the whole."""
        return math.prod(self.codes_shape(shape)) + math.prod(self.scales_shape(shape)) * self.scale_dtype.itemsize

    def largest_of(self, matrix: Tensor) -> Tensor:
        """The largest magnitude of a matrix, fp32, (), or of each of a stack, (e,); NaN if it has NaN."""
        return torch.linalg.vector_norm(matrix, ord=float("inf"), dim=(-2, -1)).to(torch.float32)

    def matrix_scale(self, largest: Tensor) -> Tensor:
        """The scales of matrices whose largest magnitudes are `largest`: fp32, of its shape."""
        return largest.clamp(min=_SMALLEST_MAGNITUDE) / (_LARGEST_E4M3 * _LARGEST_E2M1)

    def quantize(self, matrix: Tensor, matrix_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode a matrix, a stack of matrices, or some rows of one that cut no block.

        Shapes: matrix (m, n) or (e, m, n), real numbers -> codes of `codes_shape` and scales of `scales_shape`,
            contiguous. matrix_scale () or (e,), fp32: of each whole matrix, if the format has one.

        Reference: tests/reference/scaled.py, bit-equal.
        """
        matrix = matrix.contiguous()
        if matrix_scale is not None and matrix.ndim > 2:
            parts = [self.quantize(own, scale) for own, scale in zip(matrix, matrix_scale, strict=True)]
            return torch.stack([codes for codes, _ in parts]), _stacked([scales for _, scales in parts])
        if matrix.ndim > 2:
            codes, scales = self.quantize(matrix.view(-1, matrix.shape[-1]))
            return codes.view(self.codes_shape(matrix.shape)), scales.view(self.scales_shape(matrix.shape))
        scales = torch.empty(self.scales_shape(matrix.shape), dtype=self.scale_dtype, device=matrix.device)
        if (kernels := self._kernels(matrix)) is not None:
            codes = torch.empty(self.codes_shape(matrix.shape), dtype=self.code_dtype, device=matrix.device)
            kernels.encode(self, matrix, matrix_scale, codes, scales)
            return codes, scales
        codes = torch.empty_like(matrix, dtype=torch.uint8 if self.is_packed else self.code_dtype)
        grid = self._grid(matrix.shape)
        encode = _ENCODERS[self.scale]
        for panel in grid.panels(scales, is_whole=matrix.device.type != "cpu"):
            blocks = panel.read(matrix).to(torch.float32)
            own_codes, own_scales = encode(blocks, blocks.abs().amax((1, 3)), matrix_scale)
            panel.write(codes, own_codes)
            scales[panel.scales].copy_(own_scales)
        if self.is_packed:
            codes = pack_bits(codes.view(-1), 4).view(self.codes_shape(matrix.shape))
        return codes, scales

    def dequantize(
        self, codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Decode what `quantize` returned. Shapes: -> (m, n) or (e, m, n), of `dtype`."""
        if matrix_scale is not None and codes.ndim > 2:
            each = zip(codes, scales, matrix_scale, strict=True)
            return torch.stack([self.dequantize(*own, dtype) for own in each])
        if codes.ndim > 2:
            flat = self.dequantize(codes.flatten(0, -2), scales.flatten(0, -2), None, dtype)
            return flat.view(*codes.shape[:-1], -1)
        if (kernels := self._kernels(codes)) is not None:
            shape = codes.shape[0], codes.shape[1] * (2 if self.is_packed else 1)
            matrix = torch.empty(shape, dtype=dtype, device=codes.device)
            kernels.decode(self, codes.contiguous(), scales.contiguous(), matrix_scale, matrix)
            return matrix
        if self.is_packed:
            codes = unpack(codes.reshape(-1), 4).view(codes.shape[0], -1)
        matrix = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        grid, as_bytes = self._grid(codes.shape), codes.view(torch.uint8)
        decode = _decode_e2m1 if self.is_packed else _decode_e4m3
        for panel in grid.panels(scales, is_whole=codes.device.type != "cpu"):
            panel.write(matrix, decode(panel.read(as_bytes), scales[panel.scales], matrix_scale))
        return matrix

    def largest_by_block(self, run: Tensor, first: int, shape: Sequence[int]) -> Tensor:
        """The largest magnitude of each block in some elements of a weight: [Note: Shared blocks].

        It is zero for a block that they do not reach, and infinite for one with NaN, which a maximum over ranks could
        lose. Shapes: run (k,), elements [first, first + k) of a weight of `shape` -> `scales_shape`, fp32.
        """
        found = run.new_zeros(self.scales_shape(shape), dtype=torch.float32)
        largest = self._strips(run, first, shape).abs().amax(-1)
        row = first // shape[-1]
        above = row % self.height
        padded = functional.pad(largest, (0, 0, above, -(above + len(largest)) % self.height))
        bands = padded.unflatten(0, (-1, self.height)).amax(1)
        found.view(-1, bands.shape[1])[row // self.height :][: len(bands)] = bands
        return found.nan_to_num_(nan=math.inf, posinf=math.inf)

    def scales_of(self, largest: Tensor) -> Tensor:
        """The scales of blocks whose largest magnitudes are `largest`, fp32: of its shape."""
        return {"fp32": _scales_in_fp32, "e8m0": _scales_in_e8m0}[self.scale](largest)

    def quantize_run(self, run: Tensor, first: int, shape: Sequence[int], largest: Tensor) -> Tensor:
        """Encode some elements of a weight, of which `largest` has the largest magnitude of each whole block.

        Shapes: as `largest_by_block` -> codes (k,).

        Reference: the codes of `quantize`, bit-equal.
        """
        strips, row = self._strips(run, first, shape), first // shape[-1]
        bands = torch.arange(row, row + len(strips), device=run.device) // self.height
        of_rows = largest.view(-1, largest.shape[-1])[bands]
        codes, _ = _ENCODERS[self.scale](strips[:, None], of_rows, None)
        begin = first % shape[-1]
        return codes.flatten(1)[:, : shape[-1]].reshape(-1)[begin : begin + len(run)]

    def _strips(self, run: Tensor, first: int, shape: Sequence[int]) -> Tensor:
        """Elements from `first` on as the rows that they lie in, with zeros around them: (rows, a, width), fp32."""
        begin = first % shape[-1]
        rows_of_run = functional.pad(run.to(torch.float32), (begin, -(begin + len(run)) % shape[-1]))
        padded = functional.pad(rows_of_run.view(-1, shape[-1]), (0, -shape[-1] % self.width))
        return padded.unflatten(1, (-1, self.width))

    @property
    def has_kernels(self) -> bool:
        """Whether triton's kernels are for this format: sides are powers of two, as triton needs, and fit a program."""
        is_power = all(side & (side - 1) == 0 for side in (self.height, self.width))
        return is_power and self.height * self.width <= _MOST_IN_KERNELS

    def _kernels(self, tensor: Tensor) -> ModuleType | None:
        """The module of triton's kernels, if they are for this format and tensor: [Note: Kernels of codecs]."""
        return kernels_for(tensor, "layers.scaled_triton") if self.has_kernels else None

    def _grid(self, shape: Sequence[int]) -> Grid:
        return Grid(
            height=self.height,
            width=self.width,
            columns=shape[1],
            uncut=rows(self.height).numel(shape),
            scales_shape=self.scales_shape(shape),
        )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one byte an element in one; torch joins numbers of eight bits on no device."""
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _scales_in_fp32(largest: Tensor) -> Tensor:
    return largest.clamp(min=_SMALLEST_MAGNITUDE) / _LARGEST_E4M3


def _scales_in_e8m0(largest: Tensor) -> Tensor:
    """The powers of two from these of fp32 on."""
    ratios = _scales_in_fp32(largest)
    fractions, exponents = torch.frexp(ratios)  # 0.5 <= fraction < 1
    biased = (exponents.to(torch.int32) - (fractions == 0.5).to(torch.int32) + _E8M0_BIAS).clamp(1, 2 * _E8M0_BIAS - 1)
    return torch.where(ratios.isfinite(), biased, _E8M0_NAN).to(torch.uint8).view(_E8M0)


def _encode_with_fp32(blocks: Tensor, largest: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode blocks whose largest magnitudes are known.

    Shapes: blocks (d, height, a, width), fp32, largest (d, a) -> codes of the blocks' shape, and scales (d, a).
    """
    scales = _scales_in_fp32(largest)
    return (blocks / scales[:, None, :, None]).to(_E4M3), scales


def _encode_with_e8m0(blocks: Tensor, largest: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `_encode_with_fp32`, with powers of two for scales. Products round once."""
    scales = _scales_in_e8m0(largest)
    biased = scales.view(torch.uint8).to(torch.int32)
    inverses = ((2 * _E8M0_BIAS - biased).clamp(min=1) << 23).view(torch.float32)  # by the bits of fp32
    return (blocks * inverses[:, None, :, None]).to(_E4M3), scales


def _encode_with_e4m3(blocks: Tensor, largest: Tensor, matrix_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `_encode_with_fp32`, with codes of e2m1 in a byte each, and scales in multiples of the matrix's own.

    The order of products and quotients is that of NVIDIA's kernels.
    """
    assert matrix_scale is not None, "the scale of the whole matrix is needed"
    scales = largest / _LARGEST_E2M1 / matrix_scale
    rounded = scales.clamp(_SMALLEST_SCALE, _LARGEST_E4M3).to(_E4M3)
    inverses = matrix_scale.reciprocal() / rounded.to(torch.float32)
    values = blocks * inverses[:, None, :, None]
    codes = torch.bucketize(values.abs(), _e2m1_borders(blocks.device)).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3), rounded


_ENCODERS = {"fp32": _encode_with_fp32, "e8m0": _encode_with_e8m0, "e4m3": _encode_with_e4m3}


def _decode_e4m3(codes: Tensor, scales: Tensor, _: Tensor | None) -> Tensor:
    """Shapes: codes (d, height, a, width), uint8, and scales (d, a) -> values of the codes' shape, fp32."""
    return codes.view(_E4M3).to(torch.float32) * scales.to(torch.float32)[:, None, :, None]


def _decode_e2m1(codes: Tensor, scales: Tensor, matrix_scale: Tensor | None) -> Tensor:
    """As `_decode_e4m3`, from codes of e2m1 in a byte each."""
    assert matrix_scale is not None, "the scale of the whole matrix is needed"
    values = _e2m1_values(codes.device).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
    return values * (scales.to(torch.float32) * matrix_scale)[:, None, :, None]


def _e2m1_values(device: torch.device) -> Tensor:
    """The value of each code, (16,)."""
    positive = torch.tensor(E2M1, dtype=torch.float32, device=device) / 2
    return torch.cat([positive, -positive])


def _e2m1_borders(device: torch.device) -> Tensor:
    """The largest magnitude that is rounded to each code but the last, (7,): a tie takes the even code."""
    positive = torch.tensor(E2M1, dtype=torch.float32, device=device) / 2
    middle = (positive[1:] + positive[:-1]) / 2
    below = torch.nextafter(middle, torch.zeros_like(middle))
    return torch.where(torch.arange(7, device=device) % 2 == 0, middle, below)


_EACH = (
    ScaledFormat(name="fp8_128x128", height=128, width=128),
    ScaledFormat(name="fp8_1x128", height=1, width=128),
    ScaledFormat(name="fp8_1x128_e8m0", height=1, width=128, scale="e8m0"),
    ScaledFormat(name="mxfp8", height=1, width=32, scale="e8m0"),
    ScaledFormat(name="nvfp4", height=1, width=16, element="e2m1", scale="e4m3"),
)
SCALED_FORMATS: dict[str, ScaledFormat] = {each.name: each for each in _EACH}
"""The formats, by name."""


def scaled_format_named(given: str | ScaledFormat) -> ScaledFormat:
    """The format of a name; a `ScaledFormat` is returned as it is.

    Raises:
        ValueError: no format has the name.
    """
    if isinstance(given, ScaledFormat):
        return given
    if given not in SCALED_FORMATS:
        raise ValueError(
            f"weight_format={given!r} is not known; use one of {', '.join(SCALED_FORMATS)}, or a ScaledFormat"
        )
    return SCALED_FORMATS[given]
