"""Gradients that cross without loss: messages are those of the oracle, and bring the values to the bit."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from laconic.codec import lossless_gradients
from laconic.codec.lossless_gradients import BLOCK, TYPICAL_BITS, GradientForm, decode, encode
from tests.reference import lossless_gradients as oracle
from tests.support.patterns import gradients, with_mean, with_outside

DTYPES = list(TYPICAL_BITS)
LENGTHS = (0, 1, 257, 1000)


def patterns_of(values: Tensor) -> list[int]:
    integers = {2: torch.int16, 4: torch.int32}[values.itemsize]
    return [each % 2 ** (8 * values.itemsize) for each in values.view(integers).tolist()]


def decoded(message: Tensor, like: Tensor) -> Tensor:
    out = torch.full_like(like, 7.0)
    decode(message, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_are_those_of_the_oracle_and_bring_the_values(dtype: torch.dtype) -> None:
    form = oracle.FORMS[str(dtype).removeprefix("torch.")]
    for numel in LENGTHS:
        for case, values in gradients(dtype, numel).items():
            message = encode(values).read()
            assert message.tolist() == oracle.encode(form, patterns_of(values)), (numel, case)
            assert patterns_of(decoded(message, values)) == patterns_of(values), (numel, case)
            assert len(message) <= values.nbytes


def test_every_pattern_of_sixteen_bits_comes_as_it_was() -> None:
    """In their order, in which exponents are alike, and in a random one."""
    in_order = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    shuffled = in_order[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    for dtype in (torch.bfloat16, torch.float16):
        for patterns in (in_order, shuffled):
            values = patterns.view(dtype)
            message = encode(values).read()
            assert torch.equal(decoded(message, values).view(torch.int16), patterns)
        assert len(encode(in_order.view(dtype)).read()) < 0.9 * in_order.nbytes
    part, out = torch.randn(1500)[1:701], torch.zeros(900)[1:701]
    decode(encode(part).read(), out)
    assert torch.equal(out, part), "values may be any part of a tensor"


def test_gradients_take_the_bits_that_the_note_says() -> None:
    for dtype, typical in TYPICAL_BITS.items():
        values = (torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 1e-4).to(dtype)
        assert typical - 1 < 8 * len(encode(values).read()) / len(values) < typical
    rows = torch.zeros(1000, BLOCK, dtype=torch.bfloat16)
    rows[::10] = 1e-3
    assert len(encode(rows.view(-1)).read()) < 0.12 * rows.nbytes, "rows of zeros take a byte"


def test_a_damaged_message_is_an_error_or_other_values_and_reads_no_memory_beside_it() -> None:
    draw = random.Random(0)
    values = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 1e-3).to(torch.bfloat16)
    good = encode(values).read()
    refused = 0
    for number in range(120):
        message = good.clone()
        message[draw.randrange(len(message))] ^= draw.randrange(1, 256)
        message[draw.randrange(20)] *= number % 2
        cut = message[: draw.randrange(len(message))]
        longer = torch.cat([message, message[: draw.randrange(1, 50)]])
        with suppress(ValueError):
            decoded((message, cut, longer)[number % 3], values)
            continue
        refused += 1
    assert refused > 60
    for message in (good[:-1], torch.zeros(5, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="does not have the size that follows from its blocks"):
            decoded(message, values)


def test_a_message_as_long_as_the_values_is_the_values_and_the_mean_of_exponents_is_rounded() -> None:
    for num, nbytes in ((158, 511), (159, 512), (160, 512)):
        values = with_outside(num)
        message = encode(values).read()
        assert len(message) == nbytes
        assert torch.equal(message, values.view(torch.uint8)) == (nbytes == values.nbytes)
        assert patterns_of(decoded(message, values)) == patterns_of(values)
    assert [int(encode(with_mean(num)).read()[0]) for num in (127, 128)] == [127 + 3, 128 + 3]


def test_kernels_code_where_there_are_some_and_the_host_reads_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        @staticmethod
        def encode(form: GradientForm, values: Tensor) -> tuple[Tensor, Tensor]:
            assert values.is_contiguous()
            return torch.zeros(values.nbytes, dtype=torch.uint8), torch.tensor([form.row_bytes])

        @staticmethod
        def decode(form: GradientForm, message: Tensor, out: Tensor) -> None:
            out.fill_(form.row_bytes + len(message))

    monkeypatch.setattr(lossless_gradients, "coder_of", lambda tensor, what: Kernels)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    buffer, length = encode(torch.ones(2000)[::2])
    assert (len(buffer), length.tolist()) == (4000, [864])
    assert torch.equal(decoded(buffer[:100], torch.ones(1000)), torch.full((1000,), 964.0))


def test_what_is_no_flat_gradient_is_refused() -> None:
    for values in (torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int16)):
        with pytest.raises(ValueError, match="values that cross without loss are flat"):
            encode(values)
