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
the payload's table names in a byte. It is chosen by a histogram of each context, whose bits are counted for every code:

    Rice k      k low bits of the zigzag number of the difference, and the rest as a unary number. The table says, too,
                whether 0.9 times the last difference is taken off first, and which sign comes first in the zigzag.
    bucket m    For contexts that seldom change. The values of a tile with an equal m, in order, make buckets of 2**m. A
                unary number counts the events of a bucket, and each event has m bits for the place in the bucket and a
                sign. A change by two ulps is two events of one value. This is the code of Elias and Fano.
    none, raw   Contexts that never change, and those with no better code than their patterns.

Rare values cost a bounded number of bits: from the 16th unit of a quotient, or the fourth event of a
value, its pattern follows. A block that does not change costs its four bits. A payload as long as the new values *is*
the new values, and none is longer. Zeros of both signs, infinities and NaNs are patterns like others. In training the
payloads are 0.02 to 0.2 bits a weight above the entropy under the same contexts: RESULTS.md, section lossless.

[Note: Codes that decode in parallel]
Every tile of 8,192 values has its own words, whose numbers are in the head of the payload, so that tiles are coded each
by itself. A tile has two runs of bits. The unary numbers of all its values and buckets stand in one run: so many zeros
and a one. The place of the i-th one says all, so a scan decodes them. The other run has the fields: the low bits of all
values in order, then those of events, then the patterns of values with four events. The widths of fields follow from
contexts and unary numbers, so their offsets are a running sum. Nothing waits for a value before it. What either side
decides is whole-number arithmetic, so payloads have the same bytes on every device.

On a CPU both sides are some sixty operations on all values. They read sizes from the device, as `nonzero` does, where
the work depends on what changes; `encode` must know the length of its payload anyhow.

    payload     base of the scales, int16 | for each tile the words of its unary run and of its fields, uint16 each |
                scales, 4 bits each | the table, a byte for each context with 16 values or more | zeros up to a
                multiple of four bytes | the unary runs of all tiles | their fields; in words of 32 bits
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.cells import check_sizes, read_runs, write_runs
from laconic.codec.contexts import (
    BLOCK,
    IDLE,
    TILE,
    Past,
    choose_codes,
    contexts_of,
    in_tiles,
    occurrences,
    past_of,
    scales_of,
    with_defaults,
)
from laconic.codec.patterns import PatternForm, pattern_form_of
from laconic.codec.payload import DEVICE_PIECE_NUMEL, HOST_PIECE_NUMEL

MAX_NUMEL = 1 << 25
"""The values of a payload: offsets of bits then fit into 31 bits."""


def last_difference(held: Tensor, new: Tensor, *, form: PatternForm | None = None) -> Tensor:
    """The ulps by which patterns have moved, for the next call of `encode` and `decode`: (n,), int8, up to +-127."""
    form = form or pattern_form_of(held.dtype)
    moved = form.numbers(form.patterns(new)) - form.numbers(form.patterns(held))
    return moved.clamp_(-127, 127).to(torch.int8)


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
    form = _checked(held, last, form, new)
    raw = new.view(torch.uint8)
    payload = _coded(form, held, new, last) if held.numel() else raw
    return payload if len(payload) < len(raw) else raw.clone()


def _coded(form: PatternForm, held: Tensor, new: Tensor, last: Tensor | None) -> Tensor:
    """The payload of differences, which may be longer than the new values."""
    patterns = in_tiles(form.patterns(new))
    context, folded, levels, base, past = _difference(form, held, patterns, last)
    table, is_sent = choose_codes(form, context, folded, past)
    entries = table.index_select(0, context.view(-1)).view_as(context)
    unary, fields, lengths = write_runs(form, entries, patterns, folded, past)
    head = [_bytes(base.to(torch.int16).view(1)), _bytes(lengths.to(torch.int16).view(-1)), _pairs(levels)]
    head.append(table[is_sent].to(torch.uint8))
    head.append(head[-1].new_zeros(-sum(map(len, head)) % 4))
    return torch.cat([*head, _bytes(unary), _bytes(fields)])


