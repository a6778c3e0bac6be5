"""Codes of gradients: those of laconic.codec, and some that it lacks, in plain torch.

[Note: Bits of a code]
`nominal_bits` counts codes of a fixed width and their scales, as a message has them today. Codes are far from uniform,
so three more figures say what a coder without loss would need, scales included: the entropy of the codes; their entropy
given the mean size of the codes of their block, of which a coder needs one number a block; and the length in Rice's
code, whose parameter is chosen by the same context. Codes are ranked by size for that, 0, 1, -1, 2, -2 and so on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from benchmarks.few_bits.model import Slot
from laconic.codec import BlockCodec, Codec, Even, Float4, Ternary, TwoBit
from laconic.codec.bits import unpack, unpack_fives
from laconic.codec.rotation import rotate

_CONTEXTS = 32
_SCALE_BITS = 16
_LEAST_STEP = 1e-15
_PACKED_BITS = {1: 8 / 5, 2: 7 / 3}
"""The bits of a value of so many steps on each side of zero: five of three levels in 8 bits, three of five in 7."""
Rounding = Literal["nearest", "stochastic", "dithered"]


class Code(ABC):
    """A code of gradients (models, n), all of whose blocks lie in one row."""

    block: int
    nominal_bits: float | None
    """The bits of a value: [Note: Bits of a code]. None for codes that have no fixed width."""
    side_bits = 0.0
    """The bits of a value that go to other things than codes and the scales of blocks."""

    @abstractmethod
    def cross(self, values: Tensor) -> Tensor:
        """Return what arrives of values (models, n), fp32: (models, n), fp32, a new tensor."""

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the codes of values, (blocks, block), int64, and the number of each code in steps; None: unknown."""
        return None

    def next_step(self) -> None:
        """Begin the messages of another step."""
        return


class Product(Code):
    """A codec of laconic, rotated or not."""

    def __init__(self, codec: Codec, *, rotates: bool = True) -> None:
        self.codec, self.rotates, self.block = codec, rotates, codec.block
        some = 64 * max(codec.block, 32)
        self.nominal_bits = codec.payload_bytes(some) * 8 / some

    def cross(self, values: Tensor) -> Tensor:
        payload = self._payload(values)
        arrived = torch.empty_like(values)
        self.codec.decode_into(arrived.view(-1), payload, rotates=self.rotates)
        return arrived

    def _payload(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)
        payload = torch.empty(self.codec.payload_bytes(len(flat)), dtype=torch.uint8, device=flat.device)
        self.codec.encode_into(payload, flat, check=False, rotates=self.rotates)
        return payload

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        codec = self.codec
        if not isinstance(codec, BlockCodec):
            return None
        packed = self._payload(values)[: codec.code_bytes(values.numel())]
        if isinstance(codec, Ternary):
            counts = unpack_fives(packed)[: values.numel()]
            return counts.add(1).to(torch.int64).view(-1, codec.block), torch.tensor([-1.0, 0.0, 1.0]).to(values.device)
        form = codec.form(values.device)
        codes = unpack(packed, form.bits).to(torch.int64)
        count = torch.arange(2**form.bits, device=values.device, dtype=torch.float32)
        if isinstance(codec, Even):
            levels = torch.where(count < 128, count, count - 256) if form.bits == 8 else count - form.largest
        elif isinstance(codec, TwoBit):
            levels = 2 * count - 3
        else:
            assert isinstance(codec, Float4), codec
            levels = form.numbers
        return codes.view(-1, codec.block), levels


