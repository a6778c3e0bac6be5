"""Each file of published measurements loads as jobs and clusters, and the page holds the recorded predictions."""

from __future__ import annotations

import pytest

from benchmarks.published import page, sources
from benchmarks.published.found import MOST, Found, is_right
from benchmarks.published.sources import Step
from laconic.plan.candidates import CANDIDATES


def test_every_measurement_can_be_predicted_and_says_where_it_is_from() -> None:
    rows = sources.measurements().values()
    assert len(rows) >= 60
    assert len({row.machines for row in rows}) >= 12
    for row in rows:
        assert row.strategy in CANDIDATES, row.key
        assert row.url.startswith("https://"), row.key
        assert row.quote, row.key
        assert row.machines, row.key


def test_the_page_is_the_record_and_the_record_is_of_these_files() -> None:
    found, rows = page.recorded(), sources.measurements()
    assert page.PAGE.read_text(encoding="utf-8") == page.render(found), "run python -m benchmarks.published.page"
    assert [key for key in found if key not in rows] == [], "run python -m benchmarks.published"
    for key, each in found.items():
        assert (each.published_s, each.published_bytes) == (rows[key].seconds, rows[key].memory_bytes), key


def test_what_is_far_off_has_a_reason() -> None:
    rows = sources.measurements()
    far = [key for key, each in page.recorded().items() if abs(each.off) > MOST]
    assert [key for key in far if not rows[key].reason] == []


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [("s/step", 3.0, 3.0), ("tokens/s", 500.0, 16.0), ("tokens/s/GPU", 250.0, 8.0), ("samples/s", 2.0, 4.0),
     ("s/1024 samples", 256.0, 2.0), ("TFLOP/s/GPU", 5.0, 0.4)],
)  # fmt: skip
def test_a_published_figure_means_seconds_of_a_step(unit: str, value: float, seconds: float) -> None:
    assert sources.UNITS[unit](value, Step(rows=8, tokens=8000, ranks=4, flop=2e12)) == seconds


def test_the_order_of_two_is_by_tokens_and_a_tie_has_none() -> None:
    def found(seconds: float, published_s: float, tokens: int = 100) -> Found:
        return Found(seconds=seconds, published_s=published_s, memory_bytes=1.0, published_bytes=None, tokens=tokens,
                     bound_by="compute")  # fmt: skip

    assert is_right(found(1.0, 1.0), found(2.0, 1.5))
    assert is_right(found(3.0, 1.0), found(2.0, 1.5)) is False
    assert is_right(found(1.0, 1.0), found(1.0, 1.02)) is None
    assert is_right(found(1.0, 1.0), found(1.0, 1.0, tokens=200))
