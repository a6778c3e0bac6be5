"""benchmarks.lossless: what it counts, on a tiny training."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import lossless
from benchmarks.lossless import FLOAT8, NVFP4, QUICK, TARGETS, Bench

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(QUICK)


def test_every_rate_and_format_is_coded_and_near_its_entropy(bench: Bench) -> None:
    found = bench.measure()
    assert set(found) == {(rate, name) for rate in TARGETS for name in ("bf16", FLOAT8, NVFP4)}
    for bits in found.values():
        assert bits.entropy_bits < bits.total < bits.entropy_bits + 0.7
        assert sum(bits.parts) == bits.coded
    assert lossless.entropy(bench).is_met
    row = lossless.bits_row(bench)
    assert row.measured.startswith(" / ".join(f"{found[rate, 'bf16'].total:.2f}" for rate in TARGETS))
    assert len(lossless._table(bench).splitlines()) == 2 + len(found)


def test_the_entropy_is_that_of_each_context() -> None:
    """Context 0 has one value, context 1 has two that are equally frequent: half of all values take a bit."""
    pairs = torch.tensor([5, 2**20 + 1, 2**20 + 2])
    histograms = [torch.stack([pairs, torch.tensor([3, 2, 0])]), torch.stack([pairs, torch.tensor([1, 0, 2])])]
    kept = [histogram[:, histogram[1] > 0] for histogram in histograms]
    assert lossless._entropy(kept) == pytest.approx(4.0)
    assert math.isclose(lossless._entropy(kept[:1]), 0.0)
