"""Run every kernel in triton's interpreter beside its twin: `TRITON_INTERPRET=1 python -m tests.kernels.interpreted`.

It prints a JSON object: the number of comparisons, the names of those that differ, and the number of kernels that torch
and triton launch for a piece. The interpreter cuts fp32 off where it makes bf16 and devices round, so parameters of
AdamW8bit in bf16 are not compared here, only their moments; tests with a GPU compare both. The codecs round bf16
themselves.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from laconic.codec import CODECS, WEIGHT_CODECS, blocked_triton
from laconic.codec.blocked import BlockCodec
from laconic.codec.payload import FewBits, pieces_of
from laconic.layers import scaled_triton
from laconic.layers.scaled import SCALED_FORMATS, ScaledFormat
from laconic.optim.adamw8bit import AdamW8bit

_NUMELS = (1, 63, 128, 1000, 5001)
_CASES = ("usual", "tiny", "huge", "denormal", "ties")
_DTYPES = (torch.float32, torch.bfloat16)
_SHAPES = ((70, 96), (64, 64), (5000,), (129, 33), (3, 50, 64))
_MATRICES = ((1, 16), (131, 48), (2, 272))
_CODECS = {**CODECS, **{f"{name} of weights": each for name, each in WEIGHT_CODECS.items()}}
_TIES = {"int8": 127, "int4": 7, "int2": 3, "e2m1": 12, "nf4": 1}
"""The largest whole number of a code, which gives a block a step of one; halves between are ties."""

Comparisons = Iterator[tuple[str, bool]]
"""The name of each comparison, and whether the kernel and its twin agree."""


def on_device(stack: ExitStack) -> None:
    """Let laconic take tensors for those of a GPU, so that it dispatches to kernels."""
    stack.enter_context(mock.patch.object(Tensor, "is_cuda", True))


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """The result of a function with its plain chain, and its result with kernels."""
    plain = run()
    with ExitStack() as stack:
        on_device(stack)
        return plain, run()


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
    numbers, others = one[is_number], other[is_number]
    return same_nan and torch.equal(numbers, others) and torch.equal(numbers.signbit(), others.signbit())


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


def _coded(codec: BlockCodec, numel: int, case: str, dtype: torch.dtype, *, rotates: bool) -> Comparisons:
    values, base = _values(codec, numel, case).to(dtype), torch.randn(numel).to(dtype)
    payload = torch.full((codec.payload_bytes(numel + -numel % 32 if rotates else numel),), 77, dtype=torch.uint8)

    def encode(less: Tensor | None) -> Tensor:
        codec.encode_into(found := payload.clone(), values, less, check=False, rotates=rotates)
        return found

    def decode(adds: bool) -> Tensor:
        codec.decode_into(out := base.clone(), coded, adds=adds, rotates=rotates)
        return out

    for less in (base, None):
        coded, own = both(lambda less=less: encode(less))  # type: ignore[misc]
        yield "encode" if less is None else "difference", torch.equal(own, coded)
    for adds in (False, True):
        yield "sum" if adds else "decode", same(*both(lambda adds=adds: decode(adds)))  # type: ignore[misc]


def _other_calls(codec: BlockCodec) -> Comparisons:
    """Compare the rest of a codec: codes without a payload, checks, and tensors without values."""
    values = torch.randn(1000)

    def run() -> list[Tensor]:
        codes, steps = codec.quantize(values)
        codec.dequantize_into(out := torch.empty(1000), codes, steps)
        codec.encode_into(payload := torch.full((codec.payload_bytes(1000),), 77, dtype=torch.uint8), values)
        codec.encode_into(nothing := torch.empty(0, dtype=torch.uint8), values[:0], check=False)
        codec.decode_into(out[:0], nothing)
        return [codes, steps, out, payload, codec.decode(payload, 1000)]

    yield "other calls", all(map(torch.equal, *both(run)))


def _bad_blocks(codec: BlockCodec, *, rotates: bool) -> Comparisons:
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


def _named(name: str, comparisons: Comparisons) -> Comparisons:
    return ((f"{name}, {what}", is_same) for what, is_same in comparisons)


def _blocked() -> Comparisons:
    for name, codec in _CODECS.items():
        if not isinstance(codec, BlockCodec):
            continue
        yield from _named(name, _other_calls(codec))
        for rotates in (False, True) if codec in CODECS.values() else (False,):
            if not codec.has_kernels:
                continue
            told = f"{name} rotated" if rotates else name
            for numel in _NUMELS:
                for case in _CASES if numel == 1000 else ("usual",):
                    for dtype in _DTYPES if case in ("usual", "ties") else (torch.float32,):
                        coded = _coded(codec, numel, case, dtype, rotates=rotates)
                        yield from _named(f"{told}, {numel}, {case}, {dtype}", coded)
            yield from _named(told, _bad_blocks(codec, rotates=rotates))


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


def _scaled_both(form: ScaledFormat, shape: tuple[int, int], case: str, dtype: torch.dtype) -> Comparisons:
    matrix = _matrix(form, shape, case).to(dtype)
    scale = form.matrix_scale(form.largest_of(matrix)) if form.has_matrix_scale else None
    (codes, scales), (own_codes, own_scales) = both(lambda: form.quantize(matrix, scale))
    decoded, own_decoded = both(lambda: form.dequantize(codes, scales, scale, dtype))
    yield "scales", same(own_scales.float(), scales.float())
    is_number = ~decoded.isnan()  # the sign of a NaN is the device's
    if form.is_packed:
        is_number = is_number[:, ::2] & is_number[:, 1::2]
    pair = (each.view(torch.uint8)[is_number] for each in (own_codes, codes))
    yield "codes", torch.equal(*pair) and (own_codes.dtype, own_codes.shape) == (codes.dtype, codes.shape)
    yield "decode", same(own_decoded, decoded)


def _scaled() -> Comparisons:
    for name, form in SCALED_FORMATS.items():
        for shape in _MATRICES:
            for case in (*_CASES, "zero", "NaN", "infinity") if shape == _MATRICES[-1] else ("usual", "ties"):
                for dtype in _DTYPES:
                    yield from _named(f"{name}, {shape}, {case}, {dtype}", _scaled_both(form, shape, case, dtype))
    for bits in torch.arange(2**16).split(2**12):  # every bf16 number once, as e4m3 and as e2m1
        values = (bits << 16).to(torch.int32).view(torch.float32).nan_to_num(0.0, 0.0, 0.0).clamp(-448, 448)
        for name in ("fp8_1x128", "nvfp4"):
            form = SCALED_FORMATS[name]
            matrix = values.view(-1, form.width) / (448 / 6 if form.is_packed else 1)
            matrix[:, 0] = 6.0 if form.is_packed else 448.0
            scale = torch.tensor(1.0) if form.is_packed else None
            pairs = zip(*both(lambda f=form, m=matrix, s=scale: f.quantize(m, s)), strict=True)  # type: ignore[misc]
            is_same = all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
            yield f"{name}, every bf16 number from {int(bits[0])}", is_same


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


class _Counted:
    """A kernel whose launches are counted, and which does not count what the interpreter does."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            told = list(self._launches.told)
            self._kernel[grid](*args, **options)
            self._launches.told[:] = [*told, "triton"]

        return run


