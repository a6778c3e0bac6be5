"""Weights that train in high precision, and are gathered and multiplied in few bits with scales.

[Note: Scaled weights]
A `ScaledWeight` is a parameter that trains: a tensor in fp32 or bf16 that knows its format. `fully_shard` asks it for
blocks that it does not cut, so each rank encodes the whole blocks that it owns. Codes and scales cross the wire, rest
in the cache, and are joined behind the gather into a `ScaledTensor`, the weight of forward and backward. A
`ScaledWeight` that is not sharded encodes itself first, so a model trains alike with and without `fully_shard`.

Products with either are `scaled_linear` and its like for stacks, whatever function of torch asks for them: `linear`,
`matmul`, `bmm`, `grouped_mm`, of the weight, of its transpose, or of some matrices of a stack. Any other product raises
an error, as it would multiply the exact weight, or decoded numbers by an input that is not encoded. Operations that
multiply nothing see a `ScaledTensor` decoded.

The product multiplies the codes (`torch.nn.functional.scaled_mm`) where the device can, and elsewhere decoded numbers:
the same function, but for the order of its sums. So its input is encoded too, in blocks of one row, unless the
converted model keeps inputs exact. Backward takes the gradient of the input from the decoded weight, and that of
the weight from the exact input, both in the input's dtype: encoding counts as the identity. Stacks are multiplied as
decoded numbers on every device.

NVFP4 needs the largest magnitude of each matrix. Its ranks find it by an all-reduce of one number per matrix and
gather, and it stays with the weight that was gathered. Its input is encoded by the largest of this rank's input. So do
the scales of a format whose blocks ranks share: [Note: Shared blocks] in layers/scaled.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from laconic.layers.scaled import ScaledFormat
from laconic.layers.scaled_codes import multiplies_codes, product_of_codes
from laconic.layout.granularity import Block

_aten = torch.ops.aten
_OF_PARAMETER = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.slice.Tensor, _aten._to_copy.default, _aten.new_zeros.default, _aten.empty_like.default,
    _aten._pin_memory.default,
}  # fmt: skip
"""The operations whose result is a `ScaledWeight` again: those that move or cut a parameter."""
_CUTS = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.unbind.int}
"""The operations by which DTensors and FSDP2 cut a parameter. Parts of a matrix would be exact from then on."""
_MULTIPLY = {
    _aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.addmm.default, _aten.baddbmm.default,
    _aten.addbmm.default, _aten.addmv.default, _aten.linear.default, _aten.matmul.default,
    _aten._grouped_mm.default, _aten.convolution.default,
}  # fmt: skip
"""The products of torch, which reach a weight here if nothing above has known them."""
_Pick = Callable[[Tensor], Tensor]


class _Uses(threading.local):
    """The uses of scaled weights by this thread so far, for `convert_to_scaled_training`."""

    products = 0
    """As [Note: Scaled weights] has them."""
    decodings = 0
    """Operations that got numbers, and may have multiplied them in another way."""


uses = _Uses()


class ScaledWeight(Tensor):
    """A matrix that trains, or a stack of them, gathered and multiplied in few bits: [Note: Scaled weights]."""

    _elements: Tensor
    weight_format: ScaledFormat
    whole_shape: tuple[int, ...]
    """The shape of the whole weight, of which this may hold some elements alone."""
    first_element: int
    """The place of these elements in the weight, flattened; `fully_shard` sets it: [Note: Conversion]."""

    @staticmethod
    def __new__(
        cls, elements: Tensor, weight_format: ScaledFormat, whole_shape: Sequence[int] | None = None
    ) -> ScaledWeight:
        """Hold `elements`, a matrix, a stack of matrices, or some elements of one of this `whole_shape`."""
        self = Tensor._make_wrapper_subclass(cls, elements.shape, dtype=elements.dtype, device=elements.device)
        self._elements, self.weight_format, self.first_element = elements, weight_format, 0
        self.whole_shape = tuple(elements.shape if whole_shape is None else whole_shape)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledWeight({self._elements}, {self.weight_format.name})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[ScaledFormat, tuple[int, ...]]]:
        return ["_elements"], (self.weight_format, self.whole_shape)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[ScaledFormat, tuple[int, ...]], *_: Any
    ) -> ScaledWeight:
        return cls(inner["_elements"], *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _multiplied_or(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0] if args and isinstance(args[0], cls) else None
        is_stack = weight is not None and weight.ndim == 3
        if weight is not None and is_stack and (pick := _pick_by(func, args[1:])) is not None:
            return cls(pick(weight._elements), weight.weight_format)
        place_of_dim = 1 if func is _aten.unbind.int else 2
        is_of_stack = is_stack and func in _CUTS and (args[place_of_dim:] or [0])[0] == 0  # between its matrices
        if func in _CUTS and not is_of_stack:
            raise ValueError(
                "a weight that trains in few bits is cut by laconic.fully_shard alone: its parts would be multiplied "
                "and cross the wire exactly. Leave the layer out of convert_to_scaled_training with module_filter_fn, "
                "or out of parallelize_module, distribute_tensor or torch's fully_shard"
            )
        found: list[ScaledWeight] = []

        def unwrap(each: ScaledWeight) -> Tensor:
            found.append(each)
            return each._elements

        plain_args, plain_kwargs = tree_map_only(cls, unwrap, (args, kwargs or {}))
        if func in _MULTIPLY:
            _refuse_product(func, found[0].weight_format)
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and weight is not None:
            return weight
        if func is _aten.unbind.int:
            return [cls(matrix, found[0].weight_format) for matrix in result]
        if func in _OF_PARAMETER or is_of_stack:
            shape = None if is_of_stack else found[0].whole_shape
            return tree_map_only(Tensor, lambda part: cls(part, found[0].weight_format, shape), result)
        uses.decodings += 1
        return result

    @property
    def uncut_block(self) -> Block:
        """The block that must lie on one rank; `fully_shard` asks for it: [Note: Conversion]."""
        return self.weight_format.uncut_block

    @property
    def converts_parts(self) -> bool:
        """True if a part that another parallelism has cut off converts itself alone: some matrices of a stack do."""
        return len(self.whole_shape) == 3

    @torch.no_grad()
    def scaled(self) -> ScaledTensor:
        """Encode the whole matrix or stack."""
        largest = self.weight_format.largest_of(self._elements) if self.weight_format.has_matrix_scale else None
        scale = None if largest is None else self.weight_format.matrix_scale(largest)
        codes, scales = self.weight_format.quantize(self._elements, scale)
        return ScaledTensor(codes, scales, scale, self.weight_format, self.dtype)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Encode this rank's rows, as FSDP2 asks: codes and scales to gather, and the scale of each matrix.

        Of blocks that ranks share, codes alone, and all scales. Collective over `mesh` in these two cases.
        """
        if self.weight_format.agrees_on_scales:
            return self._share_blocks(mesh)
        rows = self._elements.reshape(-1, self.whole_shape[-1])
        if not self.weight_format.has_matrix_scale:
            return self.weight_format.quantize(rows), None
        parts = self._rows_by_matrix(rows)
        largest = rows.new_zeros(self.whole_shape[:-2], dtype=torch.float32)
        for index, part in parts:
            largest[index] = self.weight_format.largest_of(part)
        _take_largest(largest, mesh)
        scale = self.weight_format.matrix_scale(largest)
        encoded = [self.weight_format.quantize(part, scale[index]) for index, part in parts]
        codes, scales = zip(*encoded, strict=True)
        return (torch.cat(codes), torch.cat([each.view(torch.uint8) for each in scales]).view(scales[0].dtype)), scale

    def _share_blocks(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor]:
        """Encode this rank's part of each block: [Note: Shared blocks] in layers/scaled.py."""
        place = self._elements.reshape(-1), self.first_element, self.whole_shape
        largest = self.weight_format.largest_by_block(*place)
        _take_largest(largest, mesh)
        return (self.weight_format.quantize_run(*place, largest),), self.weight_format.scales_of(largest)

    def _rows_by_matrix(self, rows: Tensor) -> list[tuple[Any, Tensor]]:
        """This rank's rows of each matrix, with the index of the matrix: of a stack, () of a matrix alone."""
        if len(self.whole_shape) < 3:
            return [((), rows)]
        height, first = self.whole_shape[1], self.first_element // self.whole_shape[-1]
        sizes = [min(height - first % height, len(rows))]
        while (left := len(rows) - sum(sizes)) > 0:
            sizes.append(min(height, left))
        return list(enumerate(rows.split(sizes), start=first // height))

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
        if self.weight_format.agrees_on_scales:
            assert metadata is not None
            if out is not None:
                assert isinstance(out, ScaledTensor)
                out.scales.view(torch.uint8).copy_(metadata.view(torch.uint8))
                return None
            scales = metadata.clone()  # for as long as the codes are there
            codes = all_gather_outputs[0].view(self.whole_shape)
            return ScaledTensor(codes, scales, None, self.weight_format, param_dtype), (codes, scales)
        codes, scales = all_gather_outputs
        if out is not None:
            assert isinstance(out, ScaledTensor)
            if metadata is not None and out.matrix_scale is not None:
                out.matrix_scale.copy_(metadata)
            return None
        wanted = self.weight_format.scales_shape(self.whole_shape)
        if scales.numel() != math.prod(wanted):
            raise RuntimeError(
                f"ranks made {tuple(scales.shape)} scales for a weight of shape {self.whole_shape}, which has "
                f"{wanted} blocks in {self.weight_format.name}: they cut blocks. Use laconic.fully_shard, which keeps "
                f"{self.weight_format.uncut_block} whole"
            )
        codes, scales = codes.view(self.weight_format.codes_shape(self.whole_shape)), scales.view(wanted)
        return ScaledTensor(codes, scales, metadata, self.weight_format, param_dtype), (codes, scales)


def _take_largest(largest: Tensor, mesh: DeviceMesh) -> None:
    """Replace each number by the largest of all ranks. Collective."""
    if mesh.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())


class ScaledTensor(Tensor):
    """A matrix, or a stack of them, in few bits: what forward and backward see of a `ScaledWeight`.

    It has the shape of the weight, and the dtype in which operations that multiply nothing see its elements.
    """

    codes: Tensor
    scales: Tensor
    matrix_scale: Tensor | None
    weight_format: ScaledFormat
    is_turned: bool
    """True of a transpose: codes and scales are those of the weight, and the last two dims are swapped."""

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor,
        matrix_scale: Tensor | None,
        weight_format: ScaledFormat,
        dtype: torch.dtype,
        is_turned: bool = False,
    ) -> ScaledTensor:
        """Hold what `ScaledFormat.quantize` returned."""
        shape = [*codes.shape[:-1], codes.shape[-1] * (2 if weight_format.is_packed else 1)]
        if is_turned:
            shape[-2:] = shape[:-3:-1]
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        self.codes, self.scales, self.matrix_scale = codes, scales, matrix_scale
        self.weight_format, self.is_turned = weight_format, is_turned
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledTensor({tuple(self.shape)}, {self.weight_format.name})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[ScaledFormat, torch.dtype, bool]]:
        names = ["codes", "scales", "matrix_scale"]
        own = names if self.matrix_scale is not None else names[:2]
        return own, (self.weight_format, self.dtype, self.is_turned)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[ScaledFormat, torch.dtype, bool], *_: Any
    ) -> ScaledTensor:
        return cls(inner["codes"], inner["scales"], inner.get("matrix_scale"), *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _multiplied_or(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and (view := own._view_by(func, args[1:])) is not None:
            return view
        if func._schema.is_mutable and own is not None:
            raise RuntimeError(
                f"{func} writes into a weight in {own.weight_format.name}, which is a copy of the one that trains. "
                "Call reshard() of the sharded module, and edit its parameter under torch.no_grad()"
            )
        found: list[ScaledTensor] = []

        def decode(each: ScaledTensor) -> Tensor:
            found.append(each)
            return each.dequantize()

        plain_args, plain_kwargs = tree_map_only(cls, decode, (args, kwargs or {}))
        if func in _MULTIPLY:
            _refuse_product(func, found[0].weight_format)
        uses.decodings += 1
        return func(*plain_args, **plain_kwargs)

    def _view_by(self, func: Any, args: Sequence[Any]) -> Any:
        """What an operation that multiplies nothing makes of the weight in few bits; None if it must be decoded."""
        is_itself = func is _aten.view.default and tuple(args[0]) == tuple(self.shape)  # `DTensor.to_local` asks for it
        if is_itself or func in (_aten.detach.default, _aten.alias.default):
            return self._with(lambda part: part)
        if self._is_turn(func, args):
            return self._with(lambda part: part, turns=True)
        if self.ndim < 3:
            return None
        if func is _aten.unbind.int and [*args, 0][0] == 0:
            return [self._with(partial(_part_at, index)) for index in range(len(self.codes))]
        pick = _pick_by(func, args)
        return None if pick is None else self._with(pick)

    def _is_turn(self, func: Any, args: Sequence[Any]) -> bool:
        """True if an operation swaps the last two dims."""
        dims, last = list(range(self.ndim)), [self.ndim - 2, self.ndim - 1]
        if func is _aten.permute.default:
            return [each % self.ndim for each in args[0]] == [*dims[:-2], *reversed(last)]
        is_swap = func is _aten.transpose.int and sorted(each % self.ndim for each in args[:2]) == last
        return is_swap or (func is _aten.t.default and self.ndim == 2)

    def _with(self, change: _Pick, *, turns: bool = False) -> ScaledTensor:
        scale = None if self.matrix_scale is None else change(self.matrix_scale)
        return ScaledTensor(
            change(self.codes), change(self.scales), scale, self.weight_format, self.dtype, self.is_turned != turns
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Decode it, in its own dtype or in `dtype`."""
        decoded = self.weight_format.dequantize(self.codes, self.scales, self.matrix_scale, dtype or self.dtype)
        return decoded.transpose(-2, -1) if self.is_turned else decoded


def _pick_by(func: Any, args: Sequence[Any]) -> _Pick | None:
    """The choice of matrices of a stack that an operation makes; None if it makes another one, or none."""
    if func is _aten.select.int and args[0] == 0:
        return partial(_part_at, args[1])
    is_index = func is _aten.index.Tensor and len(args[0]) == 1 and args[0][0].dtype is torch.int64
    return partial(_part_at, args[0][0]) if is_index else None


def _part_at(index: int | Tensor, stack: Tensor) -> Tensor:
    """Some matrices of a stack; torch does not pick numbers of eight bits on every device."""
    return stack.view(torch.uint8)[index].view(stack.dtype) if stack.itemsize == 1 else stack[index]


def _refuse_product(func: Any, weight_format: ScaledFormat) -> None:
    raise ValueError(
        f"{func} would multiply by a weight in {weight_format.name} as it is not meant: laconic knows linear, matmul, "
        "bmm and grouped_mm of whole weights, their transposes, and matrices of a stack. Leave the layer out of "
        "convert_to_scaled_training with module_filter_fn"
    )


# -- products ----------------------------------------------------------------------------------------------------------


def _multiplied_or(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func`, which gets a scaled tensor or weight: products as those below."""
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name in _PRODUCTS:
            return _PRODUCTS[name](*args, **kwargs)
        if name in _TURNS or func in (Tensor.mT.__get__, Tensor.T.__get__):  # type: ignore[attr-defined]
            args = [_encoded(each) for each in args]
        return func(*args, **kwargs)


class _Encode(torch.autograd.Function):
    """A weight in few bits, whose encoding counts as the identity in backward."""

    @staticmethod
    def forward(ctx: Any, weight: ScaledWeight) -> Tensor:
        return weight.scaled()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _encoded(weight: Any) -> Any:
    encoded: Tensor = _Encode.apply(weight) if isinstance(weight, ScaledWeight) else weight
    return encoded


def _is_scaled(tensor: Any) -> bool:
    return isinstance(tensor, ScaledWeight | ScaledTensor)


def _ready(input: Tensor, weight: Tensor) -> Tensor:
    """The input as a product takes it: in the dtype of autocast.

    Raises:
        ValueError: the product sums over the wrong index of the weight: its blocks do not lie along that.
    """
    if not torch.compiler.is_compiling():  # else each call would be compiled anew
        uses.products += 1
    is_turned = isinstance(weight, ScaledTensor) and weight.is_turned
    weight_format: ScaledFormat = weight.weight_format  # type: ignore[attr-defined]
    if (weight_format.sums_over == "rows") != is_turned:
        raise ValueError(
            f"a product sums over the {'rows' if is_turned else 'columns'} of a weight in {weight_format.name}, whose "
            f"blocks lie along its {weight_format.sums_over}; leave the layer out of convert_to_scaled_training with "
            "module_filter_fn"
        )
    kind = input.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return input.to(torch.get_autocast_dtype(kind)) if is_cast else input


def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` of a `ScaledTensor` or `ScaledWeight`: [Note: Scaled weights].

    Shapes: input (..., n), weight (m, n), bias (m,) -> (..., m), in the dtype of the input, or of autocast.

    Raises:
        ValueError: the blocks of the weight do not lie along its last dim.

    Reference: tests/reference/scaled.py.
    """
    if not _is_scaled(weight):  # it is the input or the bias that is one
        plain = [each.dequantize() if isinstance(each, ScaledTensor) else each for each in (input, bias)]
        return functional.linear(plain[0], weight, plain[1])  # type: ignore[arg-type]
    input = _ready(input, weight)
    output: Tensor = _ScaledProduct.apply(input, weight, None if bias is None else bias.to(input.dtype))
    return output


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, of which one is a scaled weight."""
    if _is_scaled(right):
        weight = _encoded(right).transpose(-2, -1)
        return scaled_linear(left, weight) if weight.ndim == 2 else _batched(left, weight)
    turned = right.transpose(-2, -1)
    product = scaled_linear(turned, left) if left.ndim == 2 else _batched(turned, _encoded(left))
    return product.transpose(-2, -1)


def _batched(input: Tensor, weight: Tensor) -> Tensor:
    """Multiply by matrix after matrix. Shapes: input (e, k, n), weight (e, m, n) -> (e, k, m)."""
    output: Tensor = _StackProduct.apply(_ready(input, weight), weight, None)
    return output


def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor, **options: Any) -> Tensor:
    """`functional.grouped_mm`. Shapes: input (k, n), weight (e, n, m), offs (e,) -> (k, m)."""
    if options.get("bias") is not None or options.get("out_dtype") not in (None, input.dtype):
        _refuse_product("grouped_mm with a bias or another dtype", weight.weight_format)  # type: ignore[attr-defined]
    weight = _encoded(weight).transpose(-2, -1)
    output: Tensor = _StackProduct.apply(_ready(input, weight), weight, offs)
    return output


_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": scaled_linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "__rmatmul__": lambda right, left: _matmul(left, right),
    "mm": _matmul,
    "bmm": _matmul,
    "grouped_mm": _grouped_mm,
    "_grouped_mm": _grouped_mm,
}
"""The products that a function of torch asks for, by its name."""
_TURNS = {"transpose", "permute", "t", "swapaxes", "swapdims"}
"""The functions before which a weight that trains must encode itself, as its blocks lie along its own rows."""


class _ScaledProduct(torch.autograd.Function):
    """input @ weight.T with a matrix in few bits: [Note: Scaled weights]."""

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


class _StackProduct(torch.autograd.Function):
    """Products with the matrices of a stack: of a batch of inputs, or of the rows of one input in groups."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: ScaledTensor, offs: Tensor | None) -> Tensor:
        """Shapes: weight (e, m, n); input (e, k, n) -> (e, k, m), or with `offs`, (e,), (k, n) -> (k, m)."""
        ctx.save_for_backward(input, weight, offs)
        shown = input
        if weight.weight_format.scales_input:
            shown = _shown(input.reshape(-1, input.shape[-1]), weight).view(input.shape)
        return _each(shown, weight.dequantize(input.dtype).transpose(-2, -1), offs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, offs = ctx.saved_tensors
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = _each(gradient, weight.dequantize(gradient.dtype), offs)
        if ctx.needs_input_grad[1]:
            weight_gradient = _each(gradient.transpose(-2, -1), input, offs).to(weight.dtype)
        return input_gradient, weight_gradient, None


def _each(left: Tensor, right: Tensor, offs: Tensor | None) -> Tensor:
    return torch.bmm(left, right) if offs is None else functional.grouped_mm(left, right, offs=offs)


def _codes_of(rows: Tensor, weight: ScaledTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The codes, the scales and the matrix scale of an input, (k, n), of a product with a weight."""
    of_rows = weight.weight_format.of_rows
    scale = of_rows.matrix_scale(of_rows.largest_of(rows)) if of_rows.has_matrix_scale else None
    return *of_rows.quantize(rows, scale), scale


def _shown(rows: Tensor, weight: ScaledTensor) -> Tensor:
    """An input as its codes show it. Shapes: (k, n) -> (k, n)."""
    return weight.weight_format.of_rows.dequantize(*_codes_of(rows, weight), rows.dtype)


def _product(rows: Tensor, weight: ScaledTensor, bias: Tensor | None) -> Tensor:
    """Shapes: rows (k, n), weight (m, n), bias (m,) -> (k, m)."""
    if weight.weight_format.scales_input and multiplies_codes(weight.weight_format, rows, weight.shape[0]):
        product = product_of_codes(*_codes_of(rows, weight), weight, rows.dtype)
        return product if bias is None else product + bias
    shown = _shown(rows, weight) if weight.weight_format.scales_input else rows
    return functional.linear(shown, weight.dequantize(rows.dtype), bias)
