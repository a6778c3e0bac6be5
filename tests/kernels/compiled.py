"""Compile every kernel for GPUs that are not here, and print what each takes: `python -m tests.kernels.compiled`."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laconic.codec import CODECS, WEIGHT_CODECS, blocked_triton
from laconic.codec.blocked import BlockCodec
from laconic.codec.dynamic_map import DynamicMap
from laconic.optim import adamw8bit_triton

CAPABILITIES = (80, 90, 100)
"""A100, H100 and B200."""
_THREADS = 128
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {"values": "*fp32", "base": "*fp32", "out": "*fp32", "borders": "*fp32", "numbers": "*fp32", "codes": "*u8",
          "steps": "*u8", "table": "*i64", "owners": "*i32", "signed_near": "*u8", "unsigned_near": "*u8",
          "signed_values": "*fp32", "unsigned_values": "*fp32"}  # fmt: skip
_INTEGERS = ("numel", "code_bytes", "offset")
_ALIGNED = ("values", "base", "out", "codes", "steps", "numel", "code_bytes", "table", "owners")
_ACCESS = re.compile(r"(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[a-z](\d+)\s")


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Yield the name of each kernel in use, the kernel, its constants, and the values of a program."""
    codecs = {**CODECS, **{f"{name} of weights": codec for name, codec in WEIGHT_CODECS.items()}}
    for name, codec in codecs.items():
        if not isinstance(codec, BlockCodec):
            continue
        constants = blocked_triton.constants(codec, codec.form(torch.device("cpu")))
        yield f"{name}, encode", blocked_triton._encode, {**constants, "SUBTRACTS": False}, blocked_triton.NUMEL
        yield f"{name}, decode", blocked_triton._decode, {**constants, "ADDS": False}, blocked_triton.NUMEL
        yield f"{name}, difference", blocked_triton._encode, {**constants, "SUBTRACTS": True}, blocked_triton.NUMEL
        yield f"{name}, sum", blocked_triton._decode, {**constants, "ADDS": True}, blocked_triton.NUMEL
    for dtype in (tl.float32, tl.bfloat16):
        shape = {"HEIGHT": 32, "WIDTH": 32, "LOWEST": DynamicMap.LOWEST, "HIGHEST": DynamicMap.HIGHEST}
        constants = {**shape, "VALUES": dtype, "GRADIENT": dtype, "ALIGNED": True}
        yield f"AdamW8bit, {dtype.name}", adamw8bit_triton._step_blocks, constants, 1024


def compiled(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    """The kernel for a GPU of a capability."""
    signature = {
        name: "constexpr" if name in constants else _TYPES.get(name, "i32" if name in _INTEGERS else "fp32")
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in _ALIGNED}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": _THREADS // 32, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def facts(kernel: Any, constants: dict[str, Any], capability: int, numel: int) -> dict[str, float]:
    """The registers of a thread, the bytes that it spills, and the bytes of memory that it moves for each value."""
    result = compiled(kernel, constants, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        told = subprocess.run([_BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", told.stdout)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    accesses = [(int(wide or 1) * int(bits) // 8) for _, wide, bits in _ACCESS.findall(result.asm["ptx"])]
    return {"registers": registers, "spilled": stack + local, "bytes_a_value": sum(accesses) * _THREADS / numel}


if __name__ == "__main__":
    found = {
        f"{name}, sm_{capability}": facts(kernel, constants, capability, numel)
        for name, kernel, constants, numel in kernels()
        for capability in CAPABILITIES
    }
    print(json.dumps(found))
