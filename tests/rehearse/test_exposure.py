"""No transfer is exposed while compute has work: each runs beside a product that no event orders before or after it."""

from __future__ import annotations

import warnings

import pytest

from laconic.rehearse.tape import Free, Step
from tests.rehearse.engine import ENGINE
from tests.rehearse.exposure import moved

POLICIES = ("one rank per node", "LoRA, cache host", "recomputation", "4 bits, cache device", "offload")
MORE = (
    "cache none", "cache host", "cache device", "accumulation, a block skipped", "mixed precision", "step in backward",
    "lossless, cache device", "ZeRO++", "replicas, 4 bits",
)  # fmt: skip


@pytest.mark.parametrize("name", [*POLICIES, *(pytest.param(name, marks=pytest.mark.heavy) for name in MORE)])
def test_each_sum_and_each_gather_runs_beside_compute(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        found = list(moved(ENGINE[name].record(num_blocks=5, is_warm=True, has_values=False).tape))
    assert [str(each) for each in found if each.is_exposed] == []
    beside = [str(each) for each in found if each.products]
    assert len(beside) > sum(each.is_at_an_end for each in found), "five layers: what is at an end is a small part"
    for purpose in ("weights", "gradients"):
        assert any(purpose in each for each in beside)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("cache host", 3),  # the root's, whose gradients come first and end last, and those of two layers
        ("recomputation", 2),  # the sum of the last layer has run beside the recomputation of this one
        ("recomputation, accumulation", 2),
    ],
)
def test_recomputation_leaves_time_to_free_the_last_bucket(name: str, most: int) -> None:
    """The most buckets of full gradients that a device holds at once in a warm run of five layers."""
    tape = ENGINE[name].record(num_blocks=5, is_warm=True, has_values=False).tape
    alive, found = set[int](), 0
    for entry in tape.entries:
        if isinstance(entry, Step) and entry.allocates is not None:
            if "(_allocate)" in tape.memories[entry.allocates].place:
                alive.add(entry.allocates)
        elif isinstance(entry, Free):
            alive.discard(entry.memory)
        found = max(found, len(alive))
    assert found == most
