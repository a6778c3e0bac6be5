"""torchao's training in few bits with only the import of `fully_shard` changed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import laconic
from laconic.layers.scaled import SCALED_FORMATS
from tests.support import sharded_net
from tests.support.launch import on_ranks


def import_torchao() -> Any:
    """Import torchao's float8 from the folder in which the Makefile puts it."""
    sys.path.append(str(Path(sys.prefix) / "torchao"))
    import torchao.float8

    return torchao.float8


def make_model() -> nn.Module:
    """Linear layers whose sizes float8 products take: multiples of 16."""
    float8 = import_torchao()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)]
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)  # without float8 products
    return float8.convert_to_float8_training(nn.Sequential(*layers), config=config)


def train(
    fully_shard: Any, make: Callable[[], nn.Module] = make_model, **options: Any
) -> tuple[nn.Module, list[Tensor]]:
    """Take three steps. Returns the model and its losses."""
    model = make()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, width = [], next(iter(model.parameters())).shape[-1]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = (model(torch.randn(32, width, generator=generator)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        import_torchao().precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.detach())
    return model, losses


@on_ranks(2, local=1)
def test_float8_weights_train_as_under_fsdp2() -> None:
    wanted_model, wanted = train(torch_fully_shard)
    model, losses = train(laconic.fully_shard, cache="host")
    torch.testing.assert_close(losses, wanted)
    for name, parameter in wanted_model.named_parameters():
        whole: Any = model.get_parameter(name)
        torch.testing.assert_close(whole.full_tensor(), parameter.full_tensor(), msg=name)  # type: ignore[operator]
    wire_dtypes = {bucket.form.dtype for bucket in sharded_net.buckets(model)}
    assert wire_dtypes == {torch.float8_e4m3fn, torch.float32}, "weights and biases"


def make_converted(kind: str) -> nn.Module:
    """Two layers whose weights torchao converts: "ternary" ones cross in two bits, with one scale of all ranks.

    The others cross in bfloat16, and are encoded behind the gather: as MXFP8, as int8, or as float8 by rows.
    """
    float8 = import_torchao()
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.prototype.quantized_training import bitnet_training, int8_mixed_precision_training
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    narrow, wide = (16, 48) if kind == "ternary" else (64, 96)
    layers = nn.Linear(narrow, wide, bias=False), nn.GELU(), nn.Linear(wide, narrow, bias=False)
    model = nn.Sequential(nn.Sequential(*layers))
    if kind == "rowwise":
        config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        return float8.convert_to_float8_training(model, config=config)
    if kind == "mxfp8":
        mxfp8 = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
        quantize_(model, mxfp8, filter_fn=lambda module, _: isinstance(module, nn.Linear))
    else:
        quantize_(model, bitnet_training() if kind == "ternary" else int8_mixed_precision_training())
    return model


@pytest.mark.parametrize("kind", ["ternary", "mxfp8", "int8", "rowwise"])
@on_ranks(2, local=1)
def test_other_weights_of_torchao_train_as_under_fsdp2(kind: str) -> None:
    make, policy = partial(make_converted, kind), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    _, wanted = train(torch_fully_shard, make, mp_policy=policy)
    model, losses = train(laconic.fully_shard, make, mp_policy=policy)
    assert losses == wanted
    found = {bucket.form.dtype for bucket in sharded_net.buckets(model)}
    assert found == {torch.uint8 if kind == "ternary" else torch.bfloat16}


@on_ranks(2, local=1)
def test_optimizers_in_few_bits_are_refused_by_name() -> None:
    import_torchao()
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    model = laconic.fully_shard(nn.Linear(64, 256))
    model(torch.ones(1, 64)).sum().backward()
    for kind in (AdamW8bit, AdamW4bit, AdamWFp8):
        with pytest.raises(TypeError, match=r"not cut inside rows: use laconic\.optim\.AdamW8bit"):
            kind(model.parameters()).step()


def test_formats_are_those_of_torchao() -> None:
    """MXFP8 and NVFP4 to the bit. torchao gathers neither: its float8 gather takes one scale per weight."""
    import_torchao()
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    matrix = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 97)[:, None]
    for name in ("mxfp8", "nvfp4"):
        weight_format = SCALED_FORMATS[name]
        if name == "mxfp8":
            scale, wanted = None, to_mx(matrix, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
        else:
            scale = weight_format.matrix_scale(weight_format.largest_of(matrix))
            wanted = nvfp4_quantize(matrix, 16, scale)
        for found, their in zip(weight_format.quantize(matrix, scale), reversed(wanted), strict=True):
            assert torch.equal(found.view(torch.uint8), their.view(torch.uint8).view(found.shape)), name
