"""benchmarks.offload: what rests in host memory is not counted as memory of the device."""

from __future__ import annotations

import pytest

from benchmarks import offload
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine


def test_what_rests_on_the_host_is_not_counted() -> None:
    """The peak has a gathered layer, its gradients and transfers, and no optimizer states of all layers."""
    shape = offload._TINY_LLAMA
    layer_bytes = 4 * shape.hidden * (4 * shape.hidden + 3 * shape.intermediate + 2)
    for strategy in offload.STRATEGIES:
        for allocated, booked in run_ranks(offload.measure_memory, 2, strategy, shape, local=1):
            assert (booked is None) == (strategy == offload.RINGS)
            assert 2 * layer_bytes <= (booked or allocated) <= allocated
            assert booked is None or booked <= 6 * layer_bytes
