"""Compile every kernel for GPUs that are not here, and print what each takes as a JSON object.

python -m tests.kernels.compiled                   for all
python -m tests.kernels.compiled sm_90             for some
python -m tests.kernels.compiled lossless sm_90    those of lossless differences
python -m tests.kernels.compiled gradients sm_90   those of lossless gradients
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laconic.codec import (
    CODECS,
    WEIGHT_CODECS,
    blocked_triton,
    contexts,
    lossless_gradients,
    lossless_gradients_triton,
    lossless_triton,
)
from laconic.codec.blocked import BlockCodec
from laconic.codec.lossless_gradients import BLOCK
from laconic.codec.patterns import pattern_form_of
from laconic.layers import scaled_triton
from laconic.layers.scaled import SCALED_FORMATS
from laconic.optim import adamw8bit_triton
from laconic.optim.dynamic_map import DynamicMap

CAPABILITIES = (80, 90, 100)
"""A100, H100 and B200."""
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {"values": "*fp32", "base": "*fp32", "out": "*fp32", "borders": "*fp32", "numbers": "*fp32", "codes": "*u8",
          "steps": "*u8", "table": "*i64", "owners": "*i32", "signed_near": "*u8", "unsigned_near": "*u8",
          "signed_values": "*fp32", "unsigned_values": "*fp32", "matrix_scale": "*fp32"}  # fmt: skip
_LOSSLESS_TYPES = {"table": "*u8", "words": "*i32", "sizes": "*i16", "head": "*u8", "begins": "*i32", "length": "*i32",
                   "num_done": "*i32", "payload": "*u8", "payload_words": "*i32", "numbers": "*u8", "changes": "*i32",
                   "change_bytes": "*u8", "fault": "*i32", "new": "*u8", "out": "*u8", "out_words": "*i32"}  # fmt: skip
_GRADIENT_TYPES = {"counts": "*i64", "ends": "*i64", "live_ends": "*i64", "outside_ends": "*i64", "length": "*i64",
                   "buffer": "*u8", "message": "*u8"}  # fmt: skip
_INTEGERS = ("numel", "coded_numel", "code_bytes", "offset", "num_rows", "num_columns", "across", "num_tiles", "known",
             "nbytes", "all_words", "num_blocks", "whole")  # fmt: skip
_ALIGNED = ("values", "base", "out", "codes", "steps", "scales", "matrix_scale", "table", "owners", "held", "new",
            "counts", "words", "sizes", "head", "begins", "num_done", "numbers", "changes",
            "change_bytes", "ends", "live_ends", "outside_ends", "length", "buffer", "buffer_values",
            "numel", "coded_numel", "code_bytes", "num_rows", "num_columns")  # fmt: skip
_INSTRUCTION = re.compile(r"(?:^|[;{\s])([a-z]\w*(?:[.:]\w+)+)\s+([^;]*);")
_ACCESS = re.compile(r"(ld|st|red|atom)\.(?:\w+\.)*?global(?:\.\w+)*?(?:\.v(\d))?\.[a-z](\d+)$")
_KINDS = {"ld": "reads", "st": "writes", "red": "adds to", "atom": "adds to"}


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A kernel with its constants, as it is launched."""

    kernel: Any
    constants: dict[str, Any]
    numel: int
    """The values of a program."""
    num_warps: int = 4
    types: dict[str, str] = field(default_factory=dict)
    """The types of arguments that are not as `_TYPES` says."""
    of_one_program: frozenset[str] = frozenset()
    """The accesses of a single one of many programs, which are not counted."""


