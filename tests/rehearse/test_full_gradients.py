"""How many buckets of full gradients a device holds at once."""

from __future__ import annotations

import pytest

from laconic.rehearse.tape import Free, Step
from tests.rehearse.engine import ENGINE
from tests.support.launch import launch

pytestmark = pytest.mark.machine


def _most_alive(name: str) -> int:
    """The most buckets of full gradients at once in a warm run of a program of five layers."""
    tape = ENGINE[name].record(num_blocks=5, is_warm=True).tape
    alive, most = set[int](), 0
    for entry in tape.entries:
        if isinstance(entry, Step) and entry.allocates is not None:
            if "(_allocate)" in tape.memories[entry.allocates].place:
                alive.add(entry.allocates)
        elif isinstance(entry, Free):
            alive.discard(entry.memory)
        most = max(most, len(alive))
    return most


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("cache host", 3),  # the root's, whose gradients come first and end last, and those of two layers
        ("recomputation", 2),  # the sum of the last layer has run beside the recomputation of this one
        ("recomputation, accumulation", 2),
    ],
)
def test_recomputation_leaves_time_to_free_the_last_bucket(name: str, most: int) -> None:
    assert launch(_most_alive, name, num_ranks=1, timeout_s=110, backend=None)[0] == most
