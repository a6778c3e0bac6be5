"""Each cell of the engine trains as the unsharded model does."""

from __future__ import annotations

import pytest

from tests.composition.compare import assert_right
from tests.composition.matrix import CACHES, quick_cells


@pytest.mark.parametrize("strategy", CACHES)
def test_every_cell(strategy: str) -> None:
    assert_right(quick_cells(strategy))
