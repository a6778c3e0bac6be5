"""The device memory that publishing adds, on the accelerator of `laconic.rehearse`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.publish import Reader
from tests.support.published_on_device import AddedMemory, Trained, publish_on_device

pytestmark = pytest.mark.machine

WIDTH, LAYERS = 256, 4  # shares take several pieces


def build(device: torch.device) -> nn.Module:
    with device:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda")
    found: torch.Tensor = model(batch).square().mean()
    return found


TRAINED = Trained(build=build, units=lambda model: [*model.children()], loss=loss)


def added(folder: Path, local: int = 2, **keys: Any) -> AddedMemory:
    return publish_on_device(TRAINED, folder, versions=4, nodes=local, local=local, base_every=3, **keys)


@pytest.mark.parametrize("encoding", ["gaps", "smallest"])
def test_a_version_takes_less_than_a_unit_and_leaves_nothing(encoding: str, tmp_path: Path) -> None:
    """Whole values, a patch of all elements, patches of some, and both."""
    found = added(tmp_path, encoding=encoding)
    assert found.unit == 4 * (WIDTH * WIDTH + WIDTH) // 4
    assert all(0 < peak < found.unit for peak in found.peaks), found.peaks
    assert found.left == 0
    assert found.peaks[1] == max(found.peaks), "the places of changes are found on the device"


def test_one_rank_alone_publishes_its_weights(tmp_path: Path) -> None:
    found = added(tmp_path, local=1, encoding="lossless")
    held = {name: torch.zeros_like(values) for name, values in found.weights.items()}
    assert Reader(tmp_path).update(held) == 4
    for name, values in found.weights.items():
        assert torch.equal(held[name], values), name
    assert max(found.peaks) < found.unit
