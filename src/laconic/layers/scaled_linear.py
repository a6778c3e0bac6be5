"""Linear layers whose weights train in high precision, and are gathered and multiplied in few bits with scales.

[Note: Scaled weights]
A `ScaledWeight` is a parameter that trains: a tensor in fp32 or bf16 that knows its format. `fully_shard` asks it for
blocks that it does not cut, so each rank encodes the whole blocks that it owns. Codes and scales cross the wire, rest
in the cache, and are joined behind the gather into a `ScaledTensor`, the weight of forward and backward. Both pass
`functional.linear` to `scaled_linear`; a `ScaledWeight` that is not sharded encodes itself first, so a model trains
alike with and without `fully_shard`. Any other operation on a `ScaledTensor` decodes it.

The product multiplies the codes (`torch.nn.functional.scaled_mm`) where the device can, and elsewhere decoded numbers:
the same function, but for the order of its sums. So its input is encoded too, in blocks of one row, unless the
converted model keeps inputs exact. Backward takes the gradient of the input from the decoded weight, and that of
the weight from the exact input, both in the input's dtype: encoding counts as the identity.

NVFP4 needs the largest magnitude of the whole weight. Its ranks find it by an all-reduce of one number per weight and
gather, and it stays with the weight that was gathered. Its input is encoded by the largest of this rank's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._pytree import tree_map_only

from laconic.layers.linear import output_layer, tied_parameters
from laconic.layers.scaled import ScaledFormat, ScaledName, scaled_format_named
from laconic.layout.granularity import Block

_aten = torch.ops.aten
_OF_PARAMETER = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.slice.Tensor, _aten._to_copy.default, _aten.new_zeros.default, _aten.empty_like.default,
    _aten._pin_memory.default,
}  # fmt: skip
"""The operations whose result is a `ScaledWeight` again: those that move or cut a parameter."""
_CUTS = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.unbind.int}
"""The operations by which DTensors and FSDP2 cut a parameter. Parts would be exact from then on, without a word."""


class ScaledWeight(Tensor):
    """A matrix that trains, and is gathered and multiplied in a format of few bits: [Note: Scaled weights]."""

    _elements: Tensor

    @staticmethod
    def __new__(cls, elements: Tensor, weight_format: ScaledFormat) -> ScaledWeight:
        """Hold `elements`, a matrix."""
        return Tensor._make_wrapper_subclass(cls, elements.shape, dtype=elements.dtype, device=elements.device)

    def __init__(self, elements: Tensor, weight_format: ScaledFormat) -> None:
        self._elements, self.weight_format = elements, weight_format

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledWeight({self._elements}, {self.weight_format.name})"

    def __tensor_flatten__(self) -> tuple[list[str], ScaledFormat]:
        return ["_elements"], self.weight_format

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: ScaledFormat, *_: Any) -> ScaledWeight:
        return cls(inner["_elements"], context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _linear_or(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _CUTS:
            raise ValueError(
                "a weight that trains in few bits is cut by laconic.fully_shard alone: its parts would be multiplied "
                "and cross the wire exactly. Leave the layer out of convert_to_scaled_training with module_filter_fn, "
                "or out of parallelize_module, distribute_tensor or torch's fully_shard"
            )
        formats: list[ScaledFormat] = []

        def unwrap(weight: ScaledWeight) -> Tensor:
            formats.append(weight.weight_format)
            return weight._elements

        plain_args, plain_kwargs = tree_map_only(cls, unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and args and isinstance(args[0], cls):
            return args[0]
        return cls(result, formats[0]) if func in _OF_PARAMETER else result

    @property
    def uncut_block(self) -> Block:
        """The rows that must lie on one rank; `fully_shard` asks for it: [Note: Conversion]."""
        return self.weight_format.uncut_block

    @torch.no_grad()
    def scaled(self) -> ScaledTensor:
        """Encode the whole matrix."""
        scale = self._matrix_scale(None)
        codes, scales = self.weight_format.quantize(self._elements, scale)
        return ScaledTensor(codes, scales, scale, self.weight_format, self.dtype)

    def _matrix_scale(self, mesh: DeviceMesh | None) -> Tensor | None:
        if not self.weight_format.has_matrix_scale:
            return None
        largest = self.weight_format.largest_of(self._elements)
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        return self.weight_format.matrix_scale(largest)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Encode this rank's rows, as FSDP2 asks: codes and scales to gather, and the scale of the matrix.

        Collective over `mesh` for formats with such a scale.
        """
        scale = self._matrix_scale(mesh)
        return self.weight_format.quantize(self._elements, scale), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[ScaledTensor, tuple[Tensor, ...]] | None:
        """Make the weight of forward out of gathered codes and scales, as FSDP2 asks. `out` holds both already.

        Raises:
            RuntimeError: there are other scales than the weight has blocks: ranks have cut blocks.
        """
        codes, scales = all_gather_outputs
        if out is not None:
            assert isinstance(out, ScaledTensor)
            if metadata is not None and out.matrix_scale is not None:
                out.matrix_scale.copy_(metadata)
            return None
        weight = ScaledTensor(codes, scales, metadata, self.weight_format, param_dtype)
        wanted = self.weight_format.scales_shape(weight.shape)
        if tuple(scales.shape) != wanted:
            raise RuntimeError(
                f"ranks made {tuple(scales.shape)} scales for a weight of shape {tuple(weight.shape)}, which has "
                f"{wanted} blocks in {self.weight_format.name}: they cut blocks. Use laconic.fully_shard, which keeps "
                f"{self.weight_format.uncut_block} whole"
            )
        return weight, (codes, scales)


