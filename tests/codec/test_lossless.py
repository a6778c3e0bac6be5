"""Lossless differences: payloads and results against one value at a time, any patterns, and what they may cost."""

from __future__ import annotations

from collections import Counter
from math import log2
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.codec import kernels, lossless, lossless_gradients
from laconic.codec.contexts import BLOCK, CLASSES, TILE
from laconic.codec.lossless import check_faults, decode, decode_in_pieces, encode, encode_in_pieces
from laconic.codec.patterns import PLAIN_BYTES, PatternForm, pattern_form_of
from laconic.codec.payload import HOST_PIECE_NUMEL
from tests.reference import lossless as naive
from tests.support.patterns import DTYPES, WILD, bits_of, random_patterns, trained


def patterns_of(form: PatternForm, tensor: Tensor) -> list[int]:
    """The patterns as whole numbers without sign."""
    return [each & (2**form.bits - 1) for each in form.patterns(tensor).tolist()]


def check(name: str, held: Tensor, new: Tensor, *, by_naive: bool = True) -> int:
    """Encode and decode; the length of the payload."""
    payload = encode(held, new)
    assert payload.dtype == torch.uint8
    assert len(payload) <= new.nbytes
    result = decode(held, payload)
    assert result.dtype == new.dtype
    assert torch.equal(bits_of(result), bits_of(new))
    if by_naive:
        form = pattern_form_of(DTYPES[name])
        own = naive.encoded(naive.FORMS[name], patterns_of(form, held), patterns_of(form, new))
        assert payload.tolist() == list(own)
    return len(payload)


@pytest.mark.parametrize("name", DTYPES)
def test_payloads_and_results_are_those_of_one_value_at_a_time(name: str) -> None:
    """Of values that drift, and of any patterns, some or all of which change without any rule."""
    for numel, step in ((1, 1e-3), (2, 3e-2), (31, 1e-3), (513, 3e-5), (TILE + 103, 1e-3)):
        held, new = trained(name, numel, step, seed=numel)
        check(name, held, new)
    for numel in (30, 600):
        held, new = (random_patterns(name, numel, seed) for seed in range(2))
        assert check(name, held, new) == new.nbytes, "nothing to gain"
        bits_of(new)[40:] = bits_of(held)[40:]
        check(name, held, new)
    held, new = trained(name, 2 * TILE + 60, 1e-3)
    nbytes = TILE * held.element_size()
    calm = check(name, held, new, by_naive=False)
    bits_of(new)[nbytes : 2 * nbytes] = bits_of(random_patterns(name, TILE, 1))
    assert nbytes < check(name, held, new, by_naive=False) < calm + nbytes, "a tile as it is"
    bits_of(new)[nbytes : 2 * nbytes] = bits_of(held)[nbytes : 2 * nbytes]
    assert check(name, held, new, by_naive=False) < calm, "a tile that rests"
    for each in (held, new):
        bits_of(each)[2 * nbytes + 1 :] = 0
    check(name, held, new, by_naive=False)


def test_payloads_of_older_releases_which_name_their_codes_are_read() -> None:
    """Of any contexts any codes, whose zigzag numbers may begin with minus."""
    draw, form = Random(0), pattern_form_of(torch.bfloat16)
    held, new = trained("bfloat16", TILE + 200, 1e-3)
    for share in (0.1, 0.5, 1.0):
        table = {}
        for context in range(CLASSES):
            if draw.random() < share:
                is_bucket = context < draw.choice([8, 11])
                low = draw.randrange(max(0, context - 10), max(1, min(14, context - 7)))
                rice = naive.Entry("rice", low, draw.random() < 0.5)
                table[context] = naive.Entry("bucket", draw.choice(naive.BUCKETS)) if is_bucket else rice
        payload = naive.encoded(naive.FORMS["bfloat16"], patterns_of(form, held), patterns_of(form, new), table)
        assert len(payload) < new.nbytes
        assert torch.equal(decode(held, torch.tensor(list(payload), dtype=torch.uint8)), new)


def test_few_wild_values_among_calm_ones() -> None:
    """They are escapes of Rice codes and of buckets. What is held gives the scale of its tile, which then is none."""
    held, new = trained("bfloat16", 3 * TILE - 100, 1e-3)
    calm = check("bfloat16", held, new, by_naive=False)
    new[5 : 5 + 997 * len(WILD) : 997] = WILD
    assert check("bfloat16", held, new, by_naive=False) <= calm + 9 * len(WILD) + 100
    held[700 : 700 + 1009 * len(WILD) : 1009] = WILD
    assert check("bfloat16", held, new) < 14.5 / 16 * new.nbytes, "a bit, and thirteen low ones"


