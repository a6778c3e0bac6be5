"""A sample of the ranks that differ: each ends with an exception that says who differs, where and how."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.ranks_differ import QUICK, kinds, try_kind


@pytest.mark.timeout(300)
def test_ranks_that_differ_end_with_the_difference() -> None:
    with ThreadPoolExecutor(3) as pool:
        for outcome in pool.map(try_kind, QUICK):
            fault = outcome.fault.split("; took")[0]  # a busy machine proves nothing
            assert not fault or fault.startswith("took"), (outcome.name, fault, outcome.told)


def test_there_are_thirty_kinds() -> None:
    assert len(kinds()) >= 30
