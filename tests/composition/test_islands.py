"""Each cell of islands trains as the unsharded model does, or it is refused by name before the first step."""

from __future__ import annotations

import pytest

from tests.composition.compare import assert_right
from tests.composition.matrix import ISLANDS, quick_cells


@pytest.mark.parametrize("strategy", ISLANDS)
def test_every_cell(strategy: str) -> None:
    assert_right(quick_cells(strategy))