class ScaledTensor(Tensor):
    """A matrix in a format of few bits: what forward and backward see of a `ScaledWeight`.

    It has the shape of the matrix, and the dtype in which operations other than `functional.linear` see its elements.
    """

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, weight_format: ScaledFormat, dtype: torch.dtype
    ) -> ScaledTensor:
        """Hold what `ScaledFormat.quantize` returned."""
        shape = (codes.shape[0], codes.shape[1] * (2 if weight_format.is_packed else 1))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        matrix_scale: Tensor | None,
        weight_format: ScaledFormat,
        dtype: torch.dtype,
    ) -> None:
        self.codes, self.scales, self.matrix_scale, self.weight_format = codes, scales, matrix_scale, weight_format

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledTensor({tuple(self.shape)}, {self.weight_format.name})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[ScaledFormat, torch.dtype]]:
        names = ["codes", "scales", "matrix_scale"]
        return names if self.matrix_scale is not None else names[:2], (self.weight_format, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[ScaledFormat, torch.dtype], *_: Any
    ) -> ScaledTensor:
        return cls(inner["codes"], inner["scales"], inner.get("matrix_scale"), *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _linear_or(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.alias.default):
            own = args[0]
            return cls(own.codes, own.scales, own.matrix_scale, own.weight_format, own.dtype)
        if func._schema.is_mutable and args and isinstance(args[0], cls):
            raise RuntimeError(
                f"{func} writes into a weight in {args[0].weight_format.name}, which is a copy of the one that trains. "
                "Call reshard() of the sharded module, and edit its parameter under torch.no_grad()"
            )
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Decode the matrix, in its own dtype or in `dtype`."""
        return self.weight_format.dequantize(self.codes, self.scales, self.matrix_scale, dtype or self.dtype)


def _linear_or(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func`, which gets a scaled tensor or weight: `functional.linear` as `scaled_linear`."""
    with torch._C.DisableTorchFunctionSubclass():
        if func is functional.linear:
            return scaled_linear(*args, **kwargs)
        return func(*args, **kwargs)


def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` of a `ScaledTensor` or `ScaledWeight`: [Note: Scaled weights].

    Shapes: input (..., n), weight (m, n), bias (m,) -> (..., m), in the dtype of the input, or of autocast.

    Reference: tests/reference/scaled.py.
    """
    if not isinstance(weight, ScaledWeight | ScaledTensor):  # it is the input or the bias that is one
        plain = [each.dequantize() if isinstance(each, ScaledTensor) else each for each in (input, bias)]
        return functional.linear(plain[0], weight, plain[1])  # type: ignore[arg-type]
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    output: Tensor = _ScaledProduct.apply(input, weight, None if bias is None else bias.to(input.dtype))
    return output


class _ScaledProduct(torch.autograd.Function):
    """input @ weight.T with a weight in few bits: [Note: Scaled weights]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: ScaledWeight | ScaledTensor, bias: Tensor | None) -> Tensor:
        scaled = weight.scaled() if isinstance(weight, ScaledWeight) else weight
        ctx.save_for_backward(input, weight)
        rows = input.reshape(-1, input.shape[-1])
        return _product(rows, scaled, bias).view(*input.shape[:-1], scaled.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        input_gradient = weight_gradient = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            scaled = weight.scaled() if isinstance(weight, ScaledWeight) else weight
            input_gradient = gradient @ scaled.dequantize(gradient.dtype)
        if ctx.needs_input_grad[1]:
            weight_gradient = (rows.t() @ input.reshape(-1, input.shape[-1])).to(weight.dtype)
        return input_gradient, weight_gradient, rows.sum(0) if ctx.needs_input_grad[2] else None


def _product(rows: Tensor, weight: ScaledTensor, bias: Tensor | None) -> Tensor:
    """Shapes: rows (k, n), weight (m, n), bias (m,) -> (k, m)."""
    if not weight.weight_format.scales_input:
        return functional.linear(rows, weight.dequantize(rows.dtype), bias)
    of_rows = weight.weight_format.of_rows
    scale = of_rows.matrix_scale(of_rows.largest_of(rows)) if of_rows.has_matrix_scale else None
    codes, scales = of_rows.quantize(rows, scale)
    if multiplies_codes(weight.weight_format, rows, weight.shape[0]):
        product = product_of_codes(codes, scales, scale, weight, rows.dtype)
        return product if bias is None else product + bias
    decoded = of_rows.dequantize(codes, scales, scale, rows.dtype)
    return functional.linear(decoded, weight.dequantize(rows.dtype), bias)


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
    codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, weight: ScaledTensor, dtype: torch.dtype
) -> Tensor:
    """Multiply the codes of an input, (k, n), by those of a weight, (m, n): (k, m), of `dtype`.

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


def convert_to_scaled_training(
    model: nn.Module,
    weight_format: ScaledName | ScaledFormat,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    scales_input: bool = True,
) -> nn.Module:
    """Let the linear layers of `model` train with weights in few bits, in place, and return it.

    Call it before `fully_shard`, as torchao's `convert_to_float8_training`. Weights train in their own dtype. Each step
    multiplies them in few bits, in which they also cross the wire and rest in the cache: [Note: Scaled weights]. The
    layers stay `nn.Linear`. The model may be on the meta device.

    Args:
        model: the model.
        weight_format: "fp8_128x128", "fp8_1x128", "fp8_1x128_e8m0", "mxfp8", "nvfp4", or a `ScaledFormat`.
        module_filter_fn: torchao's: of a linear layer and its name, True to convert it. Default: all but the output
            layer of a transformers model, and those whose weight is tied to another module's.
        scales_input: encode inputs, too, in blocks of one row, which lets the device multiply codes. False leaves them
            exact, and multiplies by the decoded weight everywhere.

    Raises:
        ValueError: `weight_format` is unknown; no layer is left to convert; the model is sharded already; or a layer's
            weight is tied, is cut by another parallelism, converts itself already, or has no blocks of the format.
    """
    chosen_format, tied = scaled_format_named(weight_format), tied_parameters(model)
    if not scales_input:
        chosen_format = replace(chosen_format, scales_input=False)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if module_filter_fn is None:
        last = output_layer(model)
        linears = {name: each for name, each in linears.items() if each is not last and each.weight not in tied}
    else:
        linears = {name: each for name, each in linears.items() if module_filter_fn(each, name)}
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to convert; module_filter_fn is {module_filter_fn!r}"
        )
    for name, linear in linears.items():
        if linear.weight in tied:
            raise ValueError(f"the weight of {name} is tied to another module's; leave it out with module_filter_fn")
        _check_plain(linear.weight, name, chosen_format)
    for linear in linears.values():
        elements = linear.weight.detach()
        weight = ScaledWeight(elements, chosen_format)
        linear.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    return model


def _check_plain(weight: Tensor, name: str, weight_format: ScaledFormat) -> None:
    if hasattr(weight, "to_local"):
        raise ValueError(
            f"the weight of {name} is cut over ranks already; call convert_to_scaled_training before fully_shard, and "
            "leave out with module_filter_fn what another parallelism cuts"
        )
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        raise ValueError(
            f"the weight of {name} is a {type(weight.data).__name__}, not a plain tensor; leave it out with "
            "module_filter_fn"
        )
    try:
        weight_format.check_shape(weight.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; leave it out with module_filter_fn") from error
