"""Run every kernel in triton's interpreter beside its twin: `TRITON_INTERPRET=1 python -m tests.kernels.interpreted`.

It prints a JSON object: the number of comparisons, the names of those that differ, and the number of kernels that torch
and triton launch for a piece. The interpreter cuts fp32 off where it makes bf16 and devices round, so parameters of
AdamW8bit in bf16 are not compared here, only their moments; tests with a GPU compare both. The codecs round bf16
themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from laconic.codec import CODECS, WEIGHT_CODECS, blocked_triton, scaled_triton
from laconic.codec.blocked import BlockCodec
from laconic.codec.payload import Payload, pieces_of
from laconic.codec.scaled import SCALED_FORMATS, ScaledFormat
from laconic.optim.adamw8bit import AdamW8bit

_NUMELS = (1, 63, 128, 1000, 5001)
_CASES = ("usual", "tiny", "huge", "denormal", "ties")
_DTYPES = (torch.float32, torch.bfloat16)
_SHAPES = ((70, 96), (64, 64), (5000,), (129, 33), (3, 50, 64))
_MATRICES = ((1, 16), (131, 48), (2, 272))
_CODECS = {**CODECS, **{f"{name} of weights": each for name, each in WEIGHT_CODECS.items()}}
_TIES = {"int8": 127, "int4": 7, "int3": 3, "int2": 3, "e2m1": 12, "e3m0": 64, "nf4": 1}
"""The largest whole number of a code, which gives a block a step of one; halves between are ties."""

Difference = tuple[str, Any]


def on_device(stack: ExitStack) -> None:
    """Let laconic take tensors for those of a GPU, so that it dispatches to kernels."""
    stack.enter_context(mock.patch.object(Tensor, "is_cuda", True))


def dot_in_order(builder: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
    """Add the products of a `tl.dot` one after the other, as a GPU does without tensor cores.

    The interpreter takes numpy's product, whose order is that of the processor's library.
    """
    values = left.data[..., :1] * right.data[..., :1, :]
    for index in range(1, left.data.shape[-1]):
        values = values + left.data[..., index : index + 1] * right.data[..., index : index + 1, :]
    return type(total)(values + total.data, total.dtype.scalar)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether numbers have equal bits, but for those of NaN."""
    is_number = ~one.isnan()
    same_nan = bool((is_number == ~other.isnan()).all())
    return same_nan and torch.equal(one[is_number], other[is_number]) and _same_signs(one[is_number], other[is_number])


def _same_signs(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.signbit(), other.signbit())


# -- blocked codecs ----------------------------------------------------------------------------------------------------