class Uniform(Code):
    """Whole multiples of a step, which is `width` root mean squares of a block, or its largest value over `limit`.

    Codes are as many as they need to be: it is meant for a coder of entropy. Rounding to the nearest, a code stands for
    the mean of the values that it has had, one number a message, since a wide step's middle is too far out. Stochastic
    rounding is right on average. With dither, sender and owner know the same random number and subtract it again. No
    codec of laconic has these.
    """

    _LIMIT = 127
    _EVERY = 16
    """The mean of what codes stand for is that of each sixteenth block."""

    def __init__(
        self, width: float, *, rotates: bool = True, rounding: Rounding = "nearest", limit: int = 0, block: int = 128
    ) -> None:
        """With `limit`, codes end there; with no width (0), the largest value of a block takes so many steps."""
        self.width, self.rotates, self.rounding, self.block = width, rotates, rounding, block
        self.limit = limit or self._LIMIT
        self.nominal_bits = None
        if limit:
            packed = _PACKED_BITS.get(limit, float(math.ceil(math.log2(2 * limit + 1))))
            self.nominal_bits = packed + _SCALE_BITS / block

    def cross(self, values: Tensor) -> Tensor:
        counts, steps = self._counts(values)
        dither = None if self.rounding == "nearest" else torch.rand_like(counts).sub_(0.5)
        codes = (counts if dither is None else counts.add_(dither)).round().clamp_(-self.limit, self.limit)
        if self.rounding == "dithered":
            assert dither is not None
            codes.sub_(dither)
        elif self.rounding == "nearest":
            some = codes[:: self._EVERY].abs()
            missed = (some - counts[:: self._EVERY].abs()).mul_(some > 0).sum() / (some > 0).sum().clamp(min=1)
            codes.sub_(codes.sign().mul_(missed))
        arrived = codes.mul_(steps).view(-1)
        return (rotate(arrived, overwrites=True) if self.rotates else arrived).view_as(values)

    def _counts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        flat = values.reshape(-1)
        blocks = (rotate(flat) if self.rotates else flat).view(-1, self.block)
        if self.width:
            steps = torch.linalg.vector_norm(blocks, dim=1).mul_(self.width * self.block**-0.5)
        else:
            steps = torch.linalg.vector_norm(blocks, dim=1, ord=math.inf).mul_(1 / self.limit)
        # squares of values below 1e-19 are zero: without the bound such values would be very many steps
        steps = steps.clamp_(min=_LEAST_STEP).to(torch.bfloat16).float().unsqueeze(1)
        return blocks / steps, steps

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        counts, _ = self._counts(values)
        if self.rounding != "nearest":
            counts.add_(torch.rand_like(counts).sub_(0.5))
        codes = counts.round_().clamp_(-self.limit, self.limit).to(torch.int64).add_(self.limit)
        return codes, torch.arange(-self.limit, self.limit + 1, device=values.device, dtype=torch.float32)


class Signs(Code):
    """One bit and the mean size of a block. No codec of laconic has it."""

    def __init__(self, *, rotates: bool = True, block: int = 128) -> None:
        self.rotates, self.block, self.nominal_bits = rotates, block, 1 + _SCALE_BITS / block

    def cross(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)
        blocks = (rotate(flat) if self.rotates else flat).view(-1, self.block)
        sizes = torch.linalg.vector_norm(blocks, dim=1, ord=1).div_(self.block).to(torch.bfloat16).float()[:, None]
        arrived = torch.where(blocks < 0, -sizes, sizes).view(-1)
        return (rotate(arrived, overwrites=True) if self.rotates else arrived).view_as(values)

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        flat = values.reshape(-1)
        blocks = (rotate(flat) if self.rotates else flat).view(-1, self.block)
        return (blocks >= 0).to(torch.int64), torch.tensor([-1.0, 1.0], device=values.device)


class Flipped(Code):
    """Another code on values with random signs, which sender and owner know: the rotation is another in each step."""

    def __init__(self, inner: Code, *, seed: int = 0) -> None:
        self.inner, self.block, self.nominal_bits = inner, inner.block, inner.nominal_bits
        self._step, self._seed = 0, seed

    def next_step(self) -> None:
        self._step += 1

    def _signs(self, values: Tensor) -> Tensor:
        generator = torch.Generator(values.device).manual_seed(self._seed + self._step)
        signs = torch.randint(0, 2, values.shape[-1:], generator=generator, device=values.device)
        return signs.float().mul_(2).sub_(1)

    def cross(self, values: Tensor) -> Tensor:
        signs = self._signs(values)
        return self.inner.cross(values * signs).mul_(signs)

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.inner.numbers(values * self._signs(values))


