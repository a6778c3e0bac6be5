"""Gathers that run ahead on a device: the units beside which they run, their memory, and their order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic import Prefetch, fully_shard, init_mesh
from laconic.rehearse import rehearsal
from laconic.rehearse.order import clocks
from laconic.rehearse.tape import Step, Tape

WIDTH = 64
UNIT = 4 * WIDTH**2
"""The bytes of a layer."""
EQUAL = (WIDTH,) * 6
SMALL = (WIDTH, 8, 8, 8, 8, WIDTH)
ODD = (33, 7, 5, 33, 3, 3, 9)


class Stack(nn.Module):
    """Layers of one product each, and a parameter of the root."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in widths)
        self.scale = nn.Parameter(torch.ones(widths[0]))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            missing = layer.in_features - x.shape[1]
            x = layer(nn.functional.pad(x, (0, missing)))  # a negative number cuts
        return x.sum()


def _warm(
    nodes: int, local: int, widths: tuple[int, ...], *, rank: int = 0, trains: bool = True, **options: Any
) -> Tape:
    """A forward, and a backward if it `trains`, after another one."""
    with rehearsal(nodes=nodes, local=local, rank=rank) as machine:
        mesh = init_mesh("cuda", nodes=nodes, local=local)
        model: Any = Stack(widths).to("cuda")
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh, **options)
        x = torch.randn(4, widths[0], device="cuda")

        def step() -> None:
            with torch.set_grad_enabled(trains):
                loss = model(x)
            if trains:
                loss.backward()

        step()
        with machine.recording() as tape:
            step()
        return tape


def _products_beside(widths: tuple[int, ...], **options: Any) -> dict[str, list[int]]:
    """The number of layers whose product no event orders before or after each copy from the host, and each gather."""
    timed = [(step, list(clock)) for step, clock in clocks(_warm(2, 2, widths, trains=False, **options))]
    products = [(step, clock) for step, clock in timed if step.name == "aten::mm"]
    assert len(products) == len(widths), {step.name for step, _ in timed}
    found: dict[str, list[int]] = {}
    for step, clock in timed:
        is_copy = step.name == "aten::copy_" and step.place.startswith("shard/cache.py")
        if not is_copy and (step.transfer is None or step.transfer.purpose != "weights"):
            continue
        kind = "copy" if step.transfer is None else step.transfer.level
        beside = sum(
            clock[other.timeline] < theirs[other.timeline] and theirs[step.timeline] < clock[step.timeline]
            for other, theirs in products
        )
        found.setdefault(kind, []).append(beside)
    return found


_BUDGET = Prefetch(budget_bytes=UNIT + UNIT // 2)
_ONE, _TWO, _THREE = ([0, 0, 1, each, *[most] * 3] for each, most in ((1, 1), (2, 2), (2, 3)))


@pytest.mark.parametrize(
    ("widths", "options", "beside"),
    [
        (EQUAL, {"cache": "none"}, {"node": _ONE, "local": _ONE}),
        (EQUAL, {"cache": "host"}, {"copy": _ONE, "local": _ONE}),
        (EQUAL, {"cache": "none", "prefetch": _BUDGET}, {"node": _TWO, "local": _ONE}),
        (EQUAL, {"cache": "host", "prefetch": _BUDGET}, {"copy": _TWO, "local": _ONE}),
        (EQUAL, {"cache": "none", "prefetch": Prefetch(units=3)}, {"node": _THREE, "local": _THREE}),
        (SMALL, {"cache": "host"}, {"copy": [0, 0, 1, 1, 2, 3, 1], "local": [0, 0, 1, 1, 2, 3, 1]}),
    ],
)
def test_with_a_budget_the_first_stage_runs_beside_two_layers_and_the_second_beside_one(
    widths: tuple[int, ...], options: dict[str, Any], beside: dict[str, list[int]]
) -> None:
    """The root, then the layers: what precedes the root's forward, and the first layer's, has no layer beside it."""
    assert _products_beside(widths, **options) == beside


def _peaks(tape: Tape) -> tuple[int, int]:
    """The most bytes on the device at once, and the most in full buffers."""
    return tape.peak_bytes(), tape.peak_bytes(lambda memory: memory.is_device and "shard/full.py" in memory.place)


@pytest.mark.parametrize("cache", ["none", "host", "device"])
def test_with_a_budget_two_node_shards_come_on_top_of_what_one_unit_ahead_takes_and_by_default_none(cache: str) -> None:
    policies = (Prefetch(units=1), None, _BUDGET)
    one, default, budget = (_peaks(_warm(2, 2, EQUAL, cache=cache, prefetch=policy)) for policy in policies)
    assert default == one
    assert budget[1] == one[1], "no more memory is full of weights"
    node_shards = 0 if cache == "device" else 2  # there node shards arrive where they stay
    assert budget[0] == one[0] + node_shards * UNIT // 2


@pytest.mark.parametrize(
    "options",
    [{"cache": "host", "wire": "4bit"}, {"cache": "none", "prefetch": Prefetch(budget_bytes=2000)}],
)
def test_transfers_have_one_order_on_all_ranks(options: dict[str, Any]) -> None:
    by_rank = []
    for rank in (0, 3, 5):
        steps = [each for each in _warm(3, 2, ODD, rank=rank, **options).entries if isinstance(each, Step)]
        transfers = {id(step.transfer): step.transfer for step in steps if step.transfer is not None}.values()
        by_rank.append([(each.op, each.size, each.level, each.purpose, each.unit) for each in transfers])
    assert all(theirs == by_rank[0] for theirs in by_rank)
    assert len(by_rank[0]) > 4 * (len(ODD) + 1)