def _values(codec: BlockCodec, numel: int, case: str) -> Tensor:
    """Values of a case, with zeros of both signs among them."""
    if case == "ties":
        values = torch.randint(-2 * _TIES[codec.name], 2 * _TIES[codec.name] + 1, (numel,)) / 2
        values[:: codec.block] = _TIES[codec.name]
        return values
    values = torch.randn(numel) * {"usual": 1.0, "tiny": 1e-37, "huge": 1e30, "denormal": 1e-40}[case]
    values[numel // 4 : numel // 2] = 0
    values[numel // 3 : numel // 2] = -0.0
    return values


def _coded(codec: BlockCodec, numel: int, case: str, dtype: torch.dtype, *, rotates: bool) -> Iterator[Difference]:
    """Yield each comparison of a kernel with its chain, and None or what differs."""
    values, base = _values(codec, numel, case).to(dtype), torch.randn(numel).to(dtype)
    size = codec.payload_bytes(numel + -numel % 32 if rotates else numel)
    payload = torch.empty(size, dtype=torch.uint8)
    for less in (None, base):
        codec.encode_into(payload, values, less, check=False, rotates=rotates)
        own = torch.full_like(payload, 77)
        with ExitStack() as stack:
            on_device(stack)
            codec.encode_into(own, values, less, check=False, rotates=rotates)
        yield "encode" if less is None else "difference", torch.equal(own, payload)
    for adds in (False, True):
        out, expected = base.clone(), base.clone()
        codec.decode_into(expected, payload, adds=adds, rotates=rotates)
        with ExitStack() as stack:
            on_device(stack)
            codec.decode_into(out, payload, adds=adds, rotates=rotates)
        yield "sum" if adds else "decode", same(out, expected)


def _bad_blocks(codec: BlockCodec, *, rotates: bool) -> Iterator[Difference]:
    """Blocks with NaN or infinity decode to NaN, and others stay as they are."""
    values = torch.randn(3 * codec.block)
    values[5], values[2 * codec.block] = torch.nan, -torch.inf
    payload, out = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    with ExitStack() as stack:
        on_device(stack)
        codec.encode_into(payload, values, check=False, rotates=rotates)
        codec.decode_into(out, payload, rotates=rotates)
    is_nan = out.isnan().view(3, -1)
    yield "NaN and infinity", bool(is_nan[0].all() and is_nan[2].all() and not is_nan[1].any())


def _blocked() -> Iterator[tuple[str, Difference]]:
    for name, codec in _CODECS.items():
        if not isinstance(codec, BlockCodec) or not codec.has_kernels:
            continue
        for rotates in (False, True) if codec in CODECS.values() else (False,):
            told = f"{name} rotated" if rotates else name
            for numel in _NUMELS:
                for case in _CASES if numel == 1000 else ("usual",):
                    for dtype in _DTYPES if case in ("usual", "ties") else (torch.float32,):
                        for what, is_same in _coded(codec, numel, case, dtype, rotates=rotates):
                            yield told, ((what, numel, case, str(dtype)), is_same)  # type: ignore[misc]
            for what, is_same in _bad_blocks(codec, rotates=rotates):
                yield told, ((what,), is_same)  # type: ignore[misc]


# -- scaled formats ----------------------------------------------------------------------------------------------------


def _matrix(form: ScaledFormat, shape: tuple[int, int], case: str) -> Tensor:
    """A matrix of a case, with zeros of both signs; in "ties" the scale is one, and values lie between two codes."""
    if case == "ties":
        numbers = _numbers(form)
        ties = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
        matrix = ties[torch.randint(len(ties), shape)] * torch.randint(0, 2, shape).mul(2).sub(1)
        matrix[:: form.height, :: form.width] = numbers[-1]
        if form.has_matrix_scale:
            matrix[0, 0] = numbers[-1] * 448
        return matrix
    scale = {"usual": 1.0, "tiny": 1e-37, "huge": 1e30, "denormal": 1e-40, "zero": 0.0}.get(case, 1.0)
    matrix = torch.randn(shape) * torch.randn(shape[0], 1).exp() * scale
    matrix[:, shape[1] // 2 : shape[1] * 3 // 4] = -0.0
    if case in ("NaN", "infinity"):
        matrix[0, 3] = torch.nan if case == "NaN" else -torch.inf
    return matrix


def _numbers(form: ScaledFormat) -> Tensor:
    """The magnitudes of a format's elements, ascending."""
    if form.is_packed:
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _scaled_both(form: ScaledFormat, shape: tuple[int, int], case: str, dtype: torch.dtype) -> Iterator[Difference]:
    matrix = _matrix(form, shape, case).to(dtype)
    scale = form.matrix_scale(form.largest_of(matrix)) if form.has_matrix_scale else None
    codes, scales = form.quantize(matrix, scale)
    decoded = form.dequantize(codes, scales, scale, dtype)
    with ExitStack() as stack:
        on_device(stack)
        own_codes, own_scales = form.quantize(matrix, scale)
        own_decoded = form.dequantize(codes, scales, scale, dtype)
    yield "scales", same(own_scales.float(), scales.float())
    is_number = ~decoded.isnan()  # the sign of a NaN is the device's
    if form.is_packed:
        is_number = is_number[:, ::2] & is_number[:, 1::2]
    pair = (each.view(torch.uint8)[is_number] for each in (own_codes, codes))
    yield "codes", torch.equal(*pair) and (own_codes.dtype, own_codes.shape) == (codes.dtype, codes.shape)
    yield "decode", same(own_decoded, decoded)


def _scaled() -> Iterator[tuple[str, Difference]]:
    for name, form in SCALED_FORMATS.items():
        for shape in _MATRICES:
            for case in (*_CASES, "zero", "NaN", "infinity") if shape == _MATRICES[-1] else ("usual", "ties"):
                for dtype in _DTYPES:
                    for what, is_same in _scaled_both(form, shape, case, dtype):
                        yield name, ((what, shape, case, str(dtype)), is_same)  # type: ignore[misc]
    for bits in torch.arange(2**16).split(2**12):  # every bf16 number once, as e4m3 and as e2m1
        values = (bits << 16).to(torch.int32).view(torch.float32).nan_to_num(0.0, 0.0, 0.0).clamp(-448, 448)
        for name in ("fp8_1x128", "nvfp4"):
            form = SCALED_FORMATS[name]
            matrix = values.view(-1, form.width) / (448 / 6 if form.is_packed else 1)
            matrix[:, 0] = 6.0 if form.is_packed else 448.0
            with_scale = torch.tensor(1.0) if form.is_packed else None
            with ExitStack() as stack:
                on_device(stack)
                own = form.quantize(matrix, with_scale)
            pairs = zip(own, form.quantize(matrix, with_scale), strict=True)
            is_same = all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
            yield name, (("every bf16 number", int(bits[0])), is_same)


# -- kernels a piece ---------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts what would be a kernel of a GPU: operations of torch that are no views, and launches of triton."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view")):
            self.told.append(func.name())
        return func(*args, **(kwargs or {}))

    def of(self, kernel: Any) -> Any:
        """The kernel, whose launches are counted and not run."""
        launches = mock.MagicMock()
        launches.__getitem__.side_effect = lambda _: lambda *args, **kwargs: self.told.append("triton")
        return launches


def _launched(run: Callable[[], object]) -> list[str]:
    run()  # constants of the codec are made once
    launches = Launches()
    with ExitStack() as stack:
        on_device(stack)
        for module in (blocked_triton, scaled_triton):
            for name in ("_encode", "_decode"):
                stack.enter_context(mock.patch.object(module, name, launches.of(getattr(module, name))))
        run()
        launches.told.clear()
        stack.enter_context(launches)
        run()
    return launches.told


def kernels_a_piece() -> dict[str, int]:
    """The kernels that coding takes: a piece of a message in each codec, and a matrix in each format."""
    found: dict[str, int] = {}
    for name, codec in CODECS.items():
        if not isinstance(codec, BlockCodec) or not codec.has_kernels:
            continue
        for rotates in (False, True):
            told = f"{name} rotated" if rotates else name
            pieces = pieces_of([(0, 1001, False)], codec, plain=torch.float32, device_type="cuda", rotates=rotates)
            payload, values = Payload([pieces], [1001]), torch.randn(1001).bfloat16()
            message, base, out = torch.empty(payload.nbytes, dtype=torch.uint8), torch.randn(1001), torch.randn(1001)
            runs: dict[str, Callable[[], object]] = {
                "encode": lambda p=payload, v=values, m=message: p.encode(0, lambda _: v, m),
                "difference": lambda p=payload, v=values, m=message, b=base: p.encode(
                    0, lambda _: v, m, base=lambda _: b
                ),
                "decode": lambda p=payload, m=message: list(p.decode(0, m)),
                "sum": lambda p=payload, m=message, o=out: p.decode_into(0, m, o, adds=True),
            }
            found |= {f"{told}, {what}": len(_launched(run)) for what, run in runs.items()}
    for name, form in SCALED_FORMATS.items():
        matrix = torch.randn(130, 48).bfloat16()
        scale = form.matrix_scale(form.largest_of(matrix)) if form.has_matrix_scale else None
        codes, scales = form.quantize(matrix, scale)
        found[f"{name}, encode"] = len(_launched(lambda f=form, m=matrix, s=scale: f.quantize(m, s)))  # type: ignore[misc]
        found[f"{name}, decode"] = len(
            _launched(lambda f=form, c=codes, a=scales, s=scale: f.dequantize(c, a, s, torch.bfloat16))  # type: ignore[misc]
        )
    return found


# -- AdamW8bit ---------------------------------------------------------------------------------------------------------


def _stepped(dtype: torch.dtype, *, by_kernel: bool) -> list[Tensor]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]
    optimizer = AdamW8bit(parameters, lr=1e-2)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape) * 10 ** torch.randn(parameter.shape)).to(dtype)
        if step == 1:
            parameters[1].grad = None  # its number of steps then differs, and so its launch
        with mock.patch.object(Tensor, "is_cuda", by_kernel):
            optimizer.step()
    moments = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return moments if dtype is torch.bfloat16 else [*(each.detach() for each in parameters), *moments]


def _optimizers() -> Iterator[tuple[str, Difference]]:
    for dtype in _DTYPES:
        pairs = zip(_stepped(dtype, by_kernel=False), _stepped(dtype, by_kernel=True), strict=True)
        for index, (one, other) in enumerate(pairs):
            yield f"AdamW8bit, {dtype}", ((index,), torch.equal(one, other))  # type: ignore[misc]


if __name__ == "__main__":
    torch.manual_seed(0)
    np.seterr(all="ignore")  # quotients of NaN and infinity are meant
    compared, different = 0, {}  # type: ignore[var-annotated]
    with mock.patch.object(InterpreterBuilder, "create_dot", dot_in_order):
        for sort in (_blocked(), _scaled(), _optimizers()):
            for name, (what, is_same) in sort:
                compared += 1
                if not is_same:
                    different.setdefault(name, []).append(what)
    print(json.dumps({"compared": compared, "different": different, "kernels_a_piece": kernels_a_piece()}))
