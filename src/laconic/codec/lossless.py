"""Weights that others hold in an older version, without loss, in the bits of their differences: `encode`, `decode`.

[Note: Lossless differences]
Receivers hold the last 16-bit or 8-bit pattern of every weight. Between two steps most patterns move by few units in
the last place (ulps) or not at all, so the owner sends that. An optimizer's step has nearly one size for the weights of
a block, but an ulp depends on the exponent. One number of four bits for each block of 512 weights is the logarithm of
the step. It and the exponent of the *held* pattern give the size of the difference in ulps, to a factor of two, before
the difference is read: 24 contexts, each with a code.

    Rice k      k low bits of the zigzag number of the difference, and the rest as a unary number.
    bucket m    For contexts that seldom change. The values of a tile with an equal m, in order, make buckets of 2**m. A
                unary number counts the events of a bucket, and each event has m bits for the place in the bucket and a
                sign. A change by two ulps is two events of one value. This is the code of Elias and Fano.

Rare values cost a bounded number of bits: from the 16th unit of a quotient, or the fourth event of a value, its pattern
follows. A block that does not change costs its four bits. A tile that takes as many words as its patterns has these,
and a payload as long as the new values *is* the new values. Zeros of both signs, infinities and NaNs are patterns like
others. In training the payloads are some 0.02 to 0.2 bits a weight above the entropy under the same contexts. Codes
that a histogram chose were at most 0.5 % shorter. With the last difference of each weight as a context, too, a weight
took 10 to 20 % less at learning rates of 1e-4 to 1e-3; but each receiver had to keep it, a byte a weight.

[Note: Codes that decode in parallel]
Every tile of 4,096 values has its own words, whose number is in the head of the payload, so that tiles are coded each
by itself. They begin with the unary numbers, each as so many zeros and a one: those of Rice codes, then those of
buckets, by their size. The place of the i-th one says all, so a running sum decodes them. Then come fields: those of
all events, and for each value, in order, its low bits or its pattern. The widths of fields follow from contexts and
unary numbers, so their offsets are a running sum. Nothing waits for a value before it. What either side decides is
whole-number arithmetic, so payloads have the same bytes on every device.

On a CPU each side is a loop over the values of a tile, which numba compiles: codec/lossless_numba.py. On CUDA they are
a few kernels: [Note: Lossless kernels] in codec/lossless_triton.py. No other device codes.

    payload     for each tile the bits of its unary numbers and its words, uint16 each | for each tile the base of its
                scales, less the lowest, a byte | scales, 4 bits each | a byte for each of 24 contexts: 1 if the payload
                names its code, else 0 | the codes that it names, a byte each | zeros up to a multiple of four bytes |
                the words of all tiles, of 32 bits

Payloads of today name no code. Those that older releases have published do, and their Rice codes may begin with minus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.codec.coding import PartCoding
from laconic.codec.contexts import head_bytes
from laconic.codec.kernels import coder_of
from laconic.codec.patterns import PatternForm, pattern_form_of
from laconic.codec.payload import DEVICE_PIECE_NUMEL, HOST_PIECE_NUMEL

MAX_NUMEL = 1 << 25
"""The values of a payload: offsets of bits then fit into 31 bits."""


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


def encode(held: Tensor, new: Tensor) -> Tensor:
    """Encode new values for those who hold others, as a payload of its own length: [Note: Lossless differences].

    Args:
        held: the values that receivers hold, flat, of at most 2**25 values of 16 bits or fewer.
        new: the new values, of the same dtype, shape and device.

    Returns:
        (bytes,), uint8: never longer than `new`.

    Raises:
        ValueError: tensors do not fit each other, or have a dtype without a form, or there are too many values.
        ModuleNotFoundError: see `coder_on`.
    """
    return _encoded(held, new).read()


def _encoded(held: Tensor, new: Tensor) -> UnreadMessage:
    form, raw = _checked(held, new), new.view(torch.uint8)
    if not held.numel():
        return UnreadMessage.of(raw.clone())
    coder = coder_of(held, "lossless")
    if held.is_cuda:
        return UnreadMessage(*coder.encode(form, held, new))
    payload = coder.encode(form, held, new)
    return UnreadMessage.of(payload if len(payload) < len(raw) else raw.clone())


def decode(held: Tensor, payload: Tensor) -> Tensor:
    """Decode what `encode` returned for the same held values: the new values, to the bit.

    A payload has no checksum. If it is damaged, or meant for other held values, its sizes mostly tell; if they do not,
    other values come out.

    Raises:
        ValueError: tensors do not fit each other, or the sizes in the payload do not fit the held values.
        ModuleNotFoundError: see `coder_on`.
    """
    out = torch.empty_like(held)
    fault = _decode_into(out, held, payload)
    _check_sizes(fault is None or not fault.any())
    return out


def _decode_into(out: Tensor, held: Tensor, payload: Tensor) -> Tensor | None:
    """Decode into `out`, which may be `held`. Returns what a kernel found, (1,), int32: not 0 if sizes do not fit."""
    form = _checked(held)
    if len(payload) == out.nbytes:
        out.view(torch.uint8).copy_(payload)
        return None
    _check_sizes(len(payload) % 4 == 0 and len(payload) >= head_bytes(len(held)))
    coder = coder_of(held, "lossless")
    if held.is_cuda:
        fault: Tensor = coder.decode(form, held, payload, out)
        return fault
    new = coder.decode(form, held, payload)
    _check_sizes(new is not None)
    out.copy_(form.tensor(new, held.dtype))
    return None


def _check_sizes(agree: bool | Tensor) -> None:
    """Raise a ValueError unless the sizes that a payload states and those that follow from held values agree."""
    if not agree:
        raise ValueError(
            "a payload of lossless differences does not fit the held values: it is damaged, or `held` differs from "
            "what encode got; send the values themselves"
        )


def encode_in_pieces(held: Tensor, new: Tensor) -> UnreadMessage:
    """Encode new values of any number as one message: the lengths of the payloads of pieces, int32, and the payloads.

    See `encode`. Pieces have as many values as a processor's caches hold, or many on an accelerator. If there are
    several, the host reads their lengths.
    """
    payloads = [_encoded(old, fresh) for old, fresh in zip(_pieces(held), _pieces(new), strict=True)]
    if len(payloads) == 1:
        body, length = payloads[0]
        head = length.to(torch.int32).view(torch.uint8)
        return UnreadMessage(torch.cat([head, body]), length + len(head))
    lengths = torch.cat([each.length for each in payloads]).to(torch.int32)
    return UnreadMessage.of(torch.cat([lengths.view(torch.uint8), *(each.read() for each in payloads)]))


def decode_in_pieces(held: Tensor, message: Tensor, *, faults: list[Tensor] | None = None) -> None:
    """Decode what `encode_in_pieces` returned for the same held values, in their place.

    With `faults` the host does not wait for a device, unless there are several pieces, whose lengths it reads: it
    appends what the device will find, and `check_faults` reads it later.

    Raises:
        ValueError: the message does not fit the held values: see `decode`.
    """
    pieces = _pieces(held)
    begin, found = 4 * len(pieces), [] if faults is None else faults
    _check_sizes(len(message) >= begin)
    lengths = [len(message) - begin]
    if len(pieces) > 1 or not held.is_cuda:
        lengths = message[:begin].clone().view(torch.int32).tolist()
        _check_sizes(min(lengths) >= 0 and begin + sum(lengths) == len(message))
    for piece, payload in zip(pieces, message[begin:].split(lengths), strict=True):
        if (fault := _decode_into(piece, piece, payload)) is not None:
            found.append(fault)
    if faults is None:
        check_faults(found)


def check_faults(faults: list[Tensor]) -> None:
    """Read what a device has found, and forget it. Raises: ValueError if a message did not fit the held values."""
    found = torch.cat(faults).tolist() if faults else []  # the host waits once
    faults.clear()
    _check_sizes(not any(found))


def _pieces(values: Tensor) -> Sequence[Tensor]:
    return values.split(DEVICE_PIECE_NUMEL if values.is_cuda else HOST_PIECE_NUMEL)


def _checked(held: Tensor, new: Tensor | None = None) -> PatternForm:
    form = pattern_form_of(held.dtype)
    if held.ndim != 1 or len(held) > MAX_NUMEL:
        raise ValueError(
            f"lossless differences are those of flat tensors of at most {MAX_NUMEL} values, got shape "
            f"{tuple(held.shape)}; use x.view(-1), and code long tensors in pieces"
        )
    if new is not None and (new.dtype, new.shape) != (held.dtype, held.shape):
        raise ValueError(
            f"new values of {new.dtype}, shape {tuple(new.shape)}, have no difference to held ones of {held.dtype}, "
            f"shape {tuple(held.shape)}; pass two versions of one tensor"
        )
    return form


class Ulps(PartCoding):
    """Differences to what receivers hold, in units in the last place: [Note: Lossless differences]."""

    def __init__(self) -> None:
        self.faults: list[Tensor] = []
        """Whether the messages so far fitted what was held, as a device finds out: the host reads it later."""

    def typical_bits(self, dtype: torch.dtype) -> float:
        """Of a value, for those who ask before it is known: results/lossless-bits.csv."""
        return 3

    def encode(self, part: Tensor, base: Tensor | None = None) -> UnreadMessage:
        """Encode values, (n,), for receivers that hold `base`, (n,)."""
        assert base is not None, "receivers hold something"
        return encode_in_pieces(base, part)

    def decode_into(self, index: int, message: Tensor, part: Tensor, *, adds: bool = False) -> None:
        """See `PartCoding.decode_into`: `part` is what is held."""
        assert adds, "it is a difference"
        decode_in_pieces(part, message, faults=self.faults)

    def check(self) -> None:
        """See `PartCoding.check`. The host waits for the device."""
        check_faults(self.faults)

    def forget(self) -> None:
        """See `PartCoding.forget`."""
        self.faults.clear()