@settings(max_examples=8)
@given(data=st.data(), name=st.sampled_from(list(DTYPES)))
def test_odd_mixtures(data: st.DataObject, name: str) -> None:
    numel, seed = data.draw(st.integers(1, 800)), data.draw(st.integers(0, 2**16))
    held, new = trained(name, numel, 10.0 ** -data.draw(st.integers(0, 6)), seed)
    other, share = random_patterns(name, numel, seed), data.draw(st.sampled_from([0, 0.01, 0.3]))
    generator = torch.Generator().manual_seed(seed)
    for each in (held, new):
        is_other = torch.rand(len(each), generator=generator) < share
        bits_of(each).view(len(each), -1)[is_other] = bits_of(other).view(len(each), -1)[is_other]
    for begin in data.draw(st.lists(st.integers(0, len(held) - 1), max_size=2)):
        bits_of(new)[begin * new.element_size() :][:600] = bits_of(held)[begin * new.element_size() :][:600]
    check(name, held, new)


ALL_PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def check_pairs(held: Tensor, new: Tensor) -> None:
    """Every new pattern after every held one: coded, though the values themselves are shorter."""
    form, coder = pattern_form_of(new.dtype), kernels.coder_of(new, "lossless")
    olds, news = held.repeat_interleave(len(new)), new.repeat(len(held))
    for old_part, new_part in zip(olds.split(1 << 20), news.split(1 << 20), strict=True):
        if new.is_cuda:
            assert torch.equal(bits_of(decode(old_part, encode(old_part, new_part))), bits_of(new_part))
        else:
            assert torch.equal(bits_of(decode(old_part, coder.encode(form, old_part, new_part))), bits_of(new_part))


def test_every_new_pattern_after_some_held_ones() -> None:
    new = ALL_PATTERNS.view(torch.float16)
    check_pairs(new[torch.tensor([0, 12_345, 2**15, 2**16 - 1])], new)


@pytest.mark.campaign(seconds=120)
@pytest.mark.timeout(1800)
def test_every_new_pattern_after_every_held_one() -> None:
    """All 65,536 x 65,536 pairs in loops, or in a GPU's kernels."""
    new = ALL_PATTERNS.view(torch.bfloat16).to("cuda" if torch.cuda.is_available() else "cpu")
    for held in new.split(64):
        check_pairs(held, new)


def test_eight_bit_pairs_all_of_them() -> None:
    for name in ("float8_e4m3fn", "float8_e5m2", "uint8"):
        new = torch.arange(256, dtype=torch.uint8)
        olds, news = new.repeat_interleave(256).view(DTYPES[name]), new.repeat(256).view(DTYPES[name])
        calm = torch.ones(2**18, dtype=torch.uint8).view(DTYPES[name])
        assert check(name, torch.cat([olds, calm]), torch.cat([news, calm]), by_naive=False) < 2**17


def test_what_does_not_change_costs_four_bits_a_block() -> None:
    for name in DTYPES:
        numel = 8 * TILE
        _, held = trained(name, numel, 1e-3)
        unchanged = check(name, held, held.clone(), by_naive=False)
        assert unchanged == numel / BLOCK / 2 + 5 * 8 + CLASSES
        bits_of(new := held.clone())[7] ^= 1
        assert check(name, held, new, by_naive=False) <= unchanged + 160


@pytest.mark.parametrize(("step", "most"), [(1e-3, 0.25), (1e-5, 0.05)])
def test_bits_are_near_the_entropy_under_the_same_contexts(step: float, most: float) -> None:
    held, new = trained("bfloat16", 1 << 15, step)
    own, form = naive.FORMS["bfloat16"], pattern_form_of(torch.bfloat16)
    olds, news = patterns_of(form, held), patterns_of(form, new)
    moved = [naive.number(own, b) - naive.number(own, a) for a, b in zip(olds, news, strict=True)]
    contexts = naive.contexts(own, olds, *naive.scales(own, olds, moved))
    of_context = Counter(contexts)
    pairs = Counter(zip(contexts, moved, strict=True))
    entropy = sum(count * log2(of_context[context] / count) for (context, _), count in pairs.items())
    assert entropy < 8 * len(encode(held, new)) < entropy + most * len(held)


