"""Checkpoints of tensors on a GPU, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kernels", [{"fused": True}, {"foreach": True}])
def test_a_save_in_the_background_is_the_state_at_the_call(kernels: dict[str, Any], tmp_path: Path) -> None:
    """A fused optimizer, whose `step` is on the GPU, saves; optimizers with and without fused kernels load."""
    model, optimizer = _trained()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moments = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    with checkpoint.AsyncSaver(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, model=model, optimizer=optimizer, extra={})
            if step == 2:
                _step(model, optimizer)
    other = torch.nn.Linear(512, 1024, device="cuda")
    fresh = torch.optim.AdamW(other.parameters(), **kernels)
    assert checkpoint.load_checkpoint(tmp_path, model=other, optimizer=fresh) == {"step": 2}
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    for key, value in fresh.state[other.weight].items():
        assert torch.equal(value.cuda(), moments[key]), key
    assert fresh.state[other.weight]["step"].is_cuda == ("fused" in kernels)
    _step(other, fresh)