def kernels() -> Iterator[tuple[str, Compilation]]:
    """Yield the name of each kernel in use and the kernel."""
    codecs = {**CODECS, **{f"{name} of weights": codec for name, codec in WEIGHT_CODECS.items()}}
    for name, codec in codecs.items():
        if not isinstance(codec, BlockCodec) or not codec.has_kernels:
            continue
        of_codec = blocked_triton.constants(codec, codec.form(torch.device("cpu")))
        for told, rotates in (("", False), (" rotated", True)):
            if rotates and codec in WEIGHT_CODECS.values():  # weights are not rotated
                continue
            for what, kernel, more in (
                ("encode", blocked_triton._encode, {"SUBTRACTS": False}),
                ("decode", blocked_triton._decode, {"ADDS": False}),
                ("difference", blocked_triton._encode, {"SUBTRACTS": True}),
                ("sum", blocked_triton._decode, {"ADDS": True}),
            ):
                constants, numel = {**of_codec, **more, "ROTATES": rotates}, blocked_triton.NUMEL
                yield f"{name}{told}, {what}", Compilation(kernel=kernel, constants=constants, numel=numel)
    for name, form in SCALED_FORMATS.items():
        constants, numel = scaled_triton.constants_of_format(form), max(scaled_triton.NUMEL, form.height * form.width)
        num_warps, types = scaled_triton.num_warps(form), {"scales": "*fp32" if form.scale == "fp32" else "*u8"}
        for what, kernel in (("encode", scaled_triton._encode), ("decode", scaled_triton._decode)):
            own = Compilation(kernel=kernel, constants=constants, numel=numel, num_warps=num_warps, types=types)
            yield f"{name}, {what}", own
    for dtype in (tl.float32, tl.bfloat16):
        shape = {"HEIGHT": 32, "WIDTH": 32, "LOWEST": DynamicMap.LOWEST, "HIGHEST": DynamicMap.HIGHEST}
        constants = {**shape, "VALUES": dtype, "GRADIENT": dtype, "ALIGNED": True}
        own = Compilation(kernel=adamw8bit_triton._step_blocks, constants=constants, numel=1024)
        yield f"AdamW8bit, {dtype.name}", own


_LOSSLESS_FORMS = {"bf16": torch.bfloat16, "float8": torch.float8_e4m3fn, "plain bytes": torch.uint8}
_OF_LAST = frozenset({"reads sizes", "writes begins", "writes length"})
"""The accesses of the last program of `_write` alone."""