def takes(run: Callable[[], object], kernels: Mapping[ModuleType, Sequence[str]]) -> dict[str, int]:
    """What `run` takes of a device: kernels of modules, "triton", other operations, and the reads of the host."""
    launches = Launches()
    told, to_list = Counter[str](), Tensor.tolist

    def read(tensor: Tensor) -> Any:
        told["reads of the host"] += 1
        return to_list(tensor)

    with ExitStack() as stack:
        on_device(stack)
        for module, names in kernels.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _Counted(getattr(module, name), launches)))
        run()  # constants are made once
        launches.told.clear()
        stack.enter_context(mock.patch.object(Tensor, "tolist", read))
        stack.enter_context(launches)
        run()
    for name in launches.told:
        told["triton" if name == "triton" else "reads of the host" if "scalar_dense" in name else name] += 1
    return dict(told)


def kernels_a_piece() -> dict[str, int]:
    """The kernels that coding takes: a piece of a message in each codec, and a matrix in each format."""
    runs: dict[str, Callable[[], object]] = {}
    for (name, codec), rotates in itertools.product(CODECS.items(), (False, True)):
        if not isinstance(codec, BlockCodec) or not codec.has_kernels:
            continue
        told = f"{name} rotated" if rotates else name
        pieces = pieces_of([(0, 1001, False)], codec, plain=torch.float32, device_type="cuda", rotates=rotates)
        payload, values = FewBits([pieces], [1001]), torch.randn(1001).bfloat16()
        message, base, out = torch.empty(payload.nbytes, dtype=torch.uint8), torch.randn(1001), torch.randn(1001)
        runs |= {
            f"{told}, encode": partial(payload.encode, 0, values, message),
            f"{told}, difference": partial(payload.encode, 0, values, message, base=base),
            f"{told}, decode": lambda p=payload, m=message: list(p.decode(0, m)),  # type: ignore[misc]
            f"{told}, sum": partial(payload.decode_into, 0, message, out, adds=True),
        }
    for name, form in SCALED_FORMATS.items():
        matrix = torch.randn(130, 48).bfloat16()
        scale = form.matrix_scale(form.largest_of(matrix)) if form.has_matrix_scale else None
        runs[f"{name}, encode"] = partial(form.quantize, matrix, scale)
        runs[f"{name}, decode"] = partial(form.dequantize, *form.quantize(matrix, scale), scale, torch.bfloat16)
    kernels = dict.fromkeys((blocked_triton, scaled_triton), ("_encode", "_decode"))
    return {name: sum(takes(run, kernels).values()) for name, run in runs.items()}


