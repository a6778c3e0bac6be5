"""Flushes for verl's loader in SGLang: a model that takes them has what was published.

The stand-in of verl_stand_in.py has the conditions of verl's own code. By hand, `apply_delta` of verl 0.9.1 took its
place, and the tests passed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.integrations.verl import delta_flushes
from laconic.publish import Publisher, PublishError, Reader, WeightPatch
from tests.support import verl_stand_in


class Served(nn.Module):
    """A model with a loader of its own."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        super().__init__()
        shapes = {"embed": (13, 8), "norm": (8,), "head": (13, 8)}
        self.tensors = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        self.loaded: list[str] = []

    def load_weights(self, weights: Any) -> None:
        for name, whole in weights:
            self.loaded.append(name)
            self.tensors[name].copy_(whole)


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.norm = nn.Parameter(torch.randn(13, 8)), nn.Parameter(torch.ones(8))
    model.head = nn.Parameter(torch.randn(13, 8))
    return model


def take(served: Served, flushes: Any) -> int:
    flushes = list(flushes)
    for flush in flushes:
        verl_stand_in.apply_delta(served, flush)
    return len(flushes)


@pytest.mark.parametrize("most", [5, 1 << 20])
def test_a_loader_has_what_was_published(most: int, tmp_path: Path) -> None:
    """All values first, then patches, in flushes of any size; the norm comes whole in a patch."""
    model, reader = trained(), Reader(tmp_path)
    served = Served(dict.fromkeys(("embed", "norm", "head"), torch.bfloat16))
    publisher = Publisher(model, tmp_path)
    for version in range(3):
        with torch.no_grad():
            model.norm += version
            model.embed.view(-1)[version::17] += version
        publisher.publish()
        publisher.wait()
        served.loaded.clear()
        number = take(served, delta_flushes(reader.patches(), max_entry_numel=most, max_flush_numel=2 * most))
        assert set(served.loaded) == ({"embed", "norm"} if version else {"embed", "norm", "head"})
        assert (number == 1) == (most > 5)
        for name, parameter in model.named_parameters():
            assert torch.equal(served.tensors[name], parameter.bfloat16()), name
    assert take(served, delta_flushes(reader.patches())) == 0


def test_each_flush_has_one_dtype() -> None:
    served = Served({"embed": torch.bfloat16, "norm": torch.float32, "head": torch.bfloat16})
    patches = [WeightPatch(n, tuple(t.shape), t.dtype, None, t + 3) for n, t in served.tensors.items()]
    flushes = list(delta_flushes(patches))
    assert [flush[2][1].dtype for flush in flushes] == [torch.bfloat16, torch.float32, torch.bfloat16]
    take(served, flushes)
    assert all(bool((tensor == 3).all()) for tensor in served.tensors.values())


def patch(shape: tuple[int, ...], place: int, value: Tensor) -> WeightPatch:
    return WeightPatch("head", shape, value.dtype, torch.tensor([place]), value)


def test_patches_that_no_flush_holds() -> None:
    """They are told before the first flush."""
    good = patch((13, 8), 3, torch.ones(1))
    for wrong, message in (
        (patch((13, 8), 3, torch.tensor([torch.nan])), "head has NaN among its new values, which stands for what"),
        (patch((13, 8), 3, torch.tensor([4])), "head is int64, which has no NaN to mark what stays"),
        (patch((1 << 16, 1 << 16), 3, torch.ones(1)), "head has more than 2147483648 elements"),
    ):
        with pytest.raises(PublishError, match=message):
            next(delta_flushes([good, wrong], max_entry_numel=1, max_flush_numel=1))
