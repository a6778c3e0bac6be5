"""Each cell of a cache trains as the unsharded model does, and near it with crossings in few bits."""

from __future__ import annotations

import pytest

from tests.composition.compare import assert_right
from tests.composition.matrix import CACHES, cells_of


@pytest.mark.parametrize("strategy", CACHES)
def test_a_sample_of_its_cells(strategy: str) -> None:
    assert_right(cells_of(strategy, in_sample=True))


@pytest.mark.heavy
@pytest.mark.parametrize("strategy", CACHES)
def test_all_its_other_cells(strategy: str) -> None:
    assert_right(cells_of(strategy, in_sample=False))
