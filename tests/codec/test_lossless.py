"""Lossless differences: payloads and results against one value at a time, any patterns, and what they may cost."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.codec import lossless
from laconic.codec.contexts import BLOCK, IDLE, TILE
from laconic.codec.fused import kernels_for
from laconic.codec.lossless import (
    check_faults,
    decode,
    decode_in_pieces,
    differences_by_context,
    encode,
    encode_in_pieces,
    last_difference,
    part_bytes,
)
from laconic.codec.patterns import PLAIN_BYTES, PatternForm, pattern_form_of
from laconic.codec.payload import HOST_PIECE_NUMEL
from tests.reference import lossless as naive
from tests.support.patterns import DTYPES, WILD, bits_of, form_of, random_patterns, trained

WAYS = ("loops", "plain")
"""How a CPU codes: in loops of numba, or in plain torch, as all other devices do without kernels of their own."""


@contextmanager
def coded_by(way: str) -> Iterator[None]:
    """Code in one of `WAYS` inside the block, or on a GPU in its kernels."""
    assert kernels_for(torch.ones(1), "codec.lossless_numba") is not None

    def chosen(tensor: Tensor, name: str) -> ModuleType | None:
        return None if name == "codec.lossless_numba" and way == "plain" else kernels_for(tensor, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless, "kernels_for", chosen)
        patch.setattr(lossless, "_say_that_loops_are_missing", lambda: None)
        yield


def patterns_of(form: PatternForm, tensor: Tensor) -> list[int]:
    """The patterns as whole numbers without sign."""
    return [each & (2**form.bits - 1) for each in form.patterns(tensor).tolist()]


def check(name: str, held: Tensor, new: Tensor, last: Tensor | None, *, by_naive: bool = True) -> int:
    """Encode and decode in all ways, which agree; the length of the payload."""
    form, payloads = form_of(name), []
    for way in WAYS:
        with coded_by(way):
            payload = encode(held, new, last, form=form)
            assert payload.dtype == torch.uint8
            assert len(payload) <= new.nbytes
            result = decode(held, payload, last, form=form)
        assert result.dtype == new.dtype
        assert torch.equal(bits_of(result), bits_of(new))
        payloads.append(payload)
    assert torch.equal(*payloads)
    if by_naive:
        own = naive.FORMS[name]
        olds, news = patterns_of(form, held), patterns_of(form, new)
        lasts = None if last is None else last.tolist()
        assert payload.tolist() == list(naive.encoded(own, olds, news, lasts))
    return len(payload)


@pytest.mark.parametrize("name", DTYPES)
def test_payloads_and_results_are_those_of_one_value_at_a_time(name: str) -> None:
    """Of values that drift, and of any patterns, some or all of which change without any rule."""
    form, own = form_of(name), naive.FORMS[name]
    large = TILE + 103 if name == "float8_e4m3fn" else BLOCK + 103
    for numel, step in ((1, 1e-3), (2, 3e-2), (31, 1e-3), (513, 3e-5), (large, 1e-3)):
        numel += numel % 2 * (name == "e2m1")
        before, held, new = trained(name, numel, step, seed=numel)
        last = last_difference(before, held, form=form)
        assert last.tolist() == naive.differences(own, *(patterns_of(form, each) for each in (before, held)))
        check(name, held, new, last)
        check(name, held, new, None, by_naive=numel < TILE)
    for numel in (30, 600):
        before, held, new = (random_patterns(name, numel, seed) for seed in range(3))
        olds, helds = (patterns_of(form, each) for each in (before, held))
        for way in WAYS:
            with coded_by(way):
                last = last_difference(before, held, form=form)
            assert last.tolist() == naive.differences(own, olds, helds)
        assert check(name, held, new, last) == check(name, held, new, None) == new.nbytes, "nothing to gain"
        bits_of(new)[40:] = bits_of(held)[40:]
        check(name, held, new, last)
    before, held, new = trained(name, 2 * TILE + 60, 1e-3)
    last, nbytes = last_difference(before, held, form=form), TILE * form.bits // 8
    calm = check(name, held, new, last, by_naive=False)
    bits_of(new)[nbytes : 2 * nbytes] = bits_of(random_patterns(name, TILE, 1))
    assert nbytes < check(name, held, new, last, by_naive=False) < calm + nbytes, "a tile as it is"
    bits_of(new)[nbytes : 2 * nbytes] = bits_of(held)[nbytes : 2 * nbytes]
    assert check(name, held, new, last, by_naive=False) < calm, "a tile that rests"
    for each in (held, new):
        bits_of(each)[2 * nbytes + 1 :] = 0
    check(name, held, new, last, by_naive=False)


def test_codes_are_chosen_by_every_second_of_nine_tiles() -> None:
    before, held, new = trained("bfloat16", 8 * TILE + 77, 3e-5)
    new[TILE : 2 * TILE] = random_patterns("bfloat16", TILE, 0)  # not in the sample
    check("bfloat16", held, new, last_difference(before, held))


def test_few_wild_values_among_calm_ones() -> None:
    """They are escapes of Rice codes and of buckets. What is held gives the scale of its block, which then is none."""
    before, held, new = trained("bfloat16", 3 * TILE - 100, 1e-3)
    calm = check("bfloat16", held, new, last_difference(before, held), by_naive=False)
    new[5 : 5 + 997 * len(WILD) : 997] = WILD
    wild = check("bfloat16", held, new, last_difference(before, held), by_naive=False)
    assert wild <= calm + 9 * len(WILD) + 100
    held[700 : 700 + 1009 * len(WILD) : 1009] = WILD
    bytes_of_blocks = len(WILD) * 2 * BLOCK
    assert check("bfloat16", held, new, last_difference(before, held)) <= calm + bytes_of_blocks


@settings(max_examples=5)
@given(data=st.data(), name=st.sampled_from(list(DTYPES)))
def test_odd_mixtures(data: st.DataObject, name: str) -> None:
    numel, seed = 2 * data.draw(st.integers(1, 400)), data.draw(st.integers(0, 2**16))
    before, held, new = trained(name, numel, 10.0 ** -data.draw(st.integers(0, 6)), seed)
    other, share = random_patterns(name, numel, seed), data.draw(st.sampled_from([0, 0.01, 0.3]))
    generator = torch.Generator().manual_seed(seed)
    for each in (before, held, new):
        is_other = torch.rand(len(each), generator=generator) < share
        bits_of(each).view(len(each), -1)[is_other] = bits_of(other).view(len(each), -1)[is_other]
    for begin in data.draw(st.lists(st.integers(0, len(held) - 1), max_size=2)):
        bits_of(new)[begin * new.element_size() :][:600] = bits_of(held)[begin * new.element_size() :][:600]
    check(name, held, new, data.draw(st.sampled_from([None, last_difference(before, held, form=form_of(name))])))


ALL_PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def check_pairs(held: Tensor, new: Tensor, *, ways: Sequence[str] = WAYS) -> None:
    """Every new pattern after every held one: coded, though the values themselves are shorter."""
    form = pattern_form_of(new.dtype)
    olds, news = held.repeat_interleave(len(new)), new.repeat(len(held))
    for way, (old_part, new_part) in itertools.product(
        ways, zip(olds.split(1 << 20), news.split(1 << 20), strict=True)
    ):
        with coded_by(way):
            payload = lossless._coded(form, old_part, new_part, None)
            assert torch.equal(bits_of(decode(old_part, payload)), bits_of(new_part))


def test_every_new_pattern_after_some_held_ones() -> None:
    new = ALL_PATTERNS.view(torch.float16)
    check_pairs(new[torch.tensor([0, 12_345, 2**15, 2**16 - 1])], new)


@pytest.mark.campaign(seconds=160)
@pytest.mark.timeout(1800)
def test_every_new_pattern_after_every_held_one() -> None:
    """All 65,536 x 65,536 pairs in loops or in a GPU's kernels, and each sixteenth held pattern in plain torch."""
    new = ALL_PATTERNS.view(torch.bfloat16).to("cuda" if torch.cuda.is_available() else "cpu")
    for number, held in enumerate(new.split(64)):
        check_pairs(held, new, ways=("loops",))
        check_pairs(held[number % 16 :: 16], new, ways=("plain",))


