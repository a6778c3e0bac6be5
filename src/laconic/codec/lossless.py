"""Weights that others hold in an older version, without loss, in the bits of their differences: `encode`, `decode`.

[Note: Lossless differences]
Receivers hold the last 16-bit or 8-bit pattern of every weight. Between two steps most patterns move by few units in
the last place (ulps) or not at all, so the owner sends that. Both sides know much about each difference beforehand:

    scale       An optimizer's step has nearly one size for the weights of a block, but an ulp depends on the exponent.
                One number of four bits for each block of 512 weights is the logarithm of the step. It and the exponent
                of the *held* pattern give the size of the difference in ulps, to a factor of two: 24 classes.
    past        The last difference, where both sides keep it. Momentum makes the next one alike while steps are many
                ulps long. Where they are short, a pattern that has just moved seldom moves again, and by its sign.
                So there are 8 ranks of its size; differences are counted in its direction.

A class and a rank make a context. Nothing else about a value is known, so values of one context share one code, which
the payload's table names in a byte. It is chosen by a histogram of each context, whose bits are counted for every code.
Of t tiles of 4,096 values some 2 sqrt(t) are counted; contexts that are rare there have a default, and no byte.

    Rice k      k low bits of the zigzag number of the difference, and the rest as a unary number. The table says, too,
                whether 0.9 times the last difference is taken off first, and which sign comes first in the zigzag.
    bucket m    For contexts that seldom change. The values of a tile with an equal m, in order, make buckets of 2**m. A
                unary number counts the events of a bucket, and each event has m bits for the place in the bucket and a
                sign. A change by two ulps is two events of one value. This is the code of Elias and Fano.

Rare values cost a bounded number of bits: from the 16th unit of a quotient, or the fourth event of a value, its pattern
follows. A block that does not change costs its four bits. A tile that takes as many words as its patterns has these,
and a payload as long as the new values *is* the new values. Zeros of both signs, infinities and NaNs are patterns like
others. In training the payloads are 0.02 to 0.2 bits a weight above the entropy under the same contexts: RESULTS.md,
section lossless.

[Note: Codes that decode in parallel]
Every tile has its own words, whose number is in the head of the payload, so that tiles are coded each by itself. They
begin with the unary numbers, each as so many zeros and a one: those of Rice codes, then those of buckets, by their
size. The place of the i-th one says all, so a running sum decodes them. Then come fields: those of all events, and for
each value, in order, its low bits or its pattern. The widths of fields follow from contexts and unary numbers, so their
offsets are a running sum. Nothing waits for a value before it. What either side decides is whole-number arithmetic, so
payloads have the same bytes on every device.

On a CPU each side is a loop over the values of a tile, which numba compiles: codec/lossless_numba.py. On CUDA they are
a few kernels: [Note: Lossless kernels] in codec/lossless_triton.py. Without these, and on other devices, they are some
fifty operations of torch on all values, which read sizes where the work depends on what changes.

    payload     for each tile the bits of its unary numbers and its words, uint16 each | for each tile the base of its
                scales, less the lowest, a byte | scales, 4 bits each | a bit for each of 192 contexts, whether it has
                an entry | the table, a byte for each of these | zeros up to a multiple of four bytes | the words of all
                tiles, of 32 bits
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.bits import pack_bits, unpack
from laconic.codec.cells import RunSizes, check_sizes, read_runs, write_runs
from laconic.codec.contexts import (
    BLOCK,
    CODE,
    FLIP,
    IDLE,
    LOWEST_BASE,
    PREDICT,
    TILE,
    Past,
    choose_codes,
    contexts_of,
    defaults,
    in_tiles,
    past_of,
    sample_stride,
    scales_of,
)
from laconic.codec.fused import kernels_for
from laconic.codec.patterns import PatternForm, pattern_form_of
from laconic.codec.payload import DEVICE_PIECE_NUMEL, HOST_PIECE_NUMEL

MAX_NUMEL = 1 << 25
"""The values of a payload: offsets of bits then fit into 31 bits."""


def last_difference(held: Tensor, new: Tensor, *, form: PatternForm | None = None) -> Tensor:
    """The ulps by which patterns have moved, for the next call of `encode` and `decode`: (n,), int8, up to +-127."""
    form = form or pattern_form_of(held.dtype)
    if (loops := kernels_for(held, "codec.lossless_numba")) is not None:
        moved: Tensor = loops.moved_ulps(form, held, new)
        return moved
    moved = form.numbers(form.patterns(new)).to(torch.int32) - form.numbers(form.patterns(held))
    return moved.clamp_(-127, 127).to(torch.int8)


class UnreadMessage(NamedTuple):
    """A coded message whose length the host has not read: an accelerator is still at work on it."""

    buffer: Tensor
    """(bytes,), uint8, of which the message is the first part."""
    length: Tensor
    """(1,), int32 or int64: the bytes of the message."""

    @classmethod
    def of(cls, message: Tensor) -> UnreadMessage:
        """A message of known length, (bytes,), uint8."""
        return cls(message, torch.full((1,), len(message), dtype=torch.int64, device=message.device))

    def read(self) -> Tensor:
        """The message alone, (bytes,), uint8. The host waits for its length."""
        return self.buffer[: int(self.length)]


def encode(held: Tensor, new: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None) -> Tensor:
    """Encode new values for those who hold others, as a payload of its own length: [Note: Lossless differences].

    Args:
        held: the values that receivers hold, flat, of at most 2**25 patterns of 16 bits or fewer.
        new: the new values, of the same dtype, shape and device.
        last: `last_difference` between the held values and those before them, if receivers know it. Zeros are as None.
        form: how to read patterns. Default: that of the dtype, and plain bytes for uint8.

    Returns:
        (bytes,), uint8: never longer than `new`.

    Raises:
        ValueError: tensors do not fit each other, or have a dtype without a form, or there are too many values.
    """
    return _encoded(held, new, last, _checked(held, last, form, new)).read()


def _encoded(held: Tensor, new: Tensor, last: Tensor | None, form: PatternForm) -> UnreadMessage:
    raw = new.view(torch.uint8)
    if not held.numel():
        return UnreadMessage.of(raw.clone())
    if (kernels := kernels_for(held, "codec.lossless_triton")) is not None:
        return UnreadMessage(*kernels.encode(form, held, new, last))
    payload = _coded(form, held, new, last)
    return UnreadMessage.of(payload if len(payload) < len(raw) else raw.clone())


def _coded(form: PatternForm, held: Tensor, new: Tensor, last: Tensor | None) -> Tensor:
    """The payload of differences, which may be longer than the new values."""
    if (loops := _loops_for(held)) is not None:
        payload: Tensor = loops.encode(form, held, new, last)
        return payload
    numel, patterns = form.numel(held), in_tiles(form.patterns(new))
    stride = sample_stride(len(patterns))
    context, folded, levels, base, past = _difference(form, held, patterns, last)
    table = choose_codes(form, context[::stride], folded[::stride], past.of_tiles(stride))
    words, sizes = write_runs(form, table, context, patterns, folded, past, numel)
    head = _Head(sizes, base, levels.view(-1)[: -(-numel // BLOCK)], table)
    return torch.cat([head.encoded(), words.view(torch.uint8)])


def _loops_for(held: Tensor) -> ModuleType | None:
    """The loops of numba for values on a CPU; None where they do not run."""
    loops = kernels_for(held, "codec.lossless_numba")
    if loops is None and held.is_cpu and type(held) is Tensor and not torch.compiler.is_compiling():
        _say_that_loops_are_missing()
    return loops


@cache
def _say_that_loops_are_missing() -> None:
    warnings.warn(
        "numba is not installed, so weights are coded without loss in plain torch, which takes a CPU twenty times as "
        "long; pip install numba",
        stacklevel=2,
    )


def decode(held: Tensor, payload: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None) -> Tensor:
    """Decode what `encode` returned for the same held values and last differences: the new values, to the bit.

    A payload has no checksum. If it is damaged, or meant for other held values, its sizes mostly tell; if they do not,
    other values come out.

    Raises:
        ValueError: tensors do not fit each other, or the sizes in the payload do not fit the held values.
    """
    out = torch.empty_like(held)
    fault = _decode_into(out, held, payload, last, _checked(held, last, form))
    check_sizes(fault is None or not fault.any())
    return out


def _decode_into(out: Tensor, held: Tensor, payload: Tensor, last: Tensor | None, form: PatternForm) -> Tensor | None:
    """Decode into `out`, which may be `held`. Returns what a kernel found, (1,), int32: not 0 if sizes do not fit."""
    if len(payload) == out.nbytes:
        out.view(torch.uint8).copy_(payload)
        return None
    check_sizes(len(payload) % 4 == 0 and len(payload) >= sum(_head_bytes(form.numel(held))))
    if (kernels := kernels_for(held, "codec.lossless_triton")) is not None:
        fault: Tensor = kernels.decode(form, held, payload, last, out)
        return fault
    out.copy_(form.tensor(_decoded(form, held, payload, last), held.dtype))
    return None


def _decoded(form: PatternForm, held: Tensor, payload: Tensor, last: Tensor | None) -> Tensor:
    """The new patterns, (n,), of any whole numbers."""
    if (loops := _loops_for(held)) is not None:
        new: Tensor = loops.decode(form, held, payload, last)
        return new
    numel = form.numel(held)
    head, begin = _Head.of(payload, numel)
    check_sizes(len(payload) == begin + 4 * int(head.sizes.words.sum()))
    words = payload[begin:].clone().view(torch.int32)
    old, past = in_tiles(form.patterns(held)), past_of(last)
    levels = functional.pad(head.levels, (0, -len(head.levels) % (TILE // BLOCK))).view(len(old), -1)
    context = contexts_of(form.exponents(old).to(torch.int32), levels, head.base, past, numel)
    patterns = read_runs(form, head.table, context, form.numbers(old), words, head.sizes, past, numel)
    return patterns.view(-1)[:numel]


def encode_in_pieces(held: Tensor, new: Tensor, last: Tensor | None = None) -> UnreadMessage:
    """Encode new values of any number as one message: the lengths of the payloads of pieces, int32, and the payloads.

    See `encode`. The last differences, (n,), int8, become those of this message. Pieces have as many values as a
    processor's caches hold, or many on an accelerator. If there are several, the host reads their lengths.
    """
    payloads, form = [], pattern_form_of(held.dtype)
    for old, fresh, past in zip(_pieces(held), _pieces(new), _pieces_of_last(last, held), strict=True):
        payloads.append(_encoded(old, fresh, past, _checked(old, past, form, fresh)))
        if past is not None:
            past.copy_(last_difference(old, fresh))
    if len(payloads) == 1:
        body, length = payloads[0]
        head = length.to(torch.int32).view(torch.uint8)
        return UnreadMessage(torch.cat([head, body]), length + len(head))
    lengths = torch.cat([each.length for each in payloads]).to(torch.int32)
    return UnreadMessage.of(torch.cat([lengths.view(torch.uint8), *(each.read() for each in payloads)]))


def decode_in_pieces(
    held: Tensor, message: Tensor, last: Tensor | None = None, *, faults: list[Tensor] | None = None
) -> None:
    """Decode what `encode_in_pieces` returned for the same held values and last differences, in place of both.

    With `faults` the host does not wait for a device, unless there are several pieces, whose lengths it reads: it
    appends what the device will find, and `check_faults` reads it later.

    Raises:
        ValueError: the message does not fit the held values: see `decode`.
    """
    pieces = _pieces(held)
    begin, found = 4 * len(pieces), [] if faults is None else faults
    check_sizes(len(message) >= begin)
    lengths = [len(message) - begin]
    if len(pieces) > 1 or kernels_for(held, "codec.lossless_triton") is None:
        lengths = message[:begin].clone().view(torch.int32).tolist()
        check_sizes(min(lengths) >= 0 and begin + sum(lengths) == len(message))
    form = pattern_form_of(held.dtype)
    for piece, payload, past in zip(pieces, message[begin:].split(lengths), _pieces_of_last(last, held), strict=True):
        before = None if past is None else piece.clone()
        if (fault := _decode_into(piece, piece, payload, past, form)) is not None:
            found.append(fault)
        if past is not None and before is not None:
            past.copy_(last_difference(before, piece))
    if faults is None:
        check_faults(found)


def check_faults(faults: list[Tensor]) -> None:
    """Read what a device has found, and forget it. Raises: ValueError if a message did not fit the held values."""
    found = torch.cat(faults).tolist() if faults else []  # the host waits once
    faults.clear()
    check_sizes(not any(found))


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    return values.split(DEVICE_PIECE_NUMEL if values.is_cuda else HOST_PIECE_NUMEL)


def _pieces_of_last(last: Tensor | None, held: Tensor) -> Sequence[Tensor | None]:
    return [None] * len(_pieces(held)) if last is None else _pieces(last)


def _checked(held: Tensor, last: Tensor | None, form: PatternForm | None, new: Tensor | None = None) -> PatternForm:
    form = form or pattern_form_of(held.dtype)
    numel = form.numel(held)
    if held.ndim != 1 or numel > MAX_NUMEL:
        raise ValueError(
            f"lossless differences are those of flat tensors of at most {MAX_NUMEL} values, got shape "
            f"{tuple(held.shape)}; use x.view(-1), and code long tensors in pieces"
        )
    if new is not None and (new.dtype, new.shape) != (held.dtype, held.shape):
        raise ValueError(
            f"new values of {new.dtype}, shape {tuple(new.shape)}, have no difference to held ones of {held.dtype}, "
            f"shape {tuple(held.shape)}; pass two versions of one tensor"
        )
    if last is not None and (last.dtype, last.shape) != (torch.int8, (numel,)):
        raise ValueError(
            f"the last differences of {numel} values are as many int8 numbers, got {last.dtype}, shape "
            f"{tuple(last.shape)}; pass what last_difference returns"
        )
    return form


def _difference(
    form: PatternForm, held: Tensor, patterns: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Past]:
    """The contexts of new patterns, their differences in the direction of the last ones, and the scales.

    Shapes: contexts and differences (t, TILE); the levels of scales (t, blocks), above bases (t,).
    """
    old, numel, past = in_tiles(form.patterns(held)), form.numel(held), past_of(last)
    exponents = form.exponents(old).to(torch.int32)
    moved = form.numbers(patterns).to(torch.int32) - form.numbers(old)
    levels, base = scales_of(moved, exponents)
    context = contexts_of(exponents, levels, base, past, numel)
    return context, moved if last is None else moved * past.sign, levels, base, past


class _Head(NamedTuple):
    """The part of a payload before the runs."""

    sizes: RunSizes
    base: Tensor
    """(t,), int32."""
    levels: Tensor
    """The scales, (b,), int32."""
    table: Tensor
    """The entry of each context, (IDLE,), int32."""

    def encoded(self) -> Tensor:
        """The bytes: (4 k,), uint8."""
        is_sent = self.table != defaults(self.table.device)
        head = [
            torch.stack(self.sizes, dim=1).to(torch.int16).view(-1).view(torch.uint8),
            (self.base - LOWEST_BASE).to(torch.uint8),
            pack_bits(functional.pad(self.levels, (0, len(self.levels) % 2)).to(torch.uint8), 4),
            (is_sent.view(-1, 8) << torch.arange(8, device=is_sent.device)).sum(1).to(torch.uint8),
            self.table[is_sent].to(torch.uint8),
        ]
        head.append(head[-1].new_zeros(-sum(map(len, head)) % 4))
        return torch.cat(head)

    @classmethod
    def of(cls, payload: Tensor, numel: int) -> tuple[_Head, int]:
        """The head of a payload of so many values, and its bytes."""
        num_tiles, num_blocks = -(-numel // TILE), -(-numel // BLOCK)
        known = _head_bytes(numel)
        parts = payload.split([*known, len(payload) - sum(known)])
        sizes, base, levels, is_sent, rest = parts
        sizes = sizes.clone().view(torch.int16).to(torch.int64).view(num_tiles, 2) & 0xFFFF
        is_sent = unpack(is_sent, 1)[:IDLE].bool()
        num_sent = int(is_sent.sum())
        check_sizes(len(rest) >= num_sent)
        table = defaults(payload.device).clone()
        table[is_sent] = rest[:num_sent].to(torch.int32) & (CODE | FLIP | PREDICT)
        nbytes = sum(known) + num_sent
        head = cls(
            RunSizes(*sizes.unbind(1)), base.to(torch.int32) + LOWEST_BASE,
            unpack(levels, 4)[:num_blocks].to(torch.int32), table,
        )  # fmt: skip
        return head, nbytes + -nbytes % 4


def _head_bytes(numel: int) -> tuple[int, int, int, int]:
    """The bytes of sizes, bases, scales, and of the bits that say which contexts have an entry."""
    num_tiles, num_blocks = -(-numel // TILE), -(-numel // BLOCK)
    return 4 * num_tiles, num_tiles, -(-num_blocks // 2), IDLE // 8


class PartBytes(NamedTuple):
    """The bytes of a payload by part."""

    head: int
    """The sizes and the base of each tile, and what fills up."""
    scales: int
    table: int
    unary: int
    """Whole ones of all tiles together."""
    fields: int
    """The patterns of raw tiles, and what fills words up, included."""


def part_bytes(payload: Tensor, numel: int) -> PartBytes:
    """The bytes of the parts of a payload of `numel` patterns, which is not the new values themselves."""
    head, nbytes = _Head.of(payload, numel)
    *_, scales, of_sent = _head_bytes(numel)
    table = of_sent + int((head.table != defaults(payload.device)).sum())
    unary = int(head.sizes.unary_bits.sum()) // 8
    return PartBytes(nbytes - scales - table, scales, table, unary, len(payload) - nbytes - unary)


def differences_by_context(
    held: Tensor, new: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None
) -> tuple[Tensor, Tensor]:
    """The context of each value, and its difference in the direction of the last one: (n,), int32 each.

    Their conditional entropy is the least that a code with these contexts takes.
    """
    form = _checked(held, last, form, new)
    context, folded, *_ = _difference(form, held, in_tiles(form.patterns(new)), last)
    numel = form.numel(held)
    return context.view(-1)[:numel], folded.view(-1)[:numel]
