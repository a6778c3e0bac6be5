"""Scaled formats against rounding block by block, and linear layers that train in them, in one process."""

from __future__ import annotations

import copy
import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.layers import scaled, scaled_linear
from laconic.layers.scaled import SCALED_FORMATS, ScaledFormat
from laconic.layers.scaled_codes import _RECIPES, _swizzled, multiplies_codes, product_of_codes
from laconic.layers.scaled_linear import ScaledTensor
from laconic.layers.scaled_training import convert_to_scaled_training
from tests.reference.scaled import rounded, rounding

FORMATS = list(SCALED_FORMATS)


def matrix(*shape: int, seed: int = 0) -> Tensor:
    """A matrix whose rows have other magnitudes than their neighbours."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp()


def scale_of(weight_format: ScaledFormat, whole: Tensor) -> Tensor | None:
    return weight_format.matrix_scale(weight_format.largest_of(whole)) if weight_format.has_matrix_scale else None


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_rounded_block_by_block(name: str) -> None:
    weight_format = SCALED_FORMATS[name]
    for whole in (matrix(131, 144), matrix(131, 48, seed=1).bfloat16(), matrix(1, 16), torch.zeros(3, 32)):
        shape, scale = tuple(whole.shape), scale_of(weight_format, whole)
        codes, scales = weight_format.quantize(whole, scale)
        assert codes.nbytes + scales.nbytes == weight_format.nbytes(shape)
        assert (codes.dtype, codes.shape) == (weight_format.code_dtype, weight_format.codes_shape(shape))
        assert (scales.dtype, scales.shape) == (weight_format.scale_dtype, weight_format.scales_shape(shape))
        assert torch.equal(weight_format.dequantize(codes, scales, scale), rounded(whole, name))
        parts = [weight_format.quantize(part, scale) for part in whole.split(weight_format.height)]  # as ranks
        assert torch.equal(torch.cat([part for part, _ in parts]).view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(torch.cat([part for _, part in parts]).float(), scales.float())
    for bad in (float("nan"), float("inf")):
        whole = matrix(2, 256)
        whole[1, 5] = bad
        scale = scale_of(weight_format, whole)
        decoded = weight_format.dequantize(*weight_format.quantize(whole, scale), scale)
        assert decoded[1, : weight_format.width].isnan().all()
        assert decoded[0, -weight_format.width :].isnan().any() == weight_format.has_matrix_scale, "but for NVFP4"


@pytest.mark.parametrize("num_parts", [1, 2, 5, 7, 64])
@pytest.mark.parametrize(
    ("weight_format", "shape"),
    [
        (SCALED_FORMATS["fp8_128x128"], (131, 144)),
        (SCALED_FORMATS["fp8_128x128"], (2, 128, 48)),  # a stack
        (SCALED_FORMATS["fp8_1x128_e8m0"].for_rows, (3, 128, 9)),  # experts that are multiplied by their columns
        (ScaledFormat(name="small", height=3, width=5, scale="e8m0"), (8, 7)),
        (ScaledFormat(name="small", height=4, width=2), (1, 1)),
    ],
)
def test_ranks_that_share_blocks_make_the_bits_of_whole_ones(
    weight_format: ScaledFormat, shape: tuple[int, ...], num_parts: int
) -> None:
    for bad in (None, float("nan"), float("inf")):
        whole = matrix(math.prod(shape[:-1]), shape[-1]).bfloat16().view(shape)
        if bad is not None:
            whole.view(-1)[-1] = bad
        codes, scales = weight_format.quantize(whole)
        parts = list(whole.flatten().split(-(-whole.numel() // num_parts)))
        places = list(accumulate((len(part) for part in parts[:-1]), initial=0))
        each = [weight_format.largest_by_block(*place, shape) for place in zip(parts, places, strict=True)]
        largest = torch.stack(each).amax(0)
        found = [weight_format.quantize_run(*place, shape, largest) for place in zip(parts, places, strict=True)]
        agreed, joined = weight_format.scales_of(largest), torch.cat([part.view(torch.uint8) for part in found])
        assert (agreed.shape, agreed.dtype) == (scales.shape, scales.dtype)
        decoded = weight_format.dequantize(joined.view(codes.dtype).view(shape), agreed, None)
        assert torch.equal(decoded.nan_to_num(0.5), weight_format.dequantize(codes, scales, None).nan_to_num(0.5))
        if bad is None:
            assert torch.equal(joined, codes.flatten().view(torch.uint8))
            assert torch.equal(agreed.float(), scales.float())


def test_blocks_of_one_row_are_not_shared() -> None:
    with pytest.raises(ValueError, match=r"shares_blocks=True, but a block of nvfp4 has one row, .* leave it out"):
        convert_to_scaled_training(mlp(), "nvfp4", shares_blocks=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 16), (131, 48), (257, 144)])
def test_a_gpu_encodes_to_the_bits_of_a_cpu(name: str, shape: tuple[int, int]) -> None:
    weight_format = SCALED_FORMATS[name]
    for whole in (matrix(*shape), matrix(*shape, seed=1).bfloat16(), torch.zeros(shape)):
        scale = scale_of(weight_format, whole)
        on_gpu = None if scale is None else scale.cuda()
        codes, scales = weight_format.quantize(whole, scale)
        own_codes, own_scales = weight_format.quantize(whole.cuda(), on_gpu)
        assert torch.equal(own_codes.cpu().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(own_scales.cpu().float(), scales.float())
        decoded = weight_format.dequantize(own_codes, own_scales, on_gpu, whole.dtype)
        assert torch.equal(decoded.cpu(), weight_format.dequantize(codes, scales, scale, whole.dtype))


def test_a_format_takes_few_bytes() -> None:
    for name, bound in zip(FORMATS, [0.5002, 0.5157, 0.504, 0.5157, 0.2813], strict=True):
        assert bound - 0.001 < SCALED_FORMATS[name].nbytes((256, 512)) / (2 * 256 * 512) <= bound, "against bf16"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 16, bias=False))


@pytest.mark.parametrize(("dtype", "rounds_input"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_trains_as_one_that_rounds(name: str, dtype: torch.dtype, rounds_input: bool) -> None:
    oracle = rounding(mlp(), name, ["0", "2"], rounds_input=rounds_input).to(dtype)
    model = convert_to_scaled_training(mlp().to(dtype), name, scales_input=rounds_input)  # type: ignore[arg-type]
    model = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, oracle)]
    for step in range(2):
        inputs = [matrix(6, 48, seed=step).to(dtype).view(2, 3, 48).requires_grad_() for _ in range(2)]
        losses = [each(x).square().mean() for each, x in zip((model, oracle), inputs, strict=True)]
        assert torch.equal(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, trained), wanted in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert torch.equal(trained.detach() + 0, wanted.detach()), key


def test_a_compiled_layer_computes_the_same() -> None:
    model: Any = convert_to_scaled_training(mlp(), "nvfp4")
    x = matrix(3, 48)
    wanted = model(x)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad(output.sum(), model[0].bias)[0] for output in (found, wanted)]
    assert torch.equal(*gradients)


def test_autocast_and_other_operations_than_linear() -> None:
    model: Any = convert_to_scaled_training(mlp(), "mxfp8")
    x = matrix(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    weight: Any = model[0].weight
    scaled = weight.scaled()
    wanted = functional.linear(x, weight)
    by_left, by_right = (scaled @ x.t()).t(), torch.matmul(x, weight.transpose(0, 1))
    for product in (x @ scaled.t(), torch.mm(x, weight.T), by_left, by_right):
        torch.testing.assert_close(product, wanted, msg="all are one product")
    for refused in (lambda: torch.addmm(x, x, scaled), lambda: weight.mv(x[0])):
        with pytest.raises(ValueError, match=r"would multiply by a weight in mxfp8 as it is not meant: laconic knows"):
            refused()
    with pytest.raises(
        ValueError, match=r"sums over the rows of a weight in mxfp8, whose blocks lie along its columns"
    ):
        functional.linear(x[:, :1].expand(3, 160), scaled.t())
    assert scaled.sum(dtype=torch.float64).dtype == torch.float64
    assert torch.equal(weight.sum(), (weight + 0).sum()), "a weight that trains shows its exact elements"
    with pytest.raises(RuntimeError, match=r"writes into a weight in mxfp8.*Call reshard\(\) of the sharded module"):
        scaled.mul_(2)


@pytest.mark.parametrize("name", FORMATS)
def test_the_device_gets_codes_and_scales_as_it_wants_them(name: str) -> None:
    """Pass torch's own check of the arguments of a product on CUDA, which it makes without a device, too."""
    weight_format = SCALED_FORMATS[name]
    sizes = {"rows": (32, 384), "weight": (256, 384)}
    parts = {
        key: (
            torch.empty(weight_format.codes_shape(shape), dtype=weight_format.code_dtype, device="meta"),
            torch.empty(own.scales_shape(shape), dtype=weight_format.scale_dtype, device="meta"),
        )
        for (key, shape), own in zip(sizes.items(), (weight_format.of_rows, weight_format), strict=True)
    }
    scale = torch.empty((), device="meta") if weight_format.has_matrix_scale else None
    weight = ScaledTensor(*parts["weight"], scale, weight_format, torch.bfloat16)
    product = product_of_codes(*parts["rows"], scale, weight, torch.bfloat16)
    assert (product.shape, product.dtype) == ((32, 256), torch.bfloat16)
    assert weight_format in _RECIPES