def test_eight_bit_pairs_all_of_them() -> None:
    for name in ("float8_e4m3fn", "float8_e5m2", "uint8"):
        new = torch.arange(256, dtype=torch.uint8)
        olds, news = new.repeat_interleave(256).view(DTYPES[name]), new.repeat(256).view(DTYPES[name])
        calm = torch.ones(2**18, dtype=torch.uint8).view(DTYPES[name])
        assert check(name, torch.cat([olds, calm]), torch.cat([news, calm]), None, by_naive=False) < 2**17


def test_what_does_not_change_costs_four_bits_a_block() -> None:
    for name in DTYPES:
        numel = 8 * TILE
        _, held, _ = trained(name, numel, 1e-3)
        unchanged = check(name, held, held.clone(), None, by_naive=False)
        assert unchanged == numel / BLOCK / 2 + 5 * 8 + IDLE / 8
        bits_of(new := held.clone())[7] ^= 1
        assert check(name, held, new, None, by_naive=False) <= unchanged + 160


@pytest.mark.parametrize(("step", "most"), [(1e-3, 0.25), (1e-5, 0.05)])
def test_bits_are_near_the_entropy_under_the_same_contexts(step: float, most: float) -> None:
    before, held, new = trained("bfloat16", 1 << 17, step)
    last = last_difference(before, held)
    contexts, differences = differences_by_context(held, new, last)
    _, counts = (contexts.long() * 2**20 + differences).unique(return_counts=True)
    of_context = torch.bincount(contexts).double()
    of_context = of_context[of_context > 0]
    entropy = float((of_context * of_context.log2()).sum() - (counts * counts.double().log2()).sum())
    payload = encode(held, new, last)
    assert entropy < 8 * len(payload) < entropy + most * len(held)
    assert sum(part_bytes(payload, len(held))) == len(payload)
    assert len(payload) < len(encode(held, new)), "the last difference tells something of these"


