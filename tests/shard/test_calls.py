"""A unit and step cost the host few calls in Python.

The transfers are those of torch's fake process group, which take no time and no call: what is counted is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import laconic
from tests.support.calls import calls_in

_D = 8


@pytest.fixture
def one_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the first of two ranks on the first of two nodes; the others are not there."""
    environment = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """A unit of nine tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_D)
        self.layers = nn.ModuleList(nn.Linear(_D, _D, bias=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for layer in self.layers:
            y = layer(y)
        return x + y


KINDS: dict[str, Any] = {"one tensor": lambda: nn.Linear(_D, _D, bias=False), "nine tensors": Block}


def calls_of_a_step(kind: str, num_units: int, policies: dict[str, Any]) -> int:
    model = nn.Sequential(*[KINDS[kind]() for _ in range(num_units)], nn.Linear(_D, _D))
    mesh = laconic.init_mesh("cpu", nodes=2, local=2)
    for unit in model[:-1]:
        laconic.fully_shard(unit, mesh=mesh, **policies)
    laconic.fully_shard(model, mesh=mesh, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(2, _D)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):  # the first ones look at more
        step()
    return calls_in(step)


HOST_4BIT = {"cache": "host", "wire": "4bit"}


@pytest.mark.parametrize(
    ("policies", "most"),
    [
        ({"cache": "none"}, {"one tensor": 490, "nine tensors": 560}),
        ({"cache": "host"}, {"one tensor": 465, "nine tensors": 540}),
        ({"cache": "rank"}, {"one tensor": 415, "nine tensors": 490}),
        (HOST_4BIT, {"one tensor": 625, "nine tensors": 875}),
    ],
    ids=["none", "host", "rank", "4bit"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_and_step_cost_few_calls(
    one_of_four: None, kind: str, policies: dict[str, Any], most: dict[str, int]
) -> None:
    few, many = (calls_of_a_step(kind, num_units, policies) for num_units in (4, 10))
    assert (many - few) / 6 <= most[kind]
