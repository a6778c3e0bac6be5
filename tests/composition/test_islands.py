"""Each cell of islands trains as the unsharded model does, or it is refused by name before the first step."""

from __future__ import annotations

import pytest

from tests.composition.compare import assert_right
from tests.composition.matrix import ISLANDS, cells_of


@pytest.mark.parametrize("strategy", ISLANDS)
def test_a_sample_of_its_cells(strategy: str) -> None:
    assert_right(cells_of(strategy, in_sample=True))


@pytest.mark.heavy
@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ISLANDS)
def test_all_its_other_cells(strategy: str) -> None:
    assert_right(cells_of(strategy, in_sample=False))
