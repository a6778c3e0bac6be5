"""A checksum equals its oracle and sees every flipped bit, any two, and exchanged words; a digest sees every bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from laconic.guard import checksum
from laconic.guard.checksum import checksum_of, checksums, digest_of
from tests.reference.checksum import checksum as oracle


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 33, 1001])
def test_it_equals_the_oracle(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_HOST_CHUNK_WORDS", 16)  # so that there are several chunks, the last one short
    values = 100 * torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    parts = values.to(dtype)
    assert checksums(parts).tolist() == [oracle(_bytes(part)) for part in parts]
    odd = torch.zeros(3 * size + 1, dtype=dtype)[1:].view(3, size)  # at an odd address
    odd.copy_(parts)
    assert checksums(odd).tolist() == checksums(parts).tolist()
    assert checksums(parts.T.contiguous().T).tolist() == checksums(parts).tolist()


def test_flipped_bits_and_exchanged_words_are_seen() -> None:
    """Every bit, and any two."""
    part = torch.randn(3, generator=torch.Generator().manual_seed(0)).view(torch.uint8)[:11]  # a last word of 3 bytes
    before = int(checksum_of(part))
    for first, second in itertools.combinations_with_replacement(range(8 * len(part)), 2):
        changed = part.clone()
        for bit in {first, second}:
            changed[bit // 8] ^= 1 << bit % 8
        assert int(checksum_of(changed)) != before, (first, second)
    words = torch.arange(9, dtype=torch.int32)
    for first, second in itertools.combinations(range(9), 2):
        changed = words.clone()
        changed[[first, second]] = words[[second, first]]
        assert checksum_of(changed) != checksum_of(words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (3, 0), (16,)])
def test_equal_bits_have_equal_digests_and_others_do_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    buffer = torch.zeros(value.numel() + 3, dtype=dtype)
    elsewhere = buffer[3:].view(shape)  # at an odd address
    elsewhere.copy_(value)
    first = torch.ones(3)
    digest = digest_of([first, value])
    assert digest == digest_of([first, elsewhere])
    for place in {0, value.nbytes - 1} if value.numel() else ():
        changed = value.clone()
        changed.reshape(-1).view(torch.uint8)[place] ^= 1
        assert digest != digest_of([first, changed])
    assert value.numel() == 0 or digest != digest_of([value, first])


def test_there_is_none_without_memory() -> None:
    assert digest_of([torch.ones(2), torch.ones(2, device="meta")]) is None
    assert digest_of([]) == 0