def decode(held: Tensor, payload: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None) -> Tensor:
    """Decode what `encode` returned for the same held values and last differences: the new values, to the bit.

    A payload has no checksum. If it is damaged, or meant for other held values, its sizes mostly tell; if they do not,
    other values come out.

    Raises:
        ValueError: tensors do not fit each other, or the sizes in the payload do not fit the held values.
    """
    form = _checked(held, last, form)
    if len(payload) == held.numel() * held.element_size():
        return payload.clone().view(held.dtype)
    numel = form.numel(held)
    head = _Head.of(payload, numel)
    old = in_tiles(form.patterns(held))
    past = past_of(last, old)
    context = contexts_of(form.exponents(old), head.levels, head.base, past, numel)
    counts = occurrences(context.view(-1), IDLE + 1)
    table, is_sent = with_defaults(torch.zeros_like(counts), counts)
    sent = is_sent.nonzero().view(-1)
    begin = head.nbytes + len(sent)
    first = begin + -begin % 4
    num_unary, num_fields = head.lengths.sum(0).tolist()
    check_sizes(len(payload) == first + 4 * (num_unary + num_fields))
    table[sent] = payload[head.nbytes : begin].to(torch.int32)
    words = payload[first:].clone().view(torch.int32)
    entries = table.index_select(0, context.view(-1)).view_as(context)
    patterns = read_runs(form, entries, old, words[:num_unary], words[num_unary:], head.lengths, past)
    return form.tensor(patterns.view(-1)[:numel], held.dtype)


def encode_in_pieces(held: Tensor, new: Tensor) -> Tensor:
    """Encode new values of any number as one message: the lengths of the payloads of pieces, int32, and the payloads.

    See `encode`. Pieces have as many values as a processor's caches hold, or many on an accelerator.
    """
    payloads = [encode(a, b) for a, b in zip(_pieces(held), _pieces(new), strict=True)]
    lengths = torch.tensor([len(each) for each in payloads], dtype=torch.int32).to(held.device)
    return torch.cat([lengths.view(torch.uint8), *payloads])


def decode_in_pieces(held: Tensor, message: Tensor) -> None:
    """Decode what `encode_in_pieces` returned for the same held values, in place.

    Raises:
        ValueError: the message does not fit the held values: see `decode`.
    """
    pieces = _pieces(held)
    begin = 4 * len(pieces)
    check_sizes(len(message) >= begin)
    lengths = message[:begin].clone().view(torch.int32).tolist()
    check_sizes(min(lengths) >= 0 and begin + sum(lengths) == len(message))
    for piece, payload in zip(pieces, message[begin:].split(lengths), strict=True):
        piece.copy_(decode(piece, payload))


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    return values.split(HOST_PIECE_NUMEL if values.device.type == "cpu" else DEVICE_PIECE_NUMEL)


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

    Shapes: contexts and differences (t, TILE); the levels of scales (b,), above a base ().
    """
    old, numel = in_tiles(form.patterns(held)), form.numel(held)
    exponents, past = form.exponents(old), past_of(last, old)
    moved = form.numbers(patterns) - form.numbers(old)
    levels, base = scales_of(moved, exponents)
    levels = levels[: -(-numel // BLOCK)]
    return contexts_of(exponents, levels, base, past, numel), moved * past.sign, levels, base, past


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _pairs(levels: Tensor) -> Tensor:
    """Whole numbers of four bits as bytes, the first in the lower half."""
    low, high = functional.pad(levels, (0, len(levels) % 2)).view(-1, 2).unbind(1)
    return (low | (high << 4)).to(torch.uint8)


class _Head(NamedTuple):
    """The parts of a payload that have a known place."""

    base: Tensor
    """(), int32."""
    lengths: Tensor
    """The words of each tile's unary run and fields, (t, 2), int64."""
    levels: Tensor
    """The scales, (b,), int32."""
    nbytes: int

    @classmethod
    def of(cls, payload: Tensor, numel: int) -> _Head:
        num_tiles, num_blocks = -(-numel // TILE), -(-numel // BLOCK)
        begin = 2 + 4 * num_tiles
        end = begin + -(-num_blocks // 2)
        check_sizes(len(payload) >= end)
        numbers = payload[:begin].clone().view(torch.int16).to(torch.int32)
        lengths = numbers[1:].view(-1, 2).to(torch.int64) & 0xFFFF
        levels = torch.stack([payload[begin:end] & 15, payload[begin:end] >> 4], dim=1).view(-1)[:num_blocks]
        return cls(numbers[0], lengths, levels.to(torch.int32), end)


class PartBytes(NamedTuple):
    """The bytes of a payload by part."""

    head: int
    """The base, the words of each tile, and what fills up."""
    scales: int
    table: int
    unary: int
    fields: int


def part_bytes(payload: Tensor, numel: int) -> PartBytes:
    """The bytes of the parts of a payload of `numel` patterns, which is not the new values themselves."""
    head = _Head.of(payload, numel)
    unary, fields = (4 * head.lengths.sum(0)).tolist()
    scales, table = -(-len(head.levels) // 2), len(payload) - unary - fields - head.nbytes
    return PartBytes(head.nbytes - scales, scales, table, unary, fields)


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
