"""The largest values alone: which they are, and the bits in which their places cross."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.codec import TopK
from tests.reference import sparse as naive

KEEPS = [1, 3, 4, 60, 64, 65, 128, 1020, 1024, 1028, 2048, 2052, 4095, 4096]
"""Around the borders at which one more low bit of each place is sent, and odd ones."""


def shuffled(numel: int, order: str = "random") -> Tensor:
    """In each chunk the values 1, 2, 3 ... in an order, half of them negative. Sums of a chunk are exact in fp32."""
    generator = torch.Generator().manual_seed(numel)
    chunks = []
    for begin in range(0, numel, 4096):
        chunk = torch.randperm(min(4096, numel - begin), generator=generator) + 1.0
        chunk = chunk if order == "random" else chunk.sort(descending=order == "descending").values
        chunks.append(chunk * (1 - 2 * torch.randint(2, chunk.shape, generator=generator)))
    return torch.cat(chunks)


@pytest.mark.parametrize("keep", KEEPS)
def test_values_and_bytes_are_the_oracles(keep: int) -> None:
    codec = TopK(keep)
    for order in ("random", "ascending", "descending"):  # the last two: places side by side at an end
        x = shuffled(2 * 4096 if order == "random" else 4096, order)
        payload = codec.encode(x)
        assert bytes(payload.tolist()) == naive.message(x, keep)
        assert torch.equal(codec.decode(payload, len(x)), naive.decoded(x, keep))


@pytest.mark.parametrize("keep", [1, 3, 4, 64, 65, 1028, 4096])
def test_sizes_that_fill_no_chunk_and_damaged_messages(keep: int) -> None:
    """A chunk may have fewer values than are kept, and a message an odd number of bytes, anywhere in a buffer."""
    codec = TopK(keep)
    for numel in (1, 2, 63, 4095, 4097, 9001):
        x, size = shuffled(numel), codec.payload_bytes(numel)
        buffer = torch.full((size + 3,), 255, dtype=torch.uint8)
        codec.encode_into(buffer[3:], x)
        assert torch.equal(codec.decode(buffer[3:], numel), naive.decoded(x, keep))
    for payload in (torch.zeros(size), torch.full((size,), 255), torch.arange(size) * 37):
        damaged = payload.to(torch.uint8)  # ends in no place outside of its chunk, which on a GPU would end the process
        assert codec.decode(damaged, numel).shape == (numel,)


def test_every_number_of_kept_values_takes_the_oracles_bytes_and_others_are_refused() -> None:
    for keep in range(1, 4097):
        assert TopK(keep).payload_bytes(9001) == naive.message_bytes(9001, keep)
    assert TopK(64).payload_bytes(4096) == 64 * 10 // 8 + 4
    for keep in (0, 4097):
        with pytest.raises(
            ValueError, match=rf"TopK\(keep={keep}\) must keep 1 to 4096 of each 4096 values; 64 is usual"
        ):
            TopK(keep)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", [3, 64, 128, 2048])
def test_a_gpu_writes_and_reads_the_bytes_of_a_cpu(keep: int) -> None:
    codec, x = TopK(keep), shuffled(2 * 4096)
    payload = codec.encode(x)
    assert torch.equal(codec.encode(x.cuda()).cpu(), payload)
    assert torch.equal(codec.decode(payload.cuda(), len(x)).cpu(), codec.decode(payload, len(x)))
