"""The table of combinations: each cell has its tier, its oracles differ, and the page shows the table."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

import laconic
from tests.composition import columns, page, test_caches, test_islands_and_cyclic
from tests.composition.compare import assert_right, differences, oracle_on
from tests.composition.job import batch, build, error, num_steps, optimizer_of
from tests.composition.matrix import (
    FEATURES,
    OPTIMIZERS,
    REFUSALS,
    STRATEGIES,
    Cell,
    cells,
    cells_of,
    refusals_of,
    sample,
    works,
)


def test_each_cell_has_its_tier() -> None:
    """In `make test` are each strategy, optimizer, feature and refusal, all features of each kind at once."""
    for name, markers in (("test_a_sample_of_its_cells", set()), ("test_all_its_other_cells", {"heavy"})):
        marks = [
            {mark.name: mark for mark in getattr(room, name).pytestmark}
            for room in (test_caches, test_islands_and_cyclic)
        ]
        assert all(each.keys() == {"parametrize", *markers} for each in marks)
        assert Counter(strategy for each in marks for strategy in each["parametrize"].args[1]) == Counter(STRATEGIES)
    tried, left = ([cell for name in STRATEGIES for cell in cells_of(name, in_sample=it)] for it in (True, False))
    compiled = [cell for cell in cells() if "compile" in cell.features]
    assert Counter([*tried, *left, *compiled]) == Counter(cells())
    assert set().union(*(cell.parts for cell in tried)) == {*STRATEGIES, *OPTIMIZERS, *FEATURES} - {"compile"}
    assert {index for cell in tried for index in refusals_of(cell.parts)} == set(range(len(REFUSALS)))
    assert all(works(cell) for cell in left), "all that is refused is tried"


def test_what_the_code_offers_has_its_column() -> None:
    """Keywords of `fully_shard`, functions that convert a model, and encodings of versions: what is new comes here."""
    assert set(columns.KEYWORDS) == set(columns.keywords())
    assert set(columns.CONVERTERS) == set(columns.converters())
    assert columns.ENCODINGS, "a column tries each of them"
    places = {*columns.KEYWORDS.values(), *columns.CONVERTERS.values(), columns.PUBLISHED}
    assert places <= {columns.ROWS, columns.EVERY, *FEATURES, *OPTIMIZERS}
    in_columns = {key for key, place in columns.KEYWORDS.items() if place in columns.OF_KEYWORDS}
    of_cyclic = inspect.signature(laconic.CyclicDataParallel).parameters.keys()
    assert in_columns.isdisjoint(of_cyclic), "the cyclic schedule has none of them, so these cells are empty"


@pytest.mark.machine
def test_a_sample_of_the_cells_on_processes() -> None:
    assert assert_right([*sample(), Cell("host", "AdamW", frozenset({"compile"}))]) == 1


@pytest.mark.campaign(seconds=110)
def test_every_cell_that_compiles() -> None:
    num_compiled = assert_right([cell for cell in cells() if "compile" in cell.features])
    assert num_compiled > 5, "cells with equal guards share graphs, but not all do"


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