def test_a_payload_may_lie_anywhere_in_a_message_and_last_differences_may_be_zeros() -> None:
    before, held, new = trained("bfloat16", 3000, 1e-3)
    last = last_difference(before, held)
    payload = encode(held, new, last)
    message = torch.zeros(len(payload) + 9, dtype=torch.uint8)
    message[5 : 5 + len(payload)] = payload
    assert torch.equal(decode(held, message[5 : 5 + len(payload)], last), new)
    zeros = torch.zeros(3000, dtype=torch.int8)
    assert torch.equal(encode(held, new, zeros), encode(held, new)), "so that a receiver can begin with zeros"
    none = torch.empty(0, dtype=torch.bfloat16)
    assert len(encode(none, none)) == 0
    assert decode(none, torch.empty(0, dtype=torch.uint8)).dtype == torch.bfloat16


@pytest.mark.parametrize("way", WAYS)
def test_messages_in_pieces_note_the_last_differences_on_both_sides(way: str) -> None:
    """Three in a row, of two pieces each: the second and the third are predicted."""
    numel = HOST_PIECE_NUMEL + 100
    held, *versions = (trained("bfloat16", numel, 1e-3, seed=seed)[2] for seed in (0, 0, 1, 0))
    copy, sent, seen = held.clone(), *torch.zeros(2, numel, dtype=torch.int8)
    for new in versions:
        with coded_by(way):
            message = encode_in_pieces(held, new, sent).read()
            decode_in_pieces(copy, message, seen)
        assert torch.equal(copy, new)
        assert torch.equal(sent, last_difference(held, new))
        assert torch.equal(sent, seen)
        held = new


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


def test_without_numba_a_warning_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "kernels_for", lambda tensor, name: None)
    lossless._say_that_loops_are_missing.cache_clear()
    _, held, new = trained("bfloat16", 600, 1e-3)
    with pytest.warns(UserWarning, match=r"in plain torch, which takes a CPU twenty times as long; pip install numba"):
        payload = encode(held, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert torch.equal(decode(held, payload), new)


@pytest.mark.parametrize(("numel", "has_last"), [(TILE + 100, True), (3 * BLOCK, False)])
def test_damaged_payloads_are_refused_or_give_other_values(numel: int, has_last: bool) -> None:
    """No read beyond the payload and no endless loop; equal sizes cannot be told, and digests are the engine's."""
    before, held, new = trained("bfloat16", numel, 1e-3)
    last = last_difference(before, held) if has_last else None
    payload = encode(held, new, last)
    refused, generator = 0, torch.Generator().manual_seed(0)
    for _ in range(60):
        bad, results = payload.clone(), []
        place, bit = (int(torch.randint(most, (1,), generator=generator)) for most in (len(bad), 8))
        bad[place] ^= 1 << bit
        for way in WAYS:
            try:
                with coded_by(way):
                    results.append(decode(held, bad, last).view(torch.int16))
            except ValueError:  # of any other kind is a failure
                results.append(torch.empty(0))
        assert torch.equal(*results)
        refused += not len(results[0])
    assert refused > 4
    for size in (1, 5, len(payload) - 4):
        with pytest.raises(ValueError, match=r"does not fit the held values: it is damaged"):
            decode(held, payload[:size], last)


def test_tensors_that_do_not_fit_are_refused() -> None:
    x = torch.ones(8, dtype=torch.bfloat16)
    for held, new, last, message in (
        (x.float(), x.float(), None, r"differences of torch.float32 are not coded.*param_dtype=torch.bfloat16"),
        (x.view(2, 4), x.view(2, 4), None, r"flat .* at most 33554432 values, got shape \(2, 4\); use x.view"),
        (x, x.half(), None, r"new values of torch.float16, shape \(8,\), have no difference to held"),
        (x, x, torch.zeros(8, dtype=torch.int16), r"last differences of 8 values are as many int8 .* got torch.int16"),
        (x, x, torch.zeros(7, dtype=torch.int8), r"last differences of 8 values .* shape \(7,\); pass what last_diff"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(held, new, last)
    with pytest.raises(ValueError, match=r"shape \(7,\); pass what last_diff"):
        decode(x, torch.zeros(3, dtype=torch.uint8), torch.zeros(7, dtype=torch.int8))


def test_numbers_are_in_the_order_of_values() -> None:
    for name, dtype in DTYPES.items():
        form = form_of(name)
        patterns = torch.arange(2**form.bits, dtype=torch.int32)
        signed = form.patterns(form.tensor(patterns, dtype))
        numbers = form.numbers(signed)
        assert torch.equal(form.numbers(numbers), signed)
        assert numbers.unique().numel() == len(patterns)
        assert numbers.tolist() == [naive.number(naive.FORMS[name], each) for each in patterns.tolist()]
        if dtype.is_floating_point:
            values = form.tensor(patterns, dtype).float()
            ascending = values[numbers.argsort()]
            ascending = ascending[~ascending.isnan()]
            assert (ascending.diff() >= 0).all()
    assert pattern_form_of(torch.float8_e8m0fnu) is PLAIN_BYTES
