"""No transfer is exposed while compute has work: each runs beside a product that no event orders before or after it."""

from __future__ import annotations

import warnings

import pytest

from tests.rehearse.engine import ENGINE
from tests.rehearse.exposure import moved
from tests.support.launch import launch

pytestmark = pytest.mark.machine

POLICIES = (
    "cache none", "cache host", "cache device", "one rank per node", "LoRA, cache host", "accumulation",
    "accumulation, a block skipped", "recomputation", "mixed precision", "step in backward", "4 bits, cache device",
    "lossless, cache device", "lossless, cache host, evaluation", "ZeRO++", "replicas", "replicas, 4 bits", "offload",
)  # fmt: skip


def _exposed(name: str) -> list[list[str]]:
    """What runs beside a product in a warm run of a program, what may not, and what is exposed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        found = list(moved(ENGINE[name].record(num_blocks=5, is_warm=True).tape))
    return [
        [str(each) for each in found if each.products],
        [str(each) for each in found if each.is_at_an_end],
        [str(each) for each in found if each.is_exposed],
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_each_sum_and_each_gather_runs_beside_compute(name: str) -> None:
    beside, at_an_end, exposed = launch(_exposed, name, num_ranks=1, timeout_s=110, backend=None)[0]
    assert exposed == []
    assert len(beside) > len(at_an_end), "five layers: what is at an end is a small part"
    for purpose in ("weights", "gradients"):
        assert any(purpose in each for each in beside)
