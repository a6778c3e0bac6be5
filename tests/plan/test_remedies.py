"""Remedies for padding on many ranks: the cheapest of all ways, and accepted by the engine as they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic import rehearse
from laconic.layers.scaled import SCALED_FORMATS
from laconic.layout.granularity import Block, elements, rows
from laconic.plan.padding import ModelShapes, UnitShapes, plan_of
from laconic.plan.remedies import TILES, Remedy, advise, most_padding
from laconic.shard.unit import units_below

UNIT_BYTES = 12
ROWS = 16


def linear(width: int, height: int, count: int) -> ModelShapes:
    """Linear layers without anything else."""
    unit = UnitShapes(name="Linear", names=("weight",), shapes=((height, width),))
    return ModelShapes(layers=(unit,) * count)


MODELS = {
    "many layers": (linear(24, 176, 24), 16),
    "few layers": (linear(24, 976, 4), 64),
    "rest and two kinds": (
        ModelShapes(
            layers=(UnitShapes(name="a", names=("w", "b"), shapes=((130, 24), (130,))),) * 3
            + (UnitShapes(name="b", names=("w", "v"), shapes=((130, 24), (24, 200))),) * 2,
            rest=(UnitShapes(name="rest", names=("w",), shapes=((500, 24),)),),
        ),
        24,
    ),
}


def naive(
    model: ModelShapes, num_ranks: int, layers: int, replicas: int, block: Block, scaled: int, itemsize: int = 4
) -> tuple[float, float]:
    """The padding, and the bytes of a rank, of one way to shard."""
    groups = [model.layers[at : at + layers] for at in range(0, len(model.layers), layers)]
    units = [*groups, *[[unit] for unit in model.rest]]
    planned = []
    for unit in units:
        names = [f"{index}.{name}" for index, layer in enumerate(unit) for name in layer.names]
        joined = UnitShapes(name="", names=tuple(names), shapes=sum((layer.shapes for layer in unit), ()))
        planned.append(plan_of(joined, num_ranks // replicas, block, itemsize=itemsize).numel)
    numel = sum(layer.numel for unit in units for layer in unit)
    rank_bytes = sum(planned) / (num_ranks // replicas) * (10 + 8 / scaled) + max(planned) * UNIT_BYTES
    return sum(planned) / numel - 1, rank_bytes


@pytest.mark.parametrize("name", MODELS)
def test_remedies_are_the_cheapest_of_all_ways(name: str) -> None:
    model, num_ranks = MODELS[name]
    found = advise(model, num_ranks, ROWS, itemsize=4)
    assert found is not None
    assert found.plain.padding == pytest.approx(naive(model, num_ranks, 1, 1, rows(ROWS), ROWS**2)[0])
    assert found.plain.padding > most_padding(num_ranks)
    assert [each.rank_bytes for each in found.remedies] == sorted(each.rank_bytes for each in found.remedies)
    by_kind = {each.blocks: each for each in found.remedies}
    for kind, (block, scaled) in {"rows": (rows(ROWS), ROWS**2), "flat": (elements(256), 256)}.items():
        ways = [
            naive(model, num_ranks, layers, replicas, block, scaled)
            for layers in (1, 2, 4, 8, 16)
            if layers <= len(model.layers)
            for replicas in range(1, num_ranks // 8 + 1)
            if num_ranks % (8 * replicas) == 0
        ]
        enough = [rank_bytes for padding, rank_bytes in ways if padding <= most_padding(num_ranks)]
        assert (kind in by_kind) == bool(enough)
        if enough:
            best = by_kind[kind]
            assert best.rank_bytes == pytest.approx(min(enough)), best.words
            assert naive(model, num_ranks, best.layers_per_unit, best.num_replicas, block, scaled) == pytest.approx(
                (best.padding, best.rank_bytes)
            )


def test_tiles_of_weights_may_be_shared() -> None:
    """Every rank then knows all scales, and nothing pads but for 16 bytes of codes."""
    assert {each.height: each.name for each in SCALED_FORMATS.values() if each.height > 1} == TILES
    model, num_ranks = linear(24, 976, 4), 64
    found = advise(model, num_ranks, 128, itemsize=2)
    assert found is not None
    shared = found.remedies[-1] if found.remedies[-1].blocks == "shared" else found.remedies[0]
    assert shared.words == "shared blocks"
    padding, rank_bytes = naive(model, num_ranks, 1, 1, elements(1), 256, itemsize=1)
    assert (shared.padding, shared.rank_bytes) == pytest.approx((padding, rank_bytes + 4 * model.numel / 128**2))
    assert _follow(shared, model) / model.numel - 1 == pytest.approx(padding)


def test_rows_that_nobody_asked_for_may_be_cut_and_little_padding_needs_no_advice() -> None:
    assert advise(linear(24, 160, 2), 10, ROWS, itemsize=4) is None
    found = advise(linear(200, 5, 4), 8, 1, itemsize=4)
    assert found is not None
    assert found.remedies[0].words == "rows that may be cut"
    assert found.remedies[0].calls == (
        "for layer in layers: laconic.fully_shard(layer)",
        "laconic.fully_shard(model)",
    )


def test_a_remedy_names_its_cost_and_the_calls() -> None:
    figures: dict[str, Any] = {"num_ranks": 10240, "num_rows": 32, "padding": 0.0123, "rank_bytes": 2e9}
    text = str(Remedy(**figures, added_bytes=1.25e9, layers_per_unit=4, num_replicas=10))
    assert text.startswith("1.23%, +1.25 GB a rank, 4 layers a unit, 10 replicas of 1024 ranks: mesh = ")
    text = str(Remedy(**figures, added_bytes=1.25e9, blocks="flat"))
    assert text.startswith("1.23%, +1.25 GB a rank, flat blocks of 256: for layer in layers: laconic.fully_shard(")
    assert text.endswith("or [optimizer] flat_blocks = true in a job with adamw8bit")


class Stack(nn.Module):
    """The layers of a `linear` model, which all see the input."""

    def __init__(self, shapes: ModelShapes) -> None:
        super().__init__()
        sizes = [layer.shapes[0] for layer in shapes.layers]
        self.layers = nn.ModuleList(nn.Linear(width, height, bias=False) for height, width in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).sum() for layer in self.layers)  # type: ignore[return-value]


def _follow(found: Remedy, shapes: ModelShapes) -> int:
    """Run the calls of a remedy and a step as one rank of its cluster; return the elements of all buckets."""
    islands, num_ranks = found.num_replicas, found.num_ranks
    with rehearse.rehearsal(islands=islands, nodes=num_ranks // islands // 8, local=8):
        model = Stack(shapes).to("cuda")
        names: dict[str, Any] = {"laconic": laconic, "model": model, "layers": model.layers}
        for call in found.calls:
            exec(call, names)
        model(torch.randn(2, shapes.layers[0].shapes[0][1], device="cuda")).backward()
        if found.blocks == "flat":
            names["optimizer"].step()
        return sum(bucket.layout.numel for unit in units_below(model) for bucket in unit.buckets)


@pytest.mark.filterwarnings("ignore")
def test_the_engine_accepts_every_remedy_and_pads_as_predicted() -> None:
    words = ""
    for name in ("many layers", "few layers"):
        model, num_ranks = MODELS[name]
        advice = advise(model, num_ranks, ROWS, itemsize=4)
        assert advice is not None
        for found in advice.remedies:
            words += found.words
            assert _follow(found, model) / model.numel - 1 == pytest.approx(found.padding), found.words
    assert all(kind in words for kind in ("layers a unit", "replicas of", "flat blocks"))


WIDTH = 256


def _peak_of(layers_per_unit: int) -> float:
    """The most bytes of device memory in two steps, in elements of a layer."""

    def program() -> None:
        mesh = laconic.init_mesh("cuda", nodes=2, local=8)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(8)))
        for i in range(0, 8, layers_per_unit):
            laconic.fully_shard(list(model[i : i + layers_per_unit]), mesh=mesh, mp_policy=precision)
        laconic.fully_shard(model, mesh=mesh, mp_policy=precision)
        model.to_empty(device="cuda")
        for _ in range(2):
            model(torch.randn(1, WIDTH, device="cuda")).sum().backward()
            model.zero_grad()

    return rehearse.run(program, nodes=2, local=8).peak_bytes() / WIDTH**2


def test_a_unit_takes_as_many_bytes_as_a_remedy_costs() -> None:
    assert _peak_of(2) - _peak_of(1) == pytest.approx(UNIT_BYTES, rel=0.01)
