"""Compiled coding has the bits of the plain chain."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from laconic.codec import CODECS
from laconic.codec.blocked import BlockCodec
from laconic.codec.fused import Fused, fused
from laconic.codec.rotation import rotated_numel

BLOCKED = [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)]


@pytest.mark.parametrize("name", BLOCKED[::2])
def test_a_graph_of_all_sizes_has_the_bits_of_the_chain(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    quantize, dequantize = (Fused(each, backend="aot_eager") for each in (codec._quantize, codec._dequantize))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a graph that breaks would warn
        for num_blocks in (5, 37):
            blocks = torch.randn(num_blocks, codec.block)
            codes, steps = codec._quantize(blocks, blocks.numel())
            got_codes, got_steps = quantize(blocks, blocks.numel())
            assert torch.equal(got_codes, codes)
            assert torch.equal(got_steps, steps)
            wide = steps.float().unsqueeze(1)
            assert torch.equal(dequantize(codes, wide), codec._dequantize(codes, wide))


def test_without_a_compiler_the_chain_runs_and_says_so() -> None:
    assert fused(torch.neg, torch.device("cpu")) is torch.neg, "a CPU compiles nothing"

    def twice(values: Tensor) -> Tensor:
        if values.sum() > 0:  # no graph can hold this
            return 2 * values
        return values + values

    function = Fused(twice, backend="aot_eager")
    with pytest.warns(UserWarning, match=r"codecs run in many small kernels.*torch.compile failed.*install Triton"):
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("name", BLOCKED)
def test_a_gpu_codes_to_the_bits_of_a_cpu(name: str, rotates: bool) -> None:
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    # without a kernel, values are rotated by torch's product, whose order is the device's
    near = {"rtol": 0.0, "atol": 1e-5 if rotates and not codec.has_kernels else 0.0}
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
        torch.testing.assert_close(decoded, codec.decode(on_gpu.cpu(), numel, rotates=rotates), **near)
        codec.decode_into(gpu_sums, on_gpu, adds=True, rotates=rotates)
        codec.decode_into(sums, on_gpu.cpu(), adds=True, rotates=rotates)
        torch.testing.assert_close(gpu_sums.cpu(), sums, **near)