class Columns(Code):
    """Another code on values divided by the root mean square of their column, in each matrix.

    The noise of a code is as large for small values of a block as for large ones, but Adam divides by the size of each.
    Rows lie in blocks of their own, columns do not. The sizes cross every `every` steps, in eight bits.
    """

    def __init__(self, inner: Code, slots: Sequence[Slot], *, nodes: int, every: int = 16) -> None:
        self.inner, self.block, self._slots, self._every = inner, inner.block, slots, every
        columns = sum(slot.shape[-1] for slot in slots) * nodes  # a message has some rows of each matrix
        self.side_bits = columns * 8 / every / slots[-1].end
        self.nominal_bits = None if inner.nominal_bits is None else inner.nominal_bits + self.side_bits
        self._sizes: Tensor | None = None
        self._step = 0

    def next_step(self) -> None:
        self._step += 1
        self.inner.next_step()

    def _sizes_of(self, values: Tensor) -> Tensor:
        """The size of each value's column, (models, n)."""
        if self._sizes is None or self._sizes.shape != values.shape or self._step % self._every == 0:
            self._sizes = torch.empty_like(values)
            for slot in self._slots:
                own = values[:, slot.begin : slot.end].reshape(len(values), *slot.shape)
                sizes = own.square().mean(1, keepdim=True).sqrt()
                sizes = sizes.clamp(min=0).add_(1e-3 * sizes.mean(2, keepdim=True)).clamp_(min=1e-30)
                self._sizes[:, slot.begin : slot.end] = sizes.expand_as(own).flatten(1)
        return self._sizes

    def cross(self, values: Tensor) -> Tensor:
        sizes = self._sizes_of(values)
        return self.inner.cross(values / sizes).mul_(sizes)

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self._sizes is None else self.inner.numbers(values / self._sizes[: len(values)])


class Mixed(Code):
    """One code for embeddings and the output layer, another for the matrices between them."""

    def __init__(self, ends: Code, between: Code, slots: Sequence[Slot]) -> None:
        self.block = math.lcm(ends.block, between.block)
        layers = [slot for slot in slots if ".layers." in slot.name]
        begin, end, numel = layers[0].begin, layers[-1].end, slots[-1].end
        cuts = (0, begin, ends), (begin, end, between), (end, numel, ends)
        self._cuts = [cut for cut in cuts if cut[0] < cut[1]]
        assert ends.nominal_bits is not None
        assert between.nominal_bits is not None
        share = (end - begin) / numel
        self.nominal_bits = share * between.nominal_bits + (1 - share) * ends.nominal_bits

    def next_step(self) -> None:
        for _, _, code in self._cuts:
            code.next_step()

    def cross(self, values: Tensor) -> Tensor:
        return torch.cat([code.cross(values[:, start:stop].contiguous()) for start, stop, code in self._cuts], dim=1)


def bits_of(code: Code, values: Tensor) -> dict[str, float]:
    """Return `entropy`, `entropy_by_block` and `rice` of values (models, n): [Note: Bits of a code]."""
    found = code.numbers(values)
    if found is None:
        return {}
    codes, levels = found
    scales = _SCALE_BITS / code.block + code.side_bits
    sizes = levels.abs()[codes].mean(1)
    context = (sizes * (_CONTEXTS / sizes.amax().clamp(min=1e-30))).to(torch.int64).clamp_(max=_CONTEXTS - 1)
    together = codes.add_(context[:, None] * len(levels))
    counts = torch.bincount(together.view(-1), minlength=_CONTEXTS * len(levels)).double().view(_CONTEXTS, -1)
    of_context = entropy_of(counts.sum(1)) / codes.shape[1]
    by_block = entropy_of(counts) - entropy_of(counts.sum(1))
    # the rank of a level by size; of two that are as large, the positive one comes first
    known = levels.tolist()
    order = sorted(range(len(known)), key=lambda index: (abs(known[index]), known[index] < 0))
    ranks = torch.empty(len(levels), dtype=torch.float64, device=counts.device)
    ranks[order] = torch.arange(len(levels), dtype=torch.float64, device=counts.device)
    lengths = torch.stack([(ranks / 2**k).floor() + 1 + k for k in range(7)])
    rice = float((counts @ lengths.T).amin(1).sum() / counts.sum())
    return {
        "entropy": entropy_of(counts.sum(0)) + scales,
        "entropy_by_block": by_block + of_context + scales,
        "rice": rice + of_context + scales,
    }


def entropy_of(counts: Tensor) -> float:
    """Return the entropy, in bits, of what was counted."""
    shares = counts.double().flatten() / counts.sum().clamp(min=1)
    return float(-(shares * shares.clamp(min=1e-300).log2()).sum())
