"""A cell of the matrix trains as the unsharded model does, or it is refused by name before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import laconic
from tests.composition import page
from tests.composition.job import batch, build, error, num_steps, optimizer_of, run_cell, stage_optimizer, stages_of
from tests.composition.matrix import (
    CACHES,
    CODED,
    CYCLIC,
    FEATURES,
    ISLANDS,
    OPTIMIZERS,
    REFUSALS,
    STRATEGIES,
    Cell,
    cells,
    refusals_of,
    sample,
)
from tests.composition.oracle import expected
from tests.support.launch import run_ranks

Result = tuple[str, dict[str, Tensor], int]
CODED_SHARE = 0.45
"""The most by which a run with coded crossings may end off, as a share of the way that the exact run has gone."""


def job_cells(chosen: list[Cell]) -> list[Result]:
    """For every cell the text of its refusal, this rank's parameters, and the number of graphs it compiled."""
    torch._dynamo.config.recompile_limit = 64
    if any(cell.strategy in CYCLIC for cell in chosen):
        check_states()
    return [_run(cell) for cell in chosen]


def _run(cell: Cell) -> Result:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        text, parameters = "", run_cell(cell)
    except ValueError as refusal:
        text, parameters = str(refusal), {}
    return text, parameters, torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs


def check_states() -> None:
    """Islands sync around cyclic runs only if every worker holds all parameters, and do not recover."""
    cell = Cell("cyclic", "AdamW")
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "worker")), build(cell, 0)
    run = laconic.CyclicDataParallel(
        stages_of(cell, model), error, stage_optimizer(cell), mesh["worker"], states="sharded"
    )
    with pytest.raises(ValueError, match=r'states="sharded" and LocalSteps: .* use states="replicated"'):
        laconic.LocalSteps(model, run.optimizer, mesh=laconic.init_mesh("cpu", islands=2))
    with pytest.raises(ValueError, match=r"recovery= and the optimizer of a cyclic run.*save checkpoints of the run"):
        laconic.LocalSteps(model, run.optimizer, mesh=laconic.init_mesh("cpu", islands=2), recovery="unused")


@pytest.mark.campaign
@pytest.mark.timeout(400)  # a hundred cells, on however few cores
@pytest.mark.parametrize("kind", ["caches", "islands", "cyclic", "compile"])
def test_every_cell(kind: str) -> None:
    strategies = {"caches": CACHES, "islands": ISLANDS, "cyclic": CYCLIC, "compile": STRATEGIES}[kind]
    is_compiled = kind == "compile"
    chosen = [cell for cell in cells() if cell.strategy in strategies and ("compile" in cell.features) == is_compiled]
    assert len(chosen) >= 16
    num_compiled = assert_right(chosen)
    assert num_compiled > 5 * is_compiled - 1, "cells with equal guards share graphs, but not all do"


@pytest.mark.machine
def test_a_sample_of_the_cells() -> None:
    chosen = sample()
    assert set().union(*(cell.parts for cell in chosen)) == {*STRATEGIES, *OPTIMIZERS, *FEATURES}
    assert assert_right(chosen) == 1


def assert_right(chosen: list[Cell]) -> int:
    """Run cells on four ranks, and compare all; return the number of those that compiled a graph."""
    results_of_ranks = run_ranks(job_cells, 4, chosen, local=2, timeout_s=380)
    wrong = [
        f"{cell} on rank {rank}: {fault}"
        for rank, results in enumerate(results_of_ranks)
        for cell, result in zip(chosen, results, strict=True)
        for fault in faults(cell, result, rank)
    ]
    assert not wrong, f"{len(wrong)} faults:\n" + "\n".join(wrong[:40])
    return sum(graphs > 0 for _, _, graphs in results_of_ranks[0])


def faults(cell: Cell, result: Result, rank: int) -> Iterator[str]:
    """Compare a cell's result with the table and with the oracle."""
    text, got, graphs = result
    refusals = [REFUSALS[index] for index in refusals_of(cell.parts)]
    if refusals:
        if not any(each.message in text and each.remedy in text for each in refusals):
            yield text or "not refused"
    elif text:
        yield text
    else:
        if graphs and "compile" not in cell.features:
            yield "compiled, but not asked to"
        compare = strays if cell.strategy in CODED else differences
        yield from compare(cell, got, oracle_on(cell, rank))


def oracle_on(cell: Cell, rank: int) -> dict[str, Tensor]:
    islands = expected(cell)
    return islands[rank // 2 if len(islands) > 1 else 0]


def tolerance(cell: Cell) -> float:
    """Rounding enlarges differences of the last bit: AdamW8bit rounds with a seed from the values, Muon to bf16."""
    is_rounded = cell.optimizer in ("AdamW8bit", "Muon") or "mixed precision" in cell.features
    return 3e-3 if is_rounded else 2e-5


def differences(cell: Cell, got: dict[str, Tensor], want: dict[str, Tensor], factor: float = 1) -> Iterator[str]:
    if got.keys() != want.keys():
        yield f"parameters {sorted(got)}, expected {sorted(want)}"
        return
    for name, value in want.items():
        distance = (got[name] - value).abs().max().item()
        if not distance <= factor * tolerance(cell):
            yield f"{name} differs by {distance:.2g}"


def strays(cell: Cell, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[str]:
    """Crossings in four bits go the way of exact ones, but for a part of the distance."""
    if got.keys() != want.keys():
        yield f"parameters {sorted(got)}, expected {sorted(want)}"
        return
    start = dict(build(cell, 0).named_parameters())
    off, way = (
        math.sqrt(sum((ends[name] - begins[name]).square().sum().item() for name in want))
        for ends, begins in ((got, want), (want, start))
    )
    if not off <= CODED_SHARE * way:
        yield f"parameters are {off:.2g} off after {way:.2g}"
    if all(torch.equal(got[name], value) for name, value in want.items()):
        yield "nothing was coded"


def test_the_oracles_differ_by_more_than_the_tolerance() -> None:
    """So that a cell cannot pass as another: without its sync, its rule, its precision or its optimizer."""
    pairs = [
        (Cell("host", "AdamW"), Cell("local steps", "AdamW")),
        (Cell("local steps", "AdamW"), Cell("partial updates", "AdamW")),
        (Cell("local steps", "AdamW"), Cell("local steps around cyclic", "AdamW")),
        (Cell("host", "AdamW8bit"), Cell("host", "AdamW8bit", frozenset({"tensor parallel"}))),
        (Cell("host", "Muon"), Cell("host", "Shampoo")),
        (Cell("host", "Muon"), Cell("local steps", "Muon")),
        (Cell("cyclic", "Muon"), Cell("local steps around cyclic", "Muon")),
        (Cell("host", "AdamW"), Cell("host", "AdamW", frozenset({"LoRA"}))),
    ]
    for one, other in pairs:
        first, second = oracle_on(one, 0), oracle_on(other, 0)
        shared = {name: value for name, value in second.items() if name in first}
        assert list(differences(one, {name: first[name] for name in shared}, shared, 2)), f"{one}, {other}"
    cell = Cell("cyclic", "AdamW")
    model = build(cell, 0)
    optimizer = optimizer_of(cell, model)
    for step in range(num_steps(cell)):  # all workers at once
        for part in range(2):
            (error(model(batch(step, part)[0]), batch(step, part)[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(differences(cell, dict(model.named_parameters()), oracle_on(cell, 0), 2))


@pytest.mark.heavy
def test_the_page_says_what_the_table_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run python -m tests.composition.page"
