"""The kernels of triton without a GPU: what they take on those that people have, and their bits beside their twins'."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from tests.faults.bench import Bench, campaign_row
from tests.kernels.apart import told
from tests.support.record import Row

_MOST_REGISTERS, _MOST_KERNELS = 96, 2
_MOST_BYTES = {"encode": 8.0, "decode": 5.0}
"""The bytes of memory for each value: fp32 values and codes, without what is subtracted or added to."""
_DATA = {"encode": ("reads values", "writes codes"), "decode": ("reads codes", "writes out")}
_OTHERWISE = {"difference": "encode", "sum": "decode"}
_MEASURES = ("laconic.codec", "laconic.optim.adamw8bit_triton")
_MOST_LOSSLESS_BYTES = 12.0
_MOST_GRADIENT_BYTES = 8.0
_TIMEOUT_S = 1500.0


@campaign_row("kernels-compiled", section="device")
def compiled(bench: Bench) -> Row:
    """Compile every kernel for three generations of GPUs; a quick run for one."""
    found = told("tests.kernels.compiled", *(["sm_90"] if bench.quick else []), timeout_s=_TIMEOUT_S)
    most_spilled, spills = _worst((facts["spilled"], name) for name, facts in found.items())
    most_registers, crowded = _worst((facts["registers"], name) for name, facts in found.items())
    most_kernels, launched = _worst((num, name) for name, num in _interpreted()["kernels_a_piece"].items())
    moved: dict[str, list[tuple[float, str]]] = {"encode": [], "decode": []}
    for name, facts in found.items():
        if not name.startswith("AdamW8bit"):
            way = name.split(", ")[1]
            way = _OTHERWISE.get(way, way)
            moved[way].append((sum(facts["moved"][each] for each in _DATA[way]), name))
    (encode_bytes, encodes), (decode_bytes, decodes) = _worst(moved["encode"]), _worst(moved["decode"])
    return Row(
        claim="Triton kernels for sm_80, sm_90, sm_100: spills; registers; kernels a piece; bytes a value, "
        "encode / decode",
        required=f"0; <= {_MOST_REGISTERS}; <= {_MOST_KERNELS}; <= {_MOST_BYTES['encode']:g} / <= "
        f"{_MOST_BYTES['decode']:g}",
        measured=f"{most_spilled:g}; {most_registers:g}; {most_kernels:g}; {encode_bytes:g} / {decode_bytes:g}",
        is_met=most_spilled == 0
        and most_registers <= _MOST_REGISTERS
        and most_kernels <= _MOST_KERNELS
        and encode_bytes <= _MOST_BYTES["encode"]
        and decode_bytes <= _MOST_BYTES["decode"],
        note=f"the worst of {len(found)} compilations: {f'spills of {spills}' if most_spilled else 'none spills'}; "
        f"registers of {crowded}; kernels of {launched}; bytes of {encodes} / {decodes}. Bytes are those of fp32 "
        "values and of codes, counted in the generated code. A difference reads 4 more of its base, a sum 4 more of "
        "what it adds to. Not counted: scales, which are 0.0003 to 0.07 bytes a value (with them int8 decodes in "
        "5.02), and the tables of e2m1, e3m0 and nf4, 64 bytes at most. Several threads ask for each, of a cache.",
        measures=_MEASURES,
    )


@campaign_row("kernels-equal", section="device")
def equal(bench: Bench) -> Row:
    """Run every kernel in triton's interpreter beside its twin."""
    found = _interpreted()
    different = sum(len(each) for each in found["different"].values())
    return Row(
        claim="kernels equal to their twins in Triton's interpreter, fp32 and bf16",
        required="to the bit",
        measured=f"{found['compared']:,} comparisons, {different} different",
        is_met=not different,
        note="block codecs, plain and rotated, scaled formats and AdamW8bit: odd sizes, zeros of both signs, "
        "denormals, huge values, ties, NaN and infinity; of AdamW8bit in bf16 the moments only. The sign of a NaN is "
        "not compared." + "".join(f" {name}: {each[:3]}." for name, each in found["different"].items()),
        measures=_MEASURES,
    )