def lossless_kernels() -> Iterator[tuple[str, Compilation]]:
    """Yield the name of each kernel of lossless differences and the kernel."""
    for name, dtype in _LOSSLESS_FORMS.items():
        form = pattern_form_of(dtype)
        kind = "*i16" if form.bits == 16 else "*i8"
        types = {**_LOSSLESS_TYPES, "held": kind, "new": kind, "out": kind}
        for kernel in (lossless_triton._write, lossless_triton._read):
            own = Compilation(
                kernel=kernel, constants=lossless_triton.constants_of_form(form), numel=contexts.TILE,
                num_warps=lossless_triton.NUM_WARPS, types=types,
                of_one_program=_OF_LAST if kernel is lossless_triton._write else frozenset(),
            )  # fmt: skip
            yield f"lossless {name}, {kernel.fn.__name__[1:]}", own
    for kernel, constants in (
        (lossless_triton._find, {}),
        (lossless_triton._gather, {"MOST_WORDS": contexts.TILE // 2, "TILE_BYTES": 2 * contexts.TILE}),
    ):  # fmt: skip
        yield (
            f"lossless, {kernel.fn.__name__[1:]}",
            Compilation(kernel=kernel, constants=constants, numel=contexts.TILE, types=_LOSSLESS_TYPES),
        )


def gradient_kernels() -> Iterator[tuple[str, Compilation]]:
    """Yield the name of each kernel of lossless gradients and the kernel."""
    numel, num_warps = lossless_gradients_triton.PROGRAM_BLOCKS * BLOCK, lossless_gradients_triton.NUM_WARPS
    for dtype, form in lossless_gradients._FORMS.items():
        kind = "*i32" if form.tail_bytes else "*i16"
        types = {**_GRADIENT_TYPES, "values": kind, "out": kind, "buffer_values": kind}
        of_form, row = lossless_gradients_triton.constants_of_gradients(form), {"ROW_BYTES": form.row_bytes}
        for kernel, constants in (
            (lossless_gradients_triton._measure, of_form),
            (lossless_gradients_triton._write, of_form | row),
            (lossless_gradients_triton._count_outside, row),
            (lossless_gradients_triton._read, of_form | row),
        ):
            own = Compilation(kernel=kernel, constants=constants, numel=numel, num_warps=num_warps, types=types)
            yield f"gradients {str(dtype).removeprefix('torch.')}, {kernel.fn.__name__[1:]}", own
    kernel, numel = lossless_gradients_triton._count_live, numel * lossless_gradients_triton.COUNTED_PROGRAMS
    own = Compilation(kernel=kernel, constants={}, numel=numel, num_warps=num_warps, types=_GRADIENT_TYPES)
    yield "gradients, count_live", own


def compiled(given: Compilation, capability: int) -> Any:
    """The kernel for a GPU of a capability."""
    names, types = given.kernel.arg_names, {**_TYPES, **given.types}
    signature = {
        name: "constexpr" if name in given.constants else types.get(name, "i32" if name in _INTEGERS else "fp32")
        for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in _ALIGNED}
    source = ASTSource(fn=given.kernel, signature=signature, constexprs=given.constants, attrs=aligned)
    options = {"num_warps": given.num_warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def facts(given: Compilation, capability: int) -> dict[str, Any]:
    """The registers of a thread, the bytes that it spills, and the bytes that it moves for each value.

    A stack that no instruction uses is no spill.

    `compiled_for` has the arguments whose value decides how a kernel is compiled: see `_compiled_for`.
    `orders_programs`: what programs have written is there for the one that finishes last. See `_orders_programs`.
    `moved` has those bytes by argument, read or written: what all threads ask for, so a step that several threads read
    counts several times, though it comes from a cache.
    """
    result = compiled(given, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        told = subprocess.run([_BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, *spilled = (int(re.search(rf"{key}:(\d+)", told.stdout)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
        if any(spilled):
            told = subprocess.run([_BIN / "nvdisasm", file.name], capture_output=True, text=True, check=True)
            spilled = spilled if re.search(r"\b(LDL|STL)\b", told.stdout) else []
    arguments = dict(enumerate(each for each in given.kernel.arg_names if each not in given.constants))
    moved = {
        f"{access} {arguments.get(place, 'what it has the address of')}": nbytes * 32 * given.num_warps / given.numel
        for (access, place), nbytes in _accesses(result.asm["ptx"]).items()
    }
    moved = {what: nbytes for what, nbytes in moved.items() if what not in given.of_one_program}
    return {
        "registers": registers, "spilled": sum(spilled), "bytes_a_value": sum(moved.values()), "moved": moved,
        "compiled_for": _compiled_for(given.kernel), "orders_programs": _orders_programs(result.asm["ptx"]),
    }  # fmt: skip


def _compiled_for(kernel: Any) -> list[str]:
    """The arguments for whose address, or number, triton compiles a kernel anew if it is a multiple of 16, or 1."""
    return [
        each.name
        for each in kernel.params
        if not (each.is_constexpr or each.do_not_specialize or each.do_not_specialize_on_alignment)
    ]


def _orders_programs(ptx: str) -> bool:
    """Whether an atomic operation that releases to the whole GPU, and acquires, stands between two barriers.

    So the accesses of all threads before it come before all those after it in another program that sees its result.
    """
    names = [name for name, _ in _INSTRUCTION.findall(re.sub("//.*", "", ptx))]
    names = [name for name in names if name == "bar.sync" or ".global" in name]
    return any(
        before == after == "bar.sync" and {"atom", "acq_rel", "gpu"} <= {*name.split(".")}
        for before, name, after in zip(names, names[1:], names[2:], strict=False)
    )


def _accesses(ptx: str) -> Counter[tuple[str, int]]:
    """The bytes that a thread "reads", "writes" and "adds to" by the place of the argument whose address it uses.

    The place is -1 for addresses that the kernel reads from memory.
    """
    origins: dict[str, int] = {}
    found: Counter[tuple[str, int]] = Counter()
    for name, operands in _INSTRUCTION.findall(re.sub("//.*", "", ptx)):
        addresses = re.findall(r"%rd\d+", operands)
        if access := _ACCESS.match(name):
            kind, wide, bits = access.groups()
            [origin] = {origins.get(each, -1) for each in re.findall(r"\[\s*(%rd\d+)", operands)}
            found[_KINDS[kind], origin] += int(wide or 1) * int(bits) // 8
        elif name == "ld.param.b64" and addresses:
            origins[addresses[0]] = int(re.search(r"_param_(\d+)", operands)[1])  # type: ignore[index]
        elif addresses and operands.startswith("%rd") and not name.startswith("ld."):
            known = {origins[each] for each in addresses[1:] if each in origins}
            if len(known) == 1:
                origins[addresses[0]] = known.pop()
    return found


if __name__ == "__main__":
    asked = sys.argv[1:]
    kinds = {"lossless": lossless_kernels, "gradients": gradient_kernels}
    [found] = [make() for kind, make in kinds.items() if kind in asked] or [kernels()]
    chosen = [int(each.removeprefix("sm_")) for each in asked if each not in kinds] or CAPABILITIES
    print(json.dumps({
        f"{name}, sm_{capability}": facts(kernel, capability) for name, kernel in found for capability in chosen
    }))  # fmt: skip
