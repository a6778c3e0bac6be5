"""Lossless differences in few kernels of triton: each tile is one program, which reads its values once.

Payloads have the bytes of those of codec/lossless_numba.py, and so have values.

[Note: Lossless kernels]
To encode takes two kernels. `_write` writes the run of each tile to a scratch place of the length that patterns have,
which no run exceeds. The last of its programs to finish adds up the lengths of runs. `_gather` moves the runs together,
into memory of the length that the new values have. So the host need not know how long a payload is.

Each program adds one to a counter at its end, and the one that finds all others there is the last: `_is_last`. A
barrier puts the stores of all its threads before the addition, which releases them to the whole GPU. The last addition
acquires what all others have released, and a barrier puts the loads of all threads after it. No program waits for
another, so they may run in any order.

To decode takes one kernel over tables, `_find`, and one over values, `_read`. Unary numbers are found by a running sum
over the bits of a run: the place of each one goes to a scratch place of its index. Events of buckets are added to
numbers of four bits in a scratch place, as order does not matter to a sum. Whatever a damaged payload says, no access
is out of bounds; what does not fit is noted for the host.

Lengths of payloads vary from step to step, and addresses in them do. So kernels take those as they are: triton would
compile a kernel again, in the middle of a run, for a length that is a multiple of 16.

Programs write bits of words by atomic operations, since several values share a word, and read scratch places after a
barrier of their own. But for the lengths of runs, no program reads what another one writes in the same kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codec import contexts
from laconic.codec.patterns import PatternForm

NUM_WARPS = 16
_TABLE_WARPS = 4
_ALIGNMENT = 16  # of addresses for which triton compiles no other kernel
_TILE: tl.constexpr = tl.constexpr(contexts.TILE)
_BLOCK: tl.constexpr = tl.constexpr(contexts.BLOCK)
_BLOCKS: tl.constexpr = tl.constexpr(contexts.TILE // contexts.BLOCK)
_CLASSES: tl.constexpr = tl.constexpr(contexts.CLASSES)
_IDLE: tl.constexpr = tl.constexpr(contexts.IDLE)
_CONTEXTS: tl.constexpr = tl.constexpr(32)
"""A power of two that is no less than _CLASSES."""
_RICE_CODES: tl.constexpr = tl.constexpr(contexts.RICE_CODES)
_RAW: tl.constexpr = tl.constexpr(contexts.RAW)
_NONE: tl.constexpr = tl.constexpr(contexts.NONE)
_BUCKETS: tl.constexpr = tl.constexpr(contexts.BUCKETS)
_SIZES: tl.constexpr = tl.constexpr(len(contexts.BUCKET_BITS))
_MAX_QUOTIENT: tl.constexpr = tl.constexpr(contexts.MAX_QUOTIENT)
_MAX_EVENTS: tl.constexpr = tl.constexpr(contexts.MAX_EVENTS)
_MAX_LEVEL: tl.constexpr = tl.constexpr(contexts.MAX_LEVEL)
_LOWEST_BASE: tl.constexpr = tl.constexpr(contexts.LOWEST_BASE)
_STEP_BITS: tl.constexpr = tl.constexpr(contexts.STEP_BITS)
_MAX_STEP: tl.constexpr = tl.constexpr(contexts.MAX_STEP)
_GROUP: tl.constexpr = tl.constexpr(8)
"""The neighbours whose fields are put together before they are written."""
_CHUNK: tl.constexpr = tl.constexpr(2048)
"""The bits, words or tiles that are looked at together."""
assert contexts.BUCKET_BITS == (1, 2, 3, 4, 6, 8, 10), "kernels compute them: _bucket_bits"


def encode(form: PatternForm, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The payload of differences, or the new values if it is no shorter, and its length. See `lossless.encode`.

    Shapes: held and new (n,), contiguous, on CUDA -> (bytes of new,), uint8, of which the payload is the first part,
        and (1,), int32, the bytes of the payload. The host reads nothing.
    """
    numel, device = len(held), held.device
    num_tiles, most_words = triton.cdiv(numel, contexts.TILE), contexts.TILE * form.bits // 32
    scratch = torch.zeros(_ALIGNMENT + triton.cdiv(contexts.head_bytes(numel), 4) * 4, dtype=torch.uint8, device=device)
    num_done, head = scratch[:4].view(torch.int32), scratch[_ALIGNMENT:]
    sizes = head[: 4 * num_tiles].view(torch.int16)
    begins, length, words = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_tiles, 1, num_tiles * most_words)
    )
    _write[(num_tiles,)](
        _patterns(held), _patterns(new), _codes(device), words, sizes, head, begins, length, num_done, numel,
        **constants_of_form(form), num_warps=NUM_WARPS,
    )  # fmt: skip
    payload = torch.empty(-(-new.nbytes // 4) * 4, dtype=torch.uint8, device=device)
    payload[: len(head)] = head[: len(payload)]
    _gather[(num_tiles,)](
        words, sizes, begins, length, new.view(torch.uint8), payload, payload.view(torch.int32), new.nbytes,
        MOST_WORDS=most_words, TILE_BYTES=contexts.TILE * form.bits // 8, num_warps=_TABLE_WARPS,
    )  # fmt: skip
    return payload[: new.nbytes], length


def decode(form: PatternForm, held: Tensor, payload: Tensor, out: Tensor) -> Tensor:
    """Decode a payload that is not the new values themselves into `out`, which may be `held`.

    Shapes: held and out (n,), contiguous, on CUDA; payload (4 k,), uint8, no shorter than its head -> (1,), int32: not
        0 if the payload is damaged. The host reads nothing.
    """
    if payload.storage_offset() % 4:  # words begin at multiples of four bytes
        payload = payload.clone()
    numel, device = len(held), held.device
    num_tiles = triton.cdiv(numel, contexts.TILE)
    table = torch.empty(contexts.CLASSES, dtype=torch.uint8, device=device)
    begins, fault = (torch.empty(size, dtype=torch.int32, device=device) for size in (num_tiles, 1))
    _find[(1,)](
        payload, _codes(device), table, begins, fault, len(payload), num_tiles, contexts.head_bytes(numel),
        num_warps=_TABLE_WARPS,
    )  # fmt: skip
    numbers = torch.empty(num_tiles * contexts.TILE, dtype=torch.uint8, device=device)
    changes = torch.empty(num_tiles * contexts.TILE // 8, dtype=torch.int32, device=device)
    _read[(num_tiles,)](
        _patterns(held), payload, payload.view(torch.int32), table, begins, numbers, changes,
        changes.view(torch.uint8), fault, _patterns(out), numel, len(payload) // 4, num_tiles,
        **constants_of_form(form), num_warps=NUM_WARPS,
    )  # fmt: skip
    return fault


def constants_of_form(form: PatternForm) -> dict[str, Any]:
    """The constants of the kernels over values for a form."""
    return {"BITS": form.bits, "MANTISSA": -1 if form.mantissa_bits is None else form.mantissa_bits}


def _patterns(values: Tensor) -> Tensor:
    """The values as whole numbers of as many bits."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int8)


@lru_cache
def _codes(device: torch.device) -> Tensor:
    """The code of each context, (CLASSES,), uint8."""
    return torch.tensor(contexts.CODES, dtype=torch.uint8, device=device)


# -- what both sides know ----------------------------------------------------------------------------------------------


@triton.jit
def _patterns_at(patterns, first, numel, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those of a tile from the value `first` on, zeros beyond the last; a sign fills what is above it."""
    at = first + tl.arange(0, _TILE)
    pattern = tl.load(patterns + at, mask=at < numel, other=0).to(tl.int32)
    return pattern & 0xFF if MANTISSA < 0 else pattern


@triton.jit
def _number(pattern, BITS: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    if MANTISSA < 0:
        return pattern
    return pattern ^ ((pattern >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@triton.jit
def _exponent(pattern, BITS: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    if MANTISSA < 0:
        return tl.zeros_like(pattern) + 1
    return tl.maximum((pattern >> MANTISSA) & ((1 << (BITS - 1 - MANTISSA)) - 1), 1)


@triton.jit
def _bit_length(numbers):  # type: ignore[no-untyped-def]
    """Of numbers below 2**24, which fp32 holds."""
    return tl.maximum((numbers.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _bucket_bits(place):  # type: ignore[no-untyped-def]
    return tl.where(place < 4, place + 1, 2 * place - 2)


@triton.jit
def _by_block(of_blocks):  # type: ignore[no-untyped-def]
    """The number of its block, for each value of a tile."""
    return tl.reshape(of_blocks[:, None] + tl.zeros((_BLOCKS, _BLOCK), tl.int32), (_TILE,))


@triton.jit
def _context(exponent, scale, level, is_own):  # type: ignore[no-untyped-def]
    context = tl.minimum(tl.maximum(scale - exponent, 0), _CLASSES - 1)
    return tl.where(is_own & (level > 0), context, _IDLE)


# -- encode ------------------------------------------------------------------------------------------------------------


@triton.jit
def _scales(moved, exponent):  # type: ignore[no-untyped-def]
    """The level of each block, (_BLOCKS,), and the base of the tile."""
    sizes = tl.reshape(tl.abs(moved), (_BLOCKS, _BLOCK))
    exponents = tl.reshape(exponent, (_BLOCKS, _BLOCK))
    top = tl.max(exponents, axis=1)
    steps = (sizes << _STEP_BITS) >> tl.minimum(top[:, None] - exponents, 30)
    total = tl.sum(tl.minimum(steps, _MAX_STEP), axis=1)
    is_changed = tl.max(sizes, axis=1) > 0
    scale = top - _STEP_BITS + _bit_length(total)
    highest = tl.max(tl.where(is_changed, scale, _LOWEST_BASE), axis=0)
    base = tl.minimum(tl.maximum(highest - _MAX_LEVEL, _LOWEST_BASE), _LOWEST_BASE + 255)
    return tl.where(is_changed, tl.minimum(tl.maximum(scale - base, 1), _MAX_LEVEL), 0), base


@triton.jit
def _add_fields(words, value, offset, width, is_own):  # type: ignore[no-untyped-def]
    """Write fields of at most 16 bits, whose offsets ascend, into words of zeros.

    A word takes the fields of several neighbours. So those of _GROUP values are put together before they are added: a
    word at a time, of the few that a group spans.
    """
    value, end = tl.where(is_own, value, 0), offset + width - 1
    grouped = tl.reshape(tl.where(is_own, offset >> 5, 1 << 30), (_TILE // _GROUP, _GROUP))
    begin = tl.min(grouped, axis=1)
    first = tl.reshape(begin[:, None] + tl.zeros_like(grouped), (_TILE,))
    span = tl.max(tl.where(is_own, (end >> 5) - first, -1), axis=0)
    for index in range(span + 1):
        place, shift = (offset >> 5) - first, offset & 31
        bits = tl.where(place == index, value << shift, 0)
        bits |= tl.where(place == index - 1, (value >> 1) >> (31 - shift), 0)  # no shift is by 32 bits
        total = tl.sum(tl.reshape(bits, (_TILE // _GROUP, _GROUP)), axis=1)  # no two have a bit in common
        tl.atomic_add(words + begin + index, total, mask=total != 0, sem="relaxed")


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    held, new, codes, words, sizes, head, begins, length, num_done, numel,
    BITS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    tile, num_tiles, level_bytes = tl.program_id(0), tl.num_programs(0), tl.cdiv(numel, 2 * _BLOCK)
    at = tile * _TILE + tl.arange(0, _TILE)
    is_own = at < numel
    old = _patterns_at(held, tile * _TILE, numel, MANTISSA)
    fresh = _patterns_at(new, tile * _TILE, numel, MANTISSA)
    moved = _number(fresh, BITS, MANTISSA) - _number(old, BITS, MANTISSA)
    exponent = _exponent(old, BITS, MANTISSA)
    level, base = _scales(moved, exponent)
    tl.store(head + 4 * num_tiles + tile, (base - _LOWEST_BASE).to(tl.uint8))
    pairs = tl.sum(tl.reshape(level, (_BLOCKS // 2, 2)) << (4 * tl.arange(0, 2))[None, :], axis=1)
    pair = tile * (_BLOCKS // 2) + tl.arange(0, _BLOCKS // 2)
    tl.store(head + 5 * num_tiles + pair, pairs.to(tl.uint8), mask=pair < level_bytes)

    context = _context(exponent, _by_block(level + base), _by_block(level), is_own)
    code = tl.load(codes + context, mask=context < _IDLE, other=_NONE).to(tl.int32)
    turned = -moved
    zigzag = (turned << 1) ^ (turned >> 31)
    is_rice = code < _RICE_CODES
    quotient = tl.where(is_rice, tl.minimum(zigzag >> code, _MAX_QUOTIENT), 0)
    events = tl.where(code >= _BUCKETS, tl.minimum(tl.abs(moved), _MAX_EVENTS), 0)
    is_escaped = (quotient == _MAX_QUOTIENT) | (events == _MAX_EVENTS)
    width = tl.where(is_escaped, BITS, tl.where(is_rice, code, 0))

    # all sizes before any place: so no array of places waits for them
    step = tl.where(is_rice, quotient + 1, 0)
    rice_bits, event_bits = tl.sum(step, axis=0), 0
    unary_bits = rice_bits
    for place in range(_SIZES):
        m = _bucket_bits(place)
        total = tl.sum(tl.where(code == _BUCKETS + m, (events << 16) + 1, 0), axis=0)
        unary_bits += (((total & 0xFFFF) + (1 << m) - 1) >> m) + (total >> 16)
        event_bits += (total >> 16) * (m + 1)
    num_words = (unary_bits + event_bits + tl.sum(width, axis=0) + 31) >> 5
    raw_words = (tl.minimum(numel - tile * _TILE, _TILE) * BITS + 31) >> 5
    is_raw = (num_words >= raw_words) & (unary_bits > 0)
    num_words = tl.where(is_raw, raw_words, num_words)
    tl.store(sizes + 2 * tile, tl.where(is_raw, 0, unary_bits).to(tl.int16))
    tl.store(sizes + 2 * tile + 1, num_words.to(tl.int16))

    own = words + tile * (_TILE * BITS // 32)
    word = tl.arange(0, _CHUNK)
    for first in range(0, num_words, _CHUNK):
        tl.store(own + first + word, tl.zeros_like(word), mask=first + word < num_words)
    tl.debug_barrier()
    # registers are few: both are needed when all events are written
    width = tl.where(is_raw, tl.where(is_own, BITS, 0), width)
    field = tl.where(is_escaped | is_raw, fresh & ((1 << BITS) - 1), zigzag & ((1 << width) - 1))
    own_field = field | (width << 16)
    bucket = code | (events << 5) | ((moved < 0).to(tl.int32) << 8)
    unary_at, event_at = rice_bits, tl.where(is_raw, 0, unary_bits)
    if not is_raw:
        _add_fields(own, tl.zeros_like(step) + 1, tl.cumsum(step, axis=0) - 1, 1, is_rice)
        for place in range(_SIZES):
            m = _bucket_bits(place)
            is_member, full, events = (bucket & 31) == _BUCKETS + m, (1 << m) - 1, (bucket >> 5) & 7
            # the members and, above them, their events
            number = tl.where(is_member, (events << 16) + 1, 0)
            running = tl.cumsum(number, axis=0)
            total = tl.max(running, axis=0)
            if total > 0:
                rank, count = (running & 0xFFFF) - 1, total & 0xFFFF
                is_last = is_member & (((rank & full) == full) | (rank == count - 1))
                one_at = unary_at + (rank >> m) + (running >> 16)
                _add_fields(own, tl.zeros_like(rank) + 1, one_at, 1, is_last)
                event = ((rank & full) << 1) | (bucket >> 8)
                at_event = event_at + ((running >> 16) - events) * (m + 1)
                for index in range(tl.max(tl.where(is_member, events, 0), axis=0)):
                    _add_fields(own, event, at_event + index * (m + 1), m + 1, is_member & (index < events))
                unary_at += ((count + full) >> m) + (total >> 16)
                event_at += (total >> 16) * (m + 1)
    width = own_field >> 16
    _add_fields(own, own_field & 0xFFFF, event_at + tl.cumsum(width, axis=0) - width, width, width > 0)
    if _is_last(num_done):
        head_words = (5 * num_tiles + level_bytes + _CLASSES + 3) // 4
        _lay_out(sizes, begins, length, num_tiles, head_words, numel * BITS // 8)


@triton.jit
def _is_last(num_done):  # type: ignore[no-untyped-def]
    """Whether all other programs have come here. If so, this one can read what they have stored before."""
    tl.debug_barrier()
    order = tl.atomic_add(num_done, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return order == tl.num_programs(0) - 1


@triton.jit
def _lay_out(sizes, begins, length, num_tiles, head_words, nbytes):  # type: ignore[no-untyped-def]
    """The word of the payload at which each run begins, and the length of the payload."""
    lane = tl.arange(0, _CHUNK)
    total = head_words
    for first in range(0, num_tiles, _CHUNK):
        tile = first + lane
        # others have written it: not from the multiprocessor's own cache
        num_words = tl.load(sizes + 2 * tile + 1, mask=tile < num_tiles, other=0, cache_modifier=".cg")
        num_words = num_words.to(tl.int32) & 0xFFFF
        tl.store(begins + tile, total + tl.cumsum(num_words, axis=0) - num_words, mask=tile < num_tiles)
        total += tl.sum(num_words, axis=0)
    tl.store(length, tl.minimum(4 * total, nbytes))


@triton.jit(do_not_specialize=["nbytes"], do_not_specialize_on_alignment=["new"])
def _gather(  # type: ignore[no-untyped-def]
    words, sizes, begins, length, new, out, out_words, nbytes, MOST_WORDS: tl.constexpr, TILE_BYTES: tl.constexpr,
):  # fmt: skip
    """Move the run of a tile behind the head; or its new values, if the payload would be no shorter than those."""
    tile, lane = tl.program_id(0), tl.arange(0, _CHUNK)
    if tl.load(length) >= nbytes:
        for first in range(0, TILE_BYTES, _CHUNK):
            at = tile * TILE_BYTES + first + lane
            tl.store(out + at, tl.load(new + at, mask=at < nbytes, other=0), mask=at < nbytes)
    else:
        num_words = tl.load(sizes + 2 * tile + 1).to(tl.int32) & 0xFFFF
        own, run = words + tile * MOST_WORDS, out_words + tl.load(begins + tile)
        for first in range(0, num_words, _CHUNK):
            is_own = first + lane < num_words
            tl.store(run + first + lane, tl.load(own + first + lane, mask=is_own, other=0), mask=is_own)


# -- decode ------------------------------------------------------------------------------------------------------------


@triton.jit
def _size_at(payload, place, is_own):  # type: ignore[no-untyped-def]
    """Numbers of two bytes."""
    low = tl.load(payload + 2 * place, mask=is_own, other=0).to(tl.int32)
    return low | (tl.load(payload + 2 * place + 1, mask=is_own, other=0).to(tl.int32) << 8)


@triton.jit(do_not_specialize=["nbytes", "num_tiles", "known"], do_not_specialize_on_alignment=["payload"])
def _find(payload, codes, table, begins, fault, nbytes, num_tiles, known):  # type: ignore[no-untyped-def]
    context = tl.arange(0, _CONTEXTS)
    is_known = context < _CLASSES
    is_named = (tl.load(payload + known - _CLASSES + context, mask=is_known, other=0) != 0).to(tl.int32)
    place = known + tl.cumsum(is_named, axis=0) - 1
    entry = tl.load(payload + place, mask=(is_named != 0) & (place < nbytes), other=0).to(tl.int32) & 63
    entry = tl.where(is_named != 0, entry, tl.load(codes + context, mask=is_known, other=0))
    tl.store(table + context, entry.to(tl.uint8), mask=is_known)
    total = (known + tl.sum(is_named, axis=0) + 3) // 4 * 4
    lane = tl.arange(0, _CHUNK)
    for first in range(0, num_tiles, _CHUNK):
        tile = first + lane
        num = 4 * _size_at(payload, 2 * tile + 1, tile < num_tiles)
        tl.store(begins + tile, (total + tl.cumsum(num, axis=0) - num) // 4, mask=tile < num_tiles)
        total += tl.sum(num, axis=0)
    tl.store(fault, (total != nbytes).to(tl.int32))


@triton.jit
def _bits_at(run, first, num_words):  # type: ignore[no-untyped-def]
    """The bits of _CHUNK // 32 words of a run, and the zeros before each, up to 17; both (_CHUNK,), int32."""
    word, bit = first // 32 + tl.arange(0, _CHUNK // 32), tl.arange(0, 32)[None, :]
    own = tl.load(run + word, mask=word < num_words, other=0)[:, None]
    before = tl.load(run + word - 1, mask=(word > 0) & (word - 1 < num_words), other=0)[:, None]
    bits = (own << (31 - bit)) | (((before >> 1) & 0x7FFFFFFF) >> bit)  # up to this one, which is on top
    zeros = 17 - _bit_length((bits >> 14) & 0x1FFFF)
    return tl.reshape((bits >> 31) & 1, (_CHUNK,)), tl.reshape(zeros, (_CHUNK,))


@triton.jit
def _field_at(run, offset, width, num_words, is_own):  # type: ignore[no-untyped-def]
    """Fields of at most 16 bits in a run of so many words."""
    word, shift = offset >> 5, offset & 31
    low = tl.load(run + word, mask=is_own & (word < num_words), other=0)
    high = tl.load(run + word + 1, mask=is_own & (shift + width > 32) & (word + 1 < num_words), other=0)
    return (((low >> shift) & ~(-2 << (31 - shift))) | ((high << 1) << (31 - shift))) & ((1 << width) - 1)


@triton.jit
def _fields_at(run, offset, width, num_words):  # type: ignore[no-untyped-def]
    """Read what `_add_fields` has written: those of _GROUP values, whose offsets ascend, share a few words."""
    is_own = width > 0
    grouped = tl.reshape(tl.where(is_own, offset >> 5, 1 << 30), (_TILE // _GROUP, _GROUP))
    begin = tl.min(grouped, axis=1)
    first = tl.reshape(begin[:, None] + tl.zeros_like(grouped), (_TILE,))
    span = tl.max(tl.where(is_own, ((offset + width - 1) >> 5) - first, -1), axis=0)
    bits = tl.zeros_like(offset)
    for index in range(span + 1):
        word = tl.load(run + begin + index, mask=begin + index < num_words, other=0)
        own = tl.reshape(word[:, None] + tl.zeros_like(grouped), (_TILE,))
        place, shift = (offset >> 5) - first, offset & 31
        bits |= tl.where(place == index, (own >> shift) & ~(-2 << (31 - shift)), 0)  # the shift repeats the sign
        bits |= tl.where(place == index - 1, (own << 1) << (31 - shift), 0)
    return bits & ((1 << width) - 1)


@triton.jit(do_not_specialize=["all_words", "num_tiles"], do_not_specialize_on_alignment=["payload", "payload_words"])
def _read(  # type: ignore[no-untyped-def]
    held, payload, payload_words, table, begins, numbers, changes, change_bytes, fault, out, numel, all_words,
    num_tiles, BITS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    tile, lane = tl.program_id(0), tl.arange(0, _TILE)
    at = tile * _TILE + lane
    is_own = at < numel
    begin = tl.minimum(tl.load(begins + tile), all_words)  # beyond the end if sizes are wrong
    unary_bits, num_words = _size_at(payload, 2 * tile, True), _size_at(payload, 2 * tile + 1, True)
    is_raw = (unary_bits == 0) & (num_words > 0)
    run, most_words = payload_words + begin, tl.minimum(num_words, all_words - begin)
    unary_bits = tl.minimum(unary_bits, 32 * most_words)

    # the unary numbers of Rice codes, and others as far as they fit, by their index
    own_numbers, lanes = numbers + tile * _TILE, tl.arange(0, _CHUNK)
    num_ones = 0
    for first in range(0, unary_bits, _CHUNK):
        place = first + lanes
        is_one, zeros = _bits_at(run, first, most_words)
        is_one = tl.where(place < unary_bits, is_one, 0)
        index = num_ones + tl.cumsum(is_one, axis=0) - 1
        number = tl.minimum(tl.minimum(zeros, place), _MAX_QUOTIENT)
        tl.store(own_numbers + index, number.to(tl.uint8), mask=(is_one != 0) & (index < _TILE))
        num_ones += tl.sum(is_one, axis=0)
    own_changes = changes + tile * (_TILE // 8)
    tl.store(own_changes + tl.arange(0, _TILE // 8), tl.full((_TILE // 8,), 0x44444444, tl.int32))
    tl.debug_barrier()

    old = _patterns_at(held, tile * _TILE, numel, MANTISSA)
    block = tile * _BLOCKS + tl.arange(0, _BLOCKS)
    is_block = block * _BLOCK < numel
    level = tl.load(payload + 5 * num_tiles + (block >> 1), mask=is_block, other=0).to(tl.int32)
    level = (level >> (4 * (block & 1))) & 15
    base = tl.load(payload + 4 * num_tiles + tile).to(tl.int32) + _LOWEST_BASE
    exponent = _exponent(old, BITS, MANTISSA)
    context = _context(exponent, _by_block(level + base), _by_block(level), is_own)
    entry = tl.load(table + context, mask=context < _IDLE, other=_NONE).to(tl.int32)
    entry = tl.where(is_raw, tl.where(is_own, _RAW, _NONE), entry)
    code = entry & 31

    is_rice = code < _RICE_CODES
    rank = tl.cumsum(is_rice.to(tl.int32), axis=0) - 1
    quotient = tl.load(own_numbers + rank, mask=is_rice & (rank < num_ones), other=0).to(tl.int32)
    num_cells = tl.sum(is_rice.to(tl.int32), axis=0)
    unary_at = num_cells + tl.sum(quotient, axis=0)
    # registers are few: above the entry, of 6 bits, are the quotient, of 5, and the change plus 4
    entry |= (quotient << 6) | (4 << 11)

    # the events of buckets: each zero is one
    field_at, slot_at = unary_bits, 0
    num_wrong = 0
    for size in range(_SIZES):
        m = _bucket_bits(size)
        is_member = code == _BUCKETS + m
        count = tl.sum(is_member.to(tl.int32), axis=0)
        if count > 0:
            cells = (count + (1 << m) - 1) >> m
            num_cells += cells
            begin_bit, num_before, num_events = unary_at, 0, 0
            first = unary_at // 32 * 32
            while (num_before < cells) & (first < unary_bits):
                place = first + lanes
                is_one, zeros = _bits_at(run, first, most_words)
                is_here = (place >= begin_bit) & (place < unary_bits)
                is_one = tl.where(is_here, is_one, 0)
                bucket = num_before + tl.cumsum(is_one, axis=0) - is_one
                is_event = is_here & (is_one == 0) & (bucket < cells)
                field = field_at + (place - begin_bit - bucket) * (m + 1)
                field = _field_at(run, field, m + 1, most_words, is_event)
                member = (bucket << m) + (field >> 1)
                num_wrong += tl.sum((is_event & (member >= count)).to(tl.int32), axis=0)
                change = (1 - 2 * (field & 1)) << (4 * ((slot_at + member) & 7))
                target = own_changes + ((slot_at + member) >> 3)
                tl.atomic_add(target, change, mask=is_event & (member < count), sem="relaxed")
                num_before += tl.sum(is_one, axis=0)
                num_events += tl.sum(is_event.to(tl.int32), axis=0)
                first += _CHUNK
            unary_at, field_at = unary_at + cells + num_events, field_at + num_events * (m + 1)
            tl.debug_barrier()
            slot = slot_at + tl.cumsum(is_member.to(tl.int32), axis=0) - 1
            pair = change_bytes + tile * (_TILE // 2) + (slot >> 1)
            # not from the multiprocessor's own cache, which atomic operations pass by
            pair = tl.load(pair, mask=is_member, other=0, cache_modifier=".cg").to(tl.int32)
            entry += tl.where(is_member, ((pair >> (4 * (slot & 1))) & 15) - 4, 0) << 11
            slot_at += count

    quotient, change = (entry >> 6) & 31, (entry >> 11) - 4
    is_escaped = (quotient >= _MAX_QUOTIENT) | (tl.abs(change) >= _MAX_EVENTS) | (code == _RAW)
    width = tl.where(is_escaped, BITS, tl.where(is_rice, code, 0))
    field = _fields_at(run, field_at + tl.cumsum(width, axis=0) - width, width, most_words)
    num_bits = field_at + tl.sum(width, axis=0)
    is_wrong = (num_wrong > 0) | (num_cells != num_ones) | (((num_bits + 31) >> 5) != num_words)
    tl.store(fault, 1, mask=is_wrong)

    zigzag = tl.where(is_rice, (quotient << code) | field, 0)
    value = (zigzag >> 1) ^ -(zigzag & 1)
    value = tl.where((entry & 32) != 0, value, -value)
    moved = tl.where(is_rice, value, change)
    pattern = tl.where(is_escaped, field, _number(_number(old, BITS, MANTISSA) + moved, BITS, MANTISSA))
    tl.store(out + at, pattern.to(out.dtype.element_ty), mask=is_own)
