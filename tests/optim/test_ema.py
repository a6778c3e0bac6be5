"""EMA of sharded parameters equals torch's AveragedModel of the whole ones to the bit, and sends nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import laconic
from tests.support.launch import on_ranks
from tests.support.sharded_net import Net, build, full_parameters, moved, shard, train_step


class Normed(Net):
    """A model with buffers, one of integers, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(17)
        self.inp.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks[0](self.inp(x))))


def bits(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@pytest.mark.parametrize("use_buffers", [False, True])
@on_ranks(3, local=1)
def test_ema_equals_an_averaged_model(use_buffers: bool, tmp_path: Path) -> None:
    model: Any = shard(build(Normed), cache="host")
    plain = build(Normed)
    oracle = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    ema = laconic.EMA(model, 0.9, use_buffers=use_buffers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(4):
        train_step(model, optimizer, step)
        values = {**full_parameters(model), **dict(model.named_buffers())}
        model(torch.randn(2, 5))  # the root shows gathered weights
        values |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
                tensor.copy_(values[name])
        with moved(model) as traffic:
            ema.update()
        assert traffic.snapshot.total() == 0
        oracle.update_parameters(plain)
    want = {**dict(oracle.module.named_parameters()), **dict(oracle.module.named_buffers())}
    assert len(ema.averages) == sum(p.requires_grad for p in plain.parameters()) + 3 * use_buffers
    for name, average in ema.averages.items():
        assert torch.equal(bits(average), want[name]), name

    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = model.eval()(x)
    with ema.swap():
        averaged = model(x)
        laconic.save_safetensors(model, tmp_path / "averaged")
        with pytest.raises(RuntimeError, match="average the averages"):
            ema.update()
    torch.testing.assert_close(averaged, oracle.module.eval()(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(averaged, before)
    assert torch.equal(model(x), before)
    with suppress(ZeroDivisionError), ema.swap():
        raise ZeroDivisionError
    assert torch.equal(model(x), before)

    ema.save(tmp_path / "dcp")
    again = laconic.EMA(shard(build(Normed, seed=1)), 0.9, use_buffers=use_buffers)
    again.load(tmp_path / "dcp")
    copied = laconic.EMA(shard(build(Normed, seed=1)), 0.9, use_buffers=use_buffers)
    copied.load_state_dict({"averages": {n: bits(a) for n, a in ema.averages.items()}, "n_averaged": 4})
    for each in (again, copied):
        assert each.n_averaged == 4
        for name, average in each.averages.items():
            if each is copied or "running" not in name:  # ranks differ in these buffers, and one rank writes them
                assert torch.equal(bits(average), want[name]), name
    with pytest.raises(ValueError, match=r"other tensors than this model: inp\.weight"):
        again.load_state_dict({"averages": {k: v for k, v in ema.averages.items() if k != "inp.weight"}})
    model.reshard()
    model.inp.bias.requires_grad_()
    with pytest.raises(RuntimeError, match=r"trainable after EMA\(model\) was made: inp\.bias"):
        ema.update()
    if dist.get_rank() == 0:
        stored = load_file(tmp_path / "averaged" / "model.safetensors")
        for name in ema.averages:
            assert torch.equal(stored[name], want[name]), name


def test_averages_of_low_precision_are_kept_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    ema = laconic.EMA(model)
    nn.init.ones_(model.weight)
    ema.update()
    nn.init.constant_(model.weight, 2.0)
    ema.update()
    assert ema.averages["weight"].item() == pytest.approx(1.001)
    with pytest.raises(ValueError, match="decay"):
        laconic.EMA(model, 1.5)
