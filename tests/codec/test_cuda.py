"""Codecs and lossless coders on a GPU: the kernels' bytes are those of a CPU. It needs pytest and numba."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from laconic.codec import CODECS, BlockCodec, lossless, lossless_gradients
from laconic.codec.contexts import TILE
from laconic.codec.lossless import decode, decode_in_pieces, encode, encode_in_pieces
from laconic.codec.rotation import rotated_numel
from tests.support.patterns import bits_of, gradients, trained, versions

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def without_waits() -> Iterator[None]:
    """A wait of the host for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_codes_to_the_bytes_of_a_cpu() -> None:
    for case, held, new in versions(5 * TILE + 700):
        payload = encode(held, new)
        on_gpu = torch.zeros(len(payload) + 3, dtype=torch.uint8).cuda()
        on_gpu[3:] = encode(held.cuda(), new.cuda())
        assert torch.equal(on_gpu[3:].cpu(), payload), case
        decoded = decode(held.cuda(), on_gpu[3:])  # at an odd address
        assert torch.equal(bits_of(decoded.cpu()), bits_of(new)), case


def test_a_gpu_decodes_pieces_in_place_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles at once, each time: programs that wrote to each other's words would not give equal bytes always."""
    numel = 300 * TILE + 1030
    monkeypatch.setattr(lossless, "DEVICE_PIECE_NUMEL", 100 * TILE)
    monkeypatch.setattr(lossless, "HOST_PIECE_NUMEL", 100 * TILE)
    held, new = trained("bfloat16", numel, 1e-4)
    message, on_gpu, fresh = encode_in_pieces(held, new).read(), held.cuda(), new.cuda()
    for _ in range(20):
        own, copy = encode_in_pieces(on_gpu, fresh).read(), on_gpu.clone()
        assert torch.equal(own.cpu(), message)
        decode_in_pieces(copy, own)
        assert torch.equal(bits_of(copy), bits_of(fresh))


def test_a_gpu_puts_together_more_runs_than_it_writes_at_once() -> None:
    """The last of 2,501 programs adds up what all of them have written, on every multiprocessor."""
    held, new = trained("bfloat16", 2500 * TILE + 3, 1e-4)
    payload, on_gpu, fresh = encode(held, new), held.cuda(), new.cuda()
    for _ in range(20):
        assert torch.equal(encode(on_gpu, fresh).cpu(), payload)


def test_a_gpu_refuses_damaged_payloads_or_gives_other_values() -> None:
    """An access out of bounds would end the process, or show in later calls."""
    held, new = trained("bfloat16", TILE + 700, 1e-3)
    on_gpu = held.cuda()
    payload, generator, refused = encode(on_gpu, new.cuda()), torch.Generator().manual_seed(0), 0
    for index in range(300):
        bad = payload.clone()
        places = torch.randint(len(bad), (1 + index % 50,), generator=generator).cuda()
        bad[places] = torch.randint(256, places.shape, generator=generator, dtype=torch.uint8).cuda()
        try:
            assert decode(on_gpu, bad).shape == new.shape
        except ValueError:
            refused += 1
    assert refused > 100
    assert torch.equal(bits_of(decode(on_gpu, payload).cpu()), bits_of(new))


@pytest.mark.parametrize("dtype", lossless_gradients.CODED_DTYPES, ids=str)
def test_a_gpu_codes_gradients_to_the_bytes_of_a_cpu_and_its_host_waits_for_nothing(dtype: torch.dtype) -> None:
    for numel in (1, 255, 256, 257, 5003, 1 << 20):
        for values in gradients(dtype, numel).values():
            message = lossless_gradients.encode(values).read()
            on_gpu, apart = values.cuda(), torch.zeros(len(message) + 3, dtype=torch.uint8).cuda()
            apart[3:] = message.cuda()
            out = torch.full_like(on_gpu, 7.0)
            lossless_gradients.decode(apart[3:], out)  # kernels are loaded when they are called first
            lossless_gradients.encode(on_gpu)
            out.fill_(7.0)
            with without_waits():
                own = lossless_gradients.encode(on_gpu)
                lossless_gradients.decode(apart[3:], out)  # at an odd address
            assert torch.equal(own.read().cpu(), message)
            assert own.buffer.nbytes == values.nbytes
            assert torch.equal(bits_of(out.cpu()), bits_of(values))


@pytest.mark.parametrize("dtype", lossless_gradients.CODED_DTYPES, ids=str)
def test_a_gpu_codes_many_gradients_as_often_as_one_likes(dtype: torch.dtype) -> None:
    """Some thousand programs at once, of a part that begins at an odd place, each time alike."""
    numel = (1 << 24) + 77
    values = gradients(dtype, numel)["usual"]
    values[1 << 20 : 1 << 22] = 0.0
    message = lossless_gradients.encode(values).read()
    whole = torch.zeros(numel + 1, dtype=dtype, device="cuda")
    whole[1:] = values.cuda()
    for _ in range(10):
        own, out = lossless_gradients.encode(whole[1:]).read(), torch.empty(numel, dtype=dtype, device="cuda")
        assert torch.equal(own.cpu(), message)
        lossless_gradients.decode(own, out)
        assert torch.equal(bits_of(out), bits_of(whole[1:]))


def test_a_gpu_reads_nothing_beside_a_damaged_message_of_gradients() -> None:
    """An access out of bounds would end the process, or show in later calls."""
    values = gradients(torch.bfloat16, 50_000)["usual"]
    good, out = lossless_gradients.encode(values.cuda()).read(), torch.empty_like(values, device="cuda")
    draw = torch.Generator().manual_seed(0)
    for index in range(300):
        bad = good.clone()[: len(good) - index % 7 * 1000]
        places = torch.randint(len(bad), (1 + index % 50,), generator=draw)
        bad[places.cuda()] = torch.randint(256, places.shape, generator=draw, dtype=torch.uint8).cuda()
        bad[int(places[0]) % 196] = index % 2 * 255
        lossless_gradients.decode(bad, out)
    lossless_gradients.decode(good, out)
    assert torch.equal(bits_of(out.cpu()), bits_of(values))


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)])
def test_a_gpu_codes_to_the_bits_of_a_cpu(name: str, rotates: bool) -> None:
    codec = CODECS[name]
    torch.manual_seed(0)
    for numel in (1, 1000, 128 * 300):
        values, base, sums = torch.randn(numel), torch.randn(numel, dtype=torch.bfloat16), torch.randn(numel)
        coded_numel = rotated_numel(numel) if rotates else numel
        on_cpu = torch.empty(codec.payload_bytes(coded_numel), dtype=torch.uint8)
        on_gpu, gpu_sums = on_cpu.cuda(), sums.cuda()
        codec.encode_into(on_gpu, values.cuda(), base.cuda(), check=False, rotates=rotates)
        codec.encode_into(on_cpu, values, base, check=False, rotates=rotates)
        if name == "int2":  # its steps hold a sum, whose order is the device's
            assert (on_gpu.cpu() != on_cpu).float().mean() < 0.01
        else:
            assert torch.equal(on_gpu.cpu(), on_cpu)
        decoded = codec.decode(on_gpu, numel, rotates=rotates).cpu()
        torch.testing.assert_close(decoded, codec.decode(on_gpu.cpu(), numel, rotates=rotates), rtol=0, atol=0)
        codec.decode_into(gpu_sums, on_gpu, adds=True, rotates=rotates)
        codec.decode_into(sums, on_gpu.cpu(), adds=True, rotates=rotates)
        torch.testing.assert_close(gpu_sums.cpu(), sums, rtol=0, atol=0)
