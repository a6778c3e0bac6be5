"""Cells on four ranks, against the table of refusals and the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch._dynamo
from torch import Tensor

from tests.composition.job import build, run_cell
from tests.composition.matrix import CODED, REFUSALS, Cell, refusals_of
from tests.composition.oracle import expected
from tests.support.launch import run_ranks

Result = tuple[str, dict[str, Tensor], int]
CODED_SHARE = 0.45
"""The most by which a run with coded crossings may end off, as a share of the way that the exact run has gone."""
BATCH = 40
"""Cells that the same ranks run: they get two minutes of the processors, and a cell takes up to two seconds of them."""


def job_cells(chosen: list[Cell]) -> list[Result]:
    """For every cell the text of its refusal, this rank's parameters, and the number of graphs it compiled."""
    torch._dynamo.config.recompile_limit = 64
    return [_run(cell) for cell in chosen]


def _run(cell: Cell) -> Result:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        text, parameters = "", run_cell(cell)
    except ValueError as refusal:
        text, parameters = str(refusal), {}
    return text, parameters, torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs


def assert_right(chosen: list[Cell]) -> int:
    """Run cells on four ranks, and compare all; return the number of those that compiled a graph."""
    batches = [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]
    return sum(_compiled_after_comparison(batch) for batch in batches)


def _compiled_after_comparison(chosen: list[Cell]) -> int:
    results_of_ranks = run_ranks(job_cells, 4, chosen, local=2)
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
    is_rounded = cell.optimizer in ("AdamW8bit", "Muon") or not cell.features.isdisjoint({"mixed precision", "scaled"})
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
