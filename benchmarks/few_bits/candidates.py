"""The codings that the study tries, the most valuable first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from benchmarks.few_bits.codes import Code, Columns, Flipped, Mixed, Product, Rounding, Signs, Uniform
from benchmarks.few_bits.crossing import Coding
from benchmarks.few_bits.model import Slot
from laconic.codec import CODECS, Codec, TwoBit

Make = Callable[[Sequence[Slot], int], Code]
Protocol = Literal["continued", "scratch"]
"""[Note: Two protocols] in study.py"""


def _codec(codec: str | Codec, *, rotates: bool = True) -> Make:
    return lambda slots, nodes: Product(CODECS[codec] if isinstance(codec, str) else codec, rotates=rotates)


def _always(make: Callable[[], Code]) -> Make:
    return lambda slots, nodes: make()


def _steps(width: float, *, rotates: bool = True, rounding: Rounding = "nearest", limit: int = 0) -> Make:
    return lambda slots, nodes: Uniform(width, rotates=rotates, rounding=rounding, limit=limit)


def _by_column(make: Make) -> Make:
    return lambda slots, nodes: Columns(make(slots, nodes), slots, nodes=nodes)


def _with_ends(ends: Make, between: Make) -> Make:
    return lambda slots, nodes: Mixed(ends(slots, nodes), between(slots, nodes), slots)


def _fed(name: str, make: Make, kept: str, *, returned: float = 1.0) -> Coding:
    share = "" if returned == 1 else f"{returned:g} of the "
    return Coding(name=f"{name}, {share}feedback in {kept}", make=make, way="feedback", kept=kept, returned=returned)


EXACT = Coding(name="exact")
FLOOR = Coding(name="exact, summed in another order", is_reversed=True)
_INT2 = _codec("int2")
_SIGN = _always(Signs)
_TERNARY = _steps(1.224, limit=1)
"""Three levels: the best step for a normal distribution (J. Max, 1960)."""
_ENDS = _with_ends(_codec("int4"), _INT2)


CONTINUED = (
    FLOOR,
    Coding(name="int4 rotated", make=_codec("int4")),
    _fed("int2 rotated", _INT2, "fp32"),
    _fed("int2 rotated", _INT2, "int4"),
    _fed("int2 rotated, ends in int4", _ENDS, "int4"),
    Coding(name="int3 rotated", make=_codec("int3")),
    Coding(name="int2 rotated", make=_INT2),
    Coding(name="steps of 1 rms rotated", make=_steps(1.0)),
    Coding(name="steps of 1.5 rms rotated", make=_steps(1.5)),
    _fed("steps of 1.5 rms rotated", _steps(1.5), "int4"),
    _fed("steps of 1.5 rms rotated", _steps(1.5), "int4", returned=0.5),
    _fed("steps of 2 rms rotated", _steps(2.0), "int4"),
    Coding(name="three levels rotated", make=_TERNARY),
    _fed("three levels rotated", _TERNARY, "int4"),
    _fed("signs rotated", _SIGN, "int4"),
    Coding(name="int2 rotated, random signs", make=_always(lambda: Flipped(Product(TwoBit())))),
    _fed("int2 by column rotated", _by_column(_INT2), "int4"),
    Coding(name="int2 rotated, EF21", make=_INT2, way="ef21"),
)
"""The codings on which most depends."""
SCRATCH = (
    "exact, summed in another order", "steps of 1.5 rms rotated",
    "steps of 1.5 rms rotated, 0.5 of the feedback in int4", "int2 rotated, feedback in int4", "int2 rotated",
    "int3 rotated", "steps of 1 rms rotated", "steps of 1.5 rms rotated, feedback in int4", "int4 rotated",
    "three levels rotated", "int2 rotated, ends in int4, feedback in int4", "int2 rotated, feedback in fp32",
)  # fmt: skip
"""Those of them that are trained from scratch, too."""
MORE = (
    Coding(name="seven levels rotated", make=_steps(0.65, limit=3)),
    Coding(name="steps of 1.5 rms rotated, random signs", make=_always(lambda: Flipped(Uniform(1.5)))),
    _fed("int2 rotated", _INT2, "int4", returned=0.5),
    _fed("steps of 2 rms rotated", _steps(2.0), "int4", returned=0.5),
    Coding(name="steps of 1.5 rms", make=_steps(1.5, rotates=False)),
    _fed("int2 rotated", _INT2, "int2"),
    _fed("int2 rotated", _INT2, "bf16"),
    Coding(name="signs rotated, momentum (1-bit Adam)", make=_SIGN, way="momentum"),
    Coding(name="steps of 2 rms rotated", make=_steps(2.0)),
    _fed("steps of 3 rms rotated", _steps(3.0), "int4"),
    Coding(name="steps of 2 rms dithered", make=_steps(2.0, rotates=False, rounding="dithered")),
    _fed("top64", _codec("top64", rotates=False), "bf16"),
    Coding(name="int2 by column rotated", make=_by_column(_INT2)),
    _fed("steps of 1 rms rotated", _steps(1.0), "int4"),
    Coding(name="steps of 1.5 rms by column", make=_by_column(_steps(1.5, rotates=False))),
    _fed("int2", _codec("int2", rotates=False), "int4"),
    Coding(name="int4", make=_codec("int4", rotates=False)),
    Coding(name="int3", make=_codec("int3", rotates=False)),
    Coding(name="int2 rotated, ends in int4", make=_ENDS),
    _fed("int3 rotated", _codec("int3"), "int4"),
    Coding(name="int2 rotated, difference to the mean", make=_INT2, way="predicted"),
    _fed("int2 rotated", _INT2, "int8"),
    Coding(name="int4 rotated stochastic", make=_always(lambda: Uniform(0.0, limit=7, rounding="stochastic"))),
    _fed("int2 rotated blocks of 512", _codec(TwoBit(block=512)), "int4"),
    Coding(name="int8", make=_codec("int8", rotates=False)),
    Coding(name="e2m1", make=_codec("e2m1", rotates=False)),
    _fed("signs rotated", _SIGN, "fp32"),
    Coding(name="steps of 2 rms stochastic", make=_steps(2.0, rotates=False, rounding="stochastic")),
    Coding(name="signs rotated, random signs", make=_always(lambda: Flipped(Signs()))),
    _fed("steps of 2 rms", _steps(2.0, rotates=False), "int4"),
)
"""Further codings, only continued."""


def plan() -> list[tuple[Coding, Protocol]]:
    """Return all runs, the most valuable first."""
    of_name = {coding.name: coding for coding in CONTINUED}
    continued: list[tuple[Coding, Protocol]] = [(coding, "continued") for coding in CONTINUED]
    scratch: list[tuple[Coding, Protocol]] = [(of_name[name], "scratch") for name in SCRATCH]
    more: list[tuple[Coding, Protocol]] = [(coding, "continued") for coding in MORE]
    return [*continued, *scratch[:5], *more[:9], *scratch[5:], *more[9:]]
