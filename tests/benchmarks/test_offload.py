"""benchmarks.offload: what rests in host memory is not counted as memory of the device."""

from __future__ import annotations

import pytest

from benchmarks import offload
from tests.ranks import run_ranks


@pytest.mark.parametrize("strategy", offload.STRATEGIES)
def test_only_what_does_not_rest_on_the_host_is_counted(strategy: str) -> None:
    """A gathered layer, its gradients and a transfer, but not the shards, gradients and states of all layers."""
    shape = offload._TINY_LLAMA
    layer_bytes = 4 * (shape.hidden * (shape.hidden * 2 + shape.hidden * 2 + shape.intermediate * 3 + 2))
    for by_allocator, by_books in run_ranks(offload.measure_memory, 2, strategy, shape, local=1):
        assert 2 * layer_bytes <= by_books <= 5 * layer_bytes
        assert by_allocator > by_books - layer_bytes
