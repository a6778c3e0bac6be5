"""torchao's float8 training with only the import of `fully_shard` changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import laconic
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


def train(fully_shard: Any, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    """Take three steps. Returns the model and its losses."""
    model = make_model()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = (model(torch.randn(32, 16, generator=generator)) ** 2).mean()
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