def test_a_payload_may_lie_anywhere_in_a_message() -> None:
    held, new = trained("bfloat16", 3000, 1e-3)
    payload = encode(held, new)
    message = torch.zeros(len(payload) + 9, dtype=torch.uint8)
    message[5 : 5 + len(payload)] = payload
    assert torch.equal(decode(held, message[5 : 5 + len(payload)]), new)
    none = torch.empty(0, dtype=torch.bfloat16)
    assert len(encode(none, none)) == 0
    assert decode(none, torch.empty(0, dtype=torch.uint8)).dtype == torch.bfloat16


def test_messages_in_pieces_take_the_place_of_what_was_held() -> None:
    held, new = trained("bfloat16", HOST_PIECE_NUMEL + 100, 1e-3)
    message = encode_in_pieces(held, new).read()
    decode_in_pieces(held, message)
    assert torch.equal(held, new)


def test_what_a_device_finds_is_raised_when_the_host_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.zeros(5, dtype=torch.bfloat16)
    message, faults = encode_in_pieces(held, held + 1).read(), []
    monkeypatch.setattr(lossless, "_decode_into", lambda *_: torch.tensor([1]))
    with pytest.raises(ValueError, match="does not fit"):
        decode_in_pieces(held, message)
    decode_in_pieces(held, message, faults=faults)
    with pytest.raises(ValueError, match="does not fit"):
        check_faults(faults)
    check_faults(faults)  # the first call has forgotten the fault that it raised


@pytest.mark.parametrize("numel", [TILE + 100, 3 * BLOCK])
def test_damaged_payloads_are_refused_or_give_other_values(numel: int) -> None:
    """No read beyond the payload and no endless loop; equal sizes cannot be told, and digests are the engine's."""
    held, new = trained("bfloat16", numel, 1e-3)
    payload = encode(held, new)
    refused, generator = 0, torch.Generator().manual_seed(0)
    for _ in range(60):
        bad = payload.clone()
        place, bit = (int(torch.randint(most, (1,), generator=generator)) for most in (len(bad), 8))
        bad[place] ^= 1 << bit
        try:
            assert decode(held, bad).shape == new.shape
        except ValueError:  # of any other kind is a failure
            refused += 1
    assert refused > 4
    for size in (1, 5, len(payload) - 4):
        with pytest.raises(ValueError, match=r"does not fit the held values: it is damaged"):
            decode(held, payload[:size])


def test_tensors_that_do_not_fit_are_refused() -> None:
    x = torch.ones(8, dtype=torch.bfloat16)
    for held, new, message in (
        (x.float(), x.float(), r"differences of torch.float32 are not coded.*param_dtype=torch.bfloat16"),
        (x.view(2, 4), x.view(2, 4), r"flat .* at most 33554432 values, got shape \(2, 4\); use x.view"),
        (x, x.half(), r"new values of torch.float16, shape \(8,\), have no difference to held"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(held, new)


def test_without_a_coder_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", lambda name: None)
    x = torch.ones(8, dtype=torch.bfloat16)
    for device_type, package in (("cpu", "numba"), ("cuda", "triton")):
        message = rf"{package} is not installed.* on '{device_type}': pip install {package}; or use wire='exact' or"
        with pytest.raises(ModuleNotFoundError, match=message):
            kernels.coder_on(device_type, "lossless")
    for code in (lambda: encode(x, x), lambda: lossless_gradients.encode(x)):
        with pytest.raises(ModuleNotFoundError, match="pip install numba"):
            code()
    with pytest.raises(ValueError, match="nothing codes without loss on 'xpu'; use wire='exact' or '4bit'"):
        kernels.coder_on("xpu", "lossless")


def test_numbers_are_in_the_order_of_values() -> None:
    for name, dtype in DTYPES.items():
        form = pattern_form_of(dtype)
        patterns = torch.arange(2**form.bits, dtype=torch.int32).to(torch.int16)
        values = form.tensor(patterns, dtype)
        assert torch.equal(form.tensor(form.patterns(values), dtype).view(torch.uint8), values.view(torch.uint8))
        numbers = torch.tensor([naive.number(naive.FORMS[name], each) for each in patterns_of(form, values)])
        assert numbers.unique().numel() == len(patterns)
        if dtype.is_floating_point:
            ascending = values.float()[numbers.argsort()]
            ascending = ascending[~ascending.isnan()]
            assert (ascending.diff() >= 0).all()
    assert pattern_form_of(torch.float8_e8m0fnu) is PLAIN_BYTES