@campaign_row("kernels-lossless", section="device")
def lossless(bench: Bench) -> Row:
    """Compile the kernels of lossless differences, and run them beside their twin."""
    found = told("tests.kernels.compiled", "lossless", *(["sm_90"] if bench.quick else []), timeout_s=_TIMEOUT_S)
    own = {name: facts for name, facts in found.items() if "FP4" not in name}
    most_spilled, spills = _worst((facts["spilled"], name) for name, facts in own.items())
    most_registers, _ = _worst((facts["registers"], name) for name, facts in own.items())
    moved = {
        kernel: max(_uncached(facts["moved"]) for name, facts in own.items() if name.split(", ")[1] == kernel)
        for kernel in ("write", "read")
    }
    run = told("tests.kernels.lossless", timeout_s=_TIMEOUT_S, TRITON_INTERPRET="1")
    launched = {way: takes["triton"] for way, takes in run["takes"].items()}
    reads = max(takes.get("reads of the host", 0) for takes in run["takes"].values())
    most_bytes = max(moved.values())
    return Row(
        claim="Triton kernels of lossless differences: spills; registers; bytes a value, encode / decode; kernels a "
        "piece; reads of the host; payloads and values beside the plain twin",
        required=f"0; <= 128; <= {_MOST_LOSSLESS_BYTES:g}; <= 4 / <= 2; 1; to the bit",
        measured=f"{most_spilled:g}; {most_registers:g}; {moved['write']:g} / {moved['read']:g}; "
        f"{launched['encode']} / {launched['decode']}; {reads}; {len(run['different'])} of {run['compared']} differ",
        is_met=most_spilled == 0
        and most_registers <= 128
        and most_bytes <= _MOST_LOSSLESS_BYTES
        and (launched["encode"], launched["decode"], reads) == (4, 2, 1)
        and not run["different"],
        note=f"{len(own)} compilations for sm_80, sm_90 and sm_100: bf16, float8 and plain bytes, with and without the "
        f"last differences{f'; spills of {spills}' if most_spilled else ''}. With two patterns a byte, which no wire "
        f"sends, kernels spill up to {max(facts['spilled'] for facts in found.values()):g} bytes a thread. Bytes are "
        "those that threads ask for in the generated code, of values, last differences and scratch places. Not "
        "counted: the table of 192 bytes, and the payload, some bits a value, which several threads ask for, of a "
        "cache; nor the six bytes a tile that the last program moves alone. Of the four kernels one is over a table, "
        "and one is over a sample of some tiles." + "".join(f" {name}." for name in run["different"][:3]),
        measures=(*_MEASURES, "laconic.codec.lossless_triton"),
    )


@campaign_row("kernels-gradients", section="device")
def gradients(bench: Bench) -> Row:
    """Compile the kernels of lossless gradients, and run them beside their twin."""
    found = told("tests.kernels.compiled", "gradients", *(["sm_90"] if bench.quick else []), timeout_s=_TIMEOUT_S)
    most_spilled, spills = _worst((facts["spilled"], name) for name, facts in found.items())
    most_registers, _ = _worst((facts["registers"], name) for name, facts in found.items())
    moved = {
        way: sum(
            max(_of_gradients(facts["moved"]) for name, facts in found.items() if f"bfloat16, {kernel}" in name)
            for kernel in kernels
        )
        for way, kernels in {"encode": ("measure", "write"), "decode": ("count_outside", "read")}.items()
    }
    run = told("tests.kernels.gradients", timeout_s=_TIMEOUT_S, TRITON_INTERPRET="1")
    launched = {way: sum(takes.values()) for way, takes in run["takes"].items()}
    reads = sum(takes.get("reads of the host", 0) for takes in run["takes"].values())
    return Row(
        claim="Triton kernels of lossless gradients: spills; registers; bytes a value of bf16, encode / decode; "
        "launches; reads of the host; messages and values beside the plain twin",
        required=f"0; <= 128; <= {_MOST_GRADIENT_BYTES:g}; <= 3 / <= 5; 0; to the bit",
        measured=f"{most_spilled:g}; {most_registers:g}; {moved['encode']:.1f} / {moved['decode']:.1f}; "
        f"{launched['encode']} / {launched['decode']}; {reads}; {len(run['different'])} of {run['compared']} differ",
        is_met=most_spilled == 0
        and most_registers <= 128
        and max(moved.values()) <= _MOST_GRADIENT_BYTES
        and (launched["encode"], launched["decode"], reads) == (3, 5, 0)
        and not run["different"],
        note=f"{len(found)} compilations{f'; spills of {spills}' if most_spilled else ''}. Bytes are those that "
        "threads ask for in the generated code, as if every exponent lay outside of its window, which takes one more. "
        "Values are read twice to encode, and codes twice to decode. Not counted: counts of programs, which all of its "
        "threads ask for, of a cache, and a message of the values themselves. The launches include sums of counts by "
        "torch. Messages, values and buffers lie between pages that no process may touch, damaged messages, too."
        + "".join(f" {name}." for name in run["different"][:3]),
        measures=("laconic.codec",),
    )


def _of_gradients(moved: dict[str, float]) -> float:
    return sum(each for what, each in moved.items() if not what.endswith(("ends", "counts", "length", "_values")))


def _uncached(moved: dict[str, float]) -> float:
    return sum(each for what, each in moved.items() if what.split()[-1] not in ("table", "payload", "payload_words"))


def _worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The largest number and the name that has it, or the first of several with how many more have it."""
    known = list(found)
    most = max(number for number, _ in known)
    names = [name for number, name in known if number == most]
    return most, names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@functools.cache
def _interpreted() -> dict[str, Any]:
    return told("tests.kernels.interpreted", timeout_s=_TIMEOUT_S, TRITON_INTERPRET="1")
