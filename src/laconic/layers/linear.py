"""Linear layers whose frozen weights rest in few bits, as in QLoRA (arXiv 2305.14314).

[Note: Frozen weights in few bits]
A `QuantizedLinear` keeps codes and scales, and decodes its weight in every forward and once more in every backward. So
between the two only codes are alive, and of decoded weights one layer's at a time. Codes and scales are parameters that
never train. `fully_shard` cuts, gathers and caches their bytes like those of any frozen parameter: ZeRO-3's memory, a
quarter of the bytes on the wire, and these only once in a run. Scales are bf16 numbers, stored as bytes. So mixed
precision and `model.to(dtype)`, which change floating-point tensors alone, leave them as they are, and codes and scales
share one bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.codec import WEIGHT_CODECS, BlockCodec

WeightFormat = Literal["nf4", "int8"]

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_CHUNK_NUMEL = 2**22
"""The elements that are decoded at once: 16 MiB for each fp32 temporary."""


class DecodedWeight(Tensor):
    """A copy of a `QuantizedLinear`'s weight. An edit in place, such as peft's merging, would be lost: it raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on a plain tensor.

        Raises:
            RuntimeError: `func` writes into the copy.
        """
        if args and isinstance(args[0], cls):
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                return args[0]
            name = func.__name__
            is_in_place = (name.endswith("_") and not name.startswith("_")) or name in _IN_PLACE
            if is_in_place or func == Tensor.data.__set__:  # type: ignore[attr-defined]
                raise RuntimeError(
                    "a quantised weight was edited in place, or an adapter merged into it: that would change a decoded "
                    "copy only. Replace the layer by layer.dequantized() first"
                )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in few bits: [Note: Frozen weights in few bits].

    It is an `nn.Linear`, so peft puts LoRA and DoRA around it. It computes in the dtype of its input, or of autocast.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_format: WeightFormat = "nf4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with empty codes. `dtype` is that of the bias and of the decoded `weight`."""
        nn.Module.__init__(self)  # nn.Linear's own would allocate a weight
        self.in_features, self.out_features = in_features, out_features
        self.weight_format, self.codec = weight_format, WEIGHT_CODECS[weight_format]
        self.dtype = dtype or torch.get_default_dtype()
        numel = in_features * out_features
        sizes = self.codec.code_bytes(numel), 2 * self.codec.num_blocks(numel)
        codes, scales = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        self.weight_codes = nn.Parameter(codes, requires_grad=False)
        """The codes of the flattened weight, block by block."""
        self.weight_scales = nn.Parameter(scales, requires_grad=False)
        """The bytes of the blocks' bf16 scales."""
        self.bias: nn.Parameter | None  # type: ignore[assignment]
        empty = torch.empty(out_features, device=device, dtype=self.dtype) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty, requires_grad=False))

    @classmethod
    def of(cls, linear: nn.Linear, weight_format: WeightFormat = "nf4") -> QuantizedLinear:
        """Quantise a linear layer. The new layer has the very parameter of its bias.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        weight = linear.weight.detach()
        settings: dict[str, Any] = {"weight_format": weight_format, "device": weight.device, "dtype": weight.dtype}
        self = cls(linear.in_features, linear.out_features, bias=False, **settings)
        self.register_parameter("bias", linear.bias)
        if not weight.is_meta:
            codes, scales = self.encode(weight)
            self.weight_codes.copy_(codes)
            self.weight_scales.copy_(scales)
        return self.train(linear.training)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `nn.Module`. `parallelize_module` comes here.

        Raises:
            ValueError: the parameter is another weight.
        """
        if name == "weight":
            raise ValueError(
                f"this layer has a frozen weight in {self.weight_format} and takes no other: leave it out of "
                "quantize_, or out of the plan of parallelize_module"
            )
        super().register_parameter(name, param)

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and the scales, as bytes, of a weight or of some whole blocks of it, in any shape.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"cannot quantise a weight with NaN or infinity to {self.weight_format}; check the model")
        codes, scales = self.codec.quantize(weight.detach().to(torch.float32).reshape(-1))
        return codes, scales.view(torch.uint8)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The decoded weight, (out_features, in_features), in `dtype`: a copy, made anew at each call and read-only.

        While a loader shows a plain weight among the parameters, it is that one.
        """
        plain = self._parameters.get("weight")
        if plain is not None:
            return plain
        with torch.no_grad():
            decoded = self.decode(self.weight_codes, self.weight_scales, self.dtype)
        if torch.compiler.is_compiling() or type(decoded) is not Tensor:  # fake tensors cannot become another class
            return decoded
        return decoded.as_subclass(DecodedWeight)

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight, (out_features, in_features), that `encode` made into plain tensors of codes and scales."""
        shape = (self.out_features, self.in_features)
        if codes.is_meta:
            return torch.empty(shape, dtype=dtype, device=codes.device)
        return _decode(self.codec, codes, scales, shape, dtype)

    def dequantized(self) -> nn.Linear:
        """A plain linear layer with the decoded weight."""
        settings: dict[str, Any] = {"device": self.weight_codes.device, "dtype": self.dtype}
        plain = nn.Linear(self.in_features, self.out_features, bias=False, **settings).train(self.training)
        decoded = self.decode(self.weight_codes.detach(), self.weight_scales.detach(), self.dtype)
        plain.weight = nn.Parameter(decoded, requires_grad=False)
        plain.register_parameter("bias", self.bias)
        return plain

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`. Shapes: (..., in_features) -> (..., out_features)."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        shape = (self.out_features, self.in_features)
        return _Linear.apply(input, self.weight_codes, self.weight_scales, bias, self.codec, shape)

    def extra_repr(self) -> str:
        """See `nn.Module.extra_repr`."""
        return f"{super().extra_repr()}, weight_format={self.weight_format!r}"


class _Linear(torch.autograd.Function):
    """`functional.linear` with a coded weight: [Note: Frozen weights in few bits]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        codec: BlockCodec,
        shape: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.codec, ctx.shape = codec, shape
        return functional.linear(input, _decode(codec, codes, scales, shape, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, scales = ctx.saved_tensors
        input_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = gradient @ _decode(ctx.codec, codes, scales, ctx.shape, gradient.dtype)
        if ctx.needs_input_grad[3]:
            bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return input_gradient, None, None, bias_gradient, None, None


def _decode(codec: BlockCodec, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Decode some blocks at a time. Shapes: codes and scales as bytes -> `shape`."""
    numel = shape[0] * shape[1]
    weight = torch.empty(numel, dtype=dtype, device=codes.device)
    scales = scales.clone().view(torch.bfloat16)  # a gathered parameter may begin at an odd byte
    step = _CHUNK_NUMEL // codec.block * codec.block
    for start in range(0, numel, step):
        part = weight[start : start + step]
        first, begin = start // codec.block, codec.code_bytes(start)
        part_codes = codes[begin : begin + codec.code_bytes(part.numel())]
        part_scales = scales[first : first + codec.num_blocks(part.numel())]
        codec.dequantize_into(part, part_codes, part_scales)
    return weight.view(shape)


def quantize_(
    model: nn.Module, weight_format: WeightFormat = "nf4", *, skip: Collection[str] | None = None
) -> nn.Module:
    """Replace the linear layers of `model` by frozen `QuantizedLinear`s, in place, and return it.

    Call it before adapters are added and before `fully_shard`. `nf4` takes 4.25 bits per weight, `int8` 8.25.
    Embeddings, norms, fused experts and a linear layer whose weight is tied to another module's stay as they are. The
    model may be on the meta device; then load the codes afterwards. Memory peaks at one decoded weight.

    Args:
        model: the model.
        weight_format: "nf4", sixteen quantiles, or "int8", 255 even steps; both in blocks of 64 with a bf16 scale.
        skip: layers to leave alone, by the last part of their names or by patterns (as in `fnmatch`) of whole names.
            Default: the output layer of a transformers model, whose error would go directly into the loss. If the
            output layer is a large part of the model, `skip=()` saves more.

    Raises:
        ValueError: `weight_format` is unknown; nothing is left to quantise; an item of `skip` matches no linear layer;
            the model is sharded already; or a weight is not finite.
    """
    if weight_format not in WEIGHT_CODECS:
        known = ", ".join(map(repr, WEIGHT_CODECS))
        raise ValueError(f"weight_format={weight_format!r} is not known; use one of {known}")
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if any(hasattr(module.weight, "to_local") for module in linears.values()):
        raise ValueError("quantize_ needs plain weights, but this model is sharded; call quantize_ before fully_shard")
    chosen = _without_skipped(model, linears, skip)
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantise: it has {len(linears)} of torch.nn.Linear, and "
            f"skip is {skip!r}"
        )
    for name, linear in chosen.items():
        parent, _, attribute = name.rpartition(".")
        try:
            setattr(model.get_submodule(parent), attribute, QuantizedLinear.of(linear, weight_format))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return model


def _without_skipped(
    model: nn.Module, linears: dict[str, nn.Linear], skip: Collection[str] | None
) -> dict[str, nn.Linear]:
    """The layers to quantise: not skipped, not the model itself, and not tied."""
    skipped: set[str] = {""}
    if skip is None:
        last = output_layer(model)
        skipped |= {name for name, module in linears.items() if module is last}
    for pattern in skip or ():
        found = {name for name in linears if name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern)}
        if not found:
            names = sorted({name.rpartition(".")[2] for name in linears})
            raise ValueError(f"skip: {pattern!r} matches no linear layer; they are {', '.join(names) or 'none'}")
        skipped |= found
    tied = tied_parameters(model)
    return {name: linear for name, linear in linears.items() if name not in skipped and linear.weight not in tied}


def output_layer(model: nn.Module) -> nn.Module | None:
    """The output layer of a transformers model; None if it has none, or is another model."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    return find()


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that several modules of a model show."""
    shown = Counter(each for module in model.modules() for each in module._parameters.values() if each is not None)
    return {parameter for parameter, count in shown.items() if count > 1}


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    """Yield the `QuantizedLinear`s of a model."""
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))
