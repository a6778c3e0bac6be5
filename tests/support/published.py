"""A small model, and versions of it in a folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.publish import FolderSource, Publisher, PublishError, Reader
from laconic.publish.versions import version_name
from laconic.store.folder import FileRecord


class Net(nn.Module):
    """A tied weight, a transposed one, a buffer, and a layer that does not change."""

    seen: Tensor

    def __init__(self, vocabulary: int = 31) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 24), nn.Linear(24, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.up = nn.Linear(24, 40)
        self.across = nn.Parameter(torch.randn(24, 40).T)
        self.frozen = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def make(seed: int = 0, **sizes: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


@torch.no_grad()
def edit(net: Net, version: int) -> None:
    """Change a few elements, others each time."""
    net.embed.weight.view(-1)[version::97] += 0.1
    net.up.weight[version % 40, version % 24 :] *= 1.1
    net.across[version % 40] -= 0.01
    net.seen += version


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert that tensors are the same, to the bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits, expected = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(bits, expected), name


def cast(weights: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Weights in another float dtype."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def weights_of_versions(num_versions: int) -> list[dict[str, Tensor]]:
    """The weights of the versions of `published` in bf16; the first stands for none."""
    net, found = make(), [cast(snapshot(make(seed=9)))]
    for version in range(1, num_versions + 1):
        edit(net, version)
        found.append(cast(snapshot(net)))
    return found


def write(publisher: Publisher, **options: Any) -> int:
    """Publish a version, wait until it is written, and return its number."""
    version = publisher.publish(**options)
    publisher.wait()
    return version


class Run:
    """A training run that publishes; it begins with version 1."""

    def __init__(self, folder: Path, net: nn.Module | None = None, edit: Any = edit, **keys: Any) -> None:
        self.net, self.version = net or make(), 0
        self.publisher = Publisher(self.net, folder, **{"keep": 100, **keys})
        self.step(edit)

    def step(self, edit: Any = edit) -> dict[str, Tensor]:
        """Edit the net, and publish. Returns the weights that were published."""
        self.version += 1
        with torch.no_grad():
            edit(self.net, self.version)
        write(self.publisher, step=10 * self.version)
        return cast(snapshot(self.net))


def published(folder: Path, num_versions: int = 6, **keys: Any) -> list[dict[str, Tensor]]:
    """Publish versions into a folder, which keeps all. Returns `weights_of_versions`."""
    run = Run(folder, **keys)
    for _ in range(num_versions - 1):
        run.step()
    return weights_of_versions(num_versions)


def model_with(weights: dict[str, Tensor]) -> Net:
    net = make(seed=1).bfloat16()
    net.load_state_dict(weights)
    return net


def read(source: Any, weights: list[dict[str, Tensor]], start: int, to: int | None = None, **options: Any) -> Reader:
    """Bring a model with the weights of one version to another, or to the newest; return the reader."""
    reader, model = Reader(source, **options), model_with(weights[start])
    version = len(weights) - 1 if to is None else to
    assert reader.update(model, to=to) == version
    assert_same(snapshot(model), weights[version])
    assert model.head.weight is model.embed.weight
    return reader


def assert_refused(source: Any, weights: list[dict[str, Tensor]], start: int, message: str | None) -> None:
    """Assert that a reader raises in one line, and that the model keeps the weights of its version."""
    model = model_with(weights[start])
    with pytest.raises((PublishError, OSError), match=message) as error:
        Reader(source).update(model)
    assert "\n" not in str(error.value)
    assert_same(snapshot(model), weights[start])


class Vanishing(FolderSource):
    """The first files that a reader asks for are removed just before."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(folder)
        self.times = times

    def read(self, version: int, file: FileRecord) -> bytearray:
        if self.times:
            self.times -= 1
            (self.folder / version_name(version)).rename(self.folder / "aside")
            try:
                return super().read(version, file)
            finally:
                (self.folder / "aside").rename(self.folder / version_name(version))
        return super().read(version, file)


class Overtaken(FolderSource):
    """At the first look the newest version is not there yet; right after it all but the last two versions go."""

    is_first = True

    def versions(self) -> list[int]:
        found = super().versions()
        if self.is_first:
            self.is_first = False
            for version in found[:-2]:
                shutil.rmtree(self.folder / version_name(version))
            return found[:-1]
        return found
