"""A digest depends on every bit, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from laconic.guard.checksum import digest_of


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