def test_scales_are_swizzled_as_cublas_says() -> None:
    shape = (130, 6)
    scales = torch.arange(1, shape[0] * shape[1] + 1).remainder(251).to(torch.uint8).view(shape)
    num_tiles = -(-shape[0] // 128) * -(-shape[1] // 4)
    wanted = torch.zeros(512 * num_tiles, dtype=torch.uint8)
    for row in range(shape[0]):
        for column in range(shape[1]):
            tile = row // 128 * -(-shape[1] // 4) + column // 4
            wanted[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    assert torch.equal(_swizzled(scales, next(iter(_RECIPES.values()))[1]), wanted)


def test_what_cannot_be_converted_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    tied[1].weight = tied[0].weight
    none, every = {"module_filter_fn": lambda *_: False}, {"module_filter_fn": lambda *_: True}
    for model, name, options, message in (
        (mlp(), "fp8", {}, r"weight_format='fp8' is not known; use one of fp8_128x128, fp8_1x128"),
        (mlp(), "nvfp4", none, "Sequential has no linear layer to convert"),
        (nn.Sequential(nn.Linear(24, 3)), "nvfp4", {}, r"0: nvfp4 needs rows of .* 16 elements, got shape \(3, 24\)"),
        (convert_to_scaled_training(mlp(), "mxfp8"), "nvfp4", {}, "weight of 0 is a ScaledWeight, not a plain tensor"),
        (tied, "nvfp4", {}, "Sequential has no linear layer to convert"),
        (tied, "nvfp4", every, "weight of 0 is tied to another module's"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_to_scaled_training(model, name, **options)  # type: ignore[arg-type]
    for given, message in (
        ({"height": 0, "width": 16}, "blocks of 0 x 16 cut nothing"),
        ({"height": 1, "width": 16, "element": "e2m1"}, "are no format that laconic knows"),
    ):
        with pytest.raises(ValueError, match=message):
            ScaledFormat(name="odd", **given)  # type: ignore[arg-type]


def as_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let tensors say that they are on CUDA, on a machine without Triton."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(scaled, "kernels_for", lambda tensor, name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(("capability", "formats"), [
    ((8, 0), set()),
    ((9, 0), {"fp8_128x128", "fp8_1x128", "fp8_1x128_e8m0"}),
    ((10, 0), {"mxfp8", "nvfp4"}),
])  # fmt: skip
def test_each_device_multiplies_the_codes_that_it_knows(
    capability: tuple[int, int], formats: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_device(monkeypatch, capability)

    def known(*shape: int, dtype: torch.dtype = torch.bfloat16, outputs: int = 256) -> set[str]:
        rows = torch.zeros(shape, dtype=dtype)
        return {name for name, each in SCALED_FORMATS.items() if multiplies_codes(each, rows, outputs)}

    assert known(32, 384) == formats
    assert known(32, 384, dtype=torch.float32) == known(32, 384, outputs=24) == set()
    assert known(24, 384) == known(32, 392) == set()


def test_a_layer_multiplies_codes_where_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product gets the codes of both sides, and the bias is added to it."""
    as_device(monkeypatch, (10, 0))
    torch.manual_seed(0)
    layer: Any = convert_to_scaled_training(nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16)), "nvfp4")
    x, given = torch.randn(16, 64, dtype=torch.bfloat16), []

    def product(codes: Tensor, scales: Tensor, scale: Tensor | None, weight: Any, dtype: torch.dtype) -> Tensor:
        given.append((codes, scales, scale))
        decoded = weight.weight_format.of_rows.dequantize(codes, scales, scale, dtype)
        return functional.linear(decoded, weight.dequantize(dtype))

    monkeypatch.setattr(scaled_linear, "product_of_codes", product)
    by_codes = layer(x)
    monkeypatch.setattr(scaled_linear, "multiplies_codes", lambda *_: False)
    decoded = layer(x)
    ((codes, scales, scale),) = given
    assert (codes.shape, scales.shape, scale.shape) == ((16, 32), (16, 4), ())
    torch.testing.assert_close(by_codes, decoded, rtol=1e-2, atol=1e-2)
