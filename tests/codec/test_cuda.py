"""Lossless differences on a GPU: the kernels' bytes are those of a CPU. It needs pytest alone, as `make gpu` does."""

from __future__ import annotations

import pytest
import torch

from laconic.codec import lossless
from laconic.codec.contexts import TILE
from laconic.codec.lossless import decode, decode_in_pieces, encode, encode_in_pieces, last_difference
from tests.support.patterns import DTYPES, WILD, bits_of, form_of, random_patterns, trained

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", DTYPES)
def test_a_gpu_encodes_to_the_bytes_of_a_cpu(name: str) -> None:
    for step in (1e-2, 1e-3, 1e-5):
        before, held, new = trained(name, 5 * TILE + 700, step)
        form = form_of(name)
        last = last_difference(before, held, form=form)
        assert torch.equal(last_difference(before.cuda(), held.cuda(), form=form).cpu(), last)
        payload = encode(held, new, last, form=form)
        on_gpu = encode(held.cuda(), new.cuda(), last.cuda(), form=form)
        assert torch.equal(on_gpu.cpu(), payload)
        decoded = decode(held.cuda(), on_gpu, last.cuda(), form=form)
        assert torch.equal(bits_of(decoded.cpu()), bits_of(new))


def test_a_gpu_codes_what_no_optimizer_makes_to_the_bytes_of_a_cpu() -> None:
    _, held, new = trained("bfloat16", 2 * TILE + 78, 1e-3)
    mixed, wild, wild_held = new.clone(), new.clone(), held.clone()
    mixed[:TILE] = random_patterns("bfloat16", TILE, 1)
    wild[5 : 5 + 397 * len(WILD) : 397] = WILD
    wild_held[700 : 700 + 401 * len(WILD) : 401] = WILD
    pairs = [(held, mixed), (wild_held, wild), (held, held), (held, random_patterns("bfloat16", len(held), 2))]
    for old, fresh in [*pairs, *((held[:numel], new[:numel]) for numel in (1, 513, TILE))]:
        payload = encode(old, fresh)
        on_gpu = torch.zeros(len(payload) + 3, dtype=torch.uint8).cuda()
        on_gpu[3:] = encode(old.cuda(), fresh.cuda())
        assert torch.equal(on_gpu[3:].cpu(), payload)
        decoded = decode(old.cuda(), on_gpu[3:])  # at an odd address
        assert torch.equal(bits_of(decoded.cpu()), bits_of(fresh))


def test_a_gpu_decodes_pieces_in_place_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles at once, each time: programs that wrote to each other's words would not give equal bytes always."""
    numel = 300 * TILE + 1030
    monkeypatch.setattr(lossless, "DEVICE_PIECE_NUMEL", 100 * TILE)
    monkeypatch.setattr(lossless, "HOST_PIECE_NUMEL", 100 * TILE)
    _, held, new = trained("bfloat16", numel, 1e-4)
    message, on_gpu, fresh = encode_in_pieces(held, new).read(), held.cuda(), new.cuda()
    for _ in range(20):
        own, copy = encode_in_pieces(on_gpu, fresh).read(), on_gpu.clone()
        assert torch.equal(own.cpu(), message)
        decode_in_pieces(copy, own)
        assert torch.equal(bits_of(copy), bits_of(fresh))


def test_a_gpu_puts_together_more_runs_than_it_writes_at_once() -> None:
    """The last of 2,501 programs adds up what all of them have written, on every multiprocessor."""
    _, held, new = trained("bfloat16", 2500 * TILE + 3, 1e-4)
    payload, on_gpu, fresh = encode(held, new), held.cuda(), new.cuda()
    for _ in range(20):
        assert torch.equal(encode(on_gpu, fresh).cpu(), payload)


def test_a_gpu_refuses_damaged_payloads_or_gives_other_values() -> None:
    """An access out of bounds would end the process, or show in later calls."""
    before, held, new = trained("bfloat16", TILE + 700, 1e-3)
    on_gpu, last = held.cuda(), last_difference(before, held).cuda()
    payload, generator, refused = encode(on_gpu, new.cuda(), last), torch.Generator().manual_seed(0), 0
    for index in range(300):
        bad = payload.clone()
        places = torch.randint(len(bad), (1 + index % 50,), generator=generator).cuda()
        bad[places] = torch.randint(256, places.shape, generator=generator, dtype=torch.uint8).cuda()
        try:
            assert decode(on_gpu, bad, last).shape == new.shape
        except ValueError:
            refused += 1
    assert refused > 100
    assert torch.equal(bits_of(decode(on_gpu, payload, last).cpu()), bits_of(new))