# -- AdamW8bit ---------------------------------------------------------------------------------------------------------


def _stepped(dtype: torch.dtype, *, by_kernel: bool, shapes: Sequence[tuple[int, ...]] = _SHAPES) -> list[Tensor]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = AdamW8bit(parameters, lr=1e-2)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape) * 10 ** torch.randn(parameter.shape)).to(dtype)
        if step == 1:
            parameters[-1].grad = None  # its number of steps then differs, and so its launch
        with mock.patch.object(Tensor, "is_cuda", by_kernel):
            optimizer.step()
    moments = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return moments if dtype is torch.bfloat16 else [*(each.detach() for each in parameters), *moments]


def _optimizers() -> Comparisons:
    for dtype in _DTYPES:
        for index, pair in enumerate(zip(*(_stepped(dtype, by_kernel=own) for own in (False, True)), strict=True)):
            yield f"AdamW8bit, {dtype}, {index}", torch.equal(*pair)


# -- a sample ----------------------------------------------------------------------------------------------------------


def sample() -> Comparisons:
    """A comparison of each kind, or a few, in some seconds."""
    torch.manual_seed(0)
    for name in ("int4", "int2", "e2m1", "nf4 of weights"):
        codec = _CODECS[name]
        assert isinstance(codec, BlockCodec)
        for rotates in {False, name == "int4"}:
            yield from _named(name, _coded(codec, 1000, "usual", torch.float32, rotates=rotates))
    for name, form in SCALED_FORMATS.items():
        yield from _named(name, _scaled_both(form, _MATRICES[1], "ties", torch.bfloat16))
    shapes = ((5000,), (5, 3))
    pair = (_stepped(torch.float32, by_kernel=own, shapes=shapes) for own in (False, True))
    yield "AdamW8bit", all(map(torch.equal, *pair))


@contextmanager
def as_a_device_does() -> Iterator[None]:
    """Let the interpreter round and warn as a device does."""
    with np.errstate(all="ignore"), mock.patch.object(InterpreterBuilder, "create_dot", dot_in_order):
        yield  # quotients of NaN and infinity are meant, and whole numbers may overflow


if __name__ == "__main__":
    torch.manual_seed(0)
    with as_a_device_does():
        results = [*_blocked(), *_scaled(), *_optimizers()]
    different = [name for name, is_same in results if not is_same]
    print(json.dumps({"compared": len(results), "different": different, "kernels_a_piece": kernels_a_piece()}))
