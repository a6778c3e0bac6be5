"""The promises of every optimizer in tests/optim/family.py, on 1, 2, 3, 4 and 6 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim import family
from tests.optim.family import MEMBERS, Outcome
from tests.support.launch import run_ranks

WORLDS = {3: 1, 1: 1, 2: 2, 6: 3, 4: 2}
"""Ranks, and ranks per node. Each world loads the checkpoint of the world before it in this order."""
FEW = (3, 1, 2)
"""The worlds of `make test`; the others are campaigns."""

pytestmark = pytest.mark.timeout(600)


class Outcomes:
    """By number of ranks and member. One launch per number of ranks, because processes start slowly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, dict[str, Outcome | str]] = {}

    def of(self, world: int, name: str) -> Outcome:
        if world not in self._found:
            before = list(WORLDS)[: list(WORLDS).index(world)]
            previous = before[-1] if before else None
            if previous is not None:
                self.of(previous, name)  # its checkpoint
            self._found[world] = run_ranks(
                family.try_all, world, str(self._folder), previous, local=WORLDS[world], timeout_s=200
            )[0]
        outcome = self._found[world][name]
        assert isinstance(outcome, Outcome), outcome
        return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("family"))


@cache
def alone(name: str) -> dict[str, Tensor]:
    return family.alone(name)


def assert_same(name: str, got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 0.0) -> None:
    assert got.keys() == want.keys(), name
    for key, expected in want.items():
        assert (got[key].shape, got[key].dtype) == (expected.shape, expected.dtype), f"{name}: {key}"
        if rtol == 0:
            assert torch.equal(got[key], expected), f"{name}: {key} differs"
        else:
            atol = rtol * float(expected.abs().max())
            torch.testing.assert_close(
                got[key], expected, rtol=0, atol=atol, msg=lambda text, key=key: f"{name}: {key}: {text}"
            )


def marked(cases: Sequence[tuple[int, ...]]) -> list[Any]:
    """The cases, which are of one world or of two; as campaigns those that need another than the few."""
    heavy = pytest.mark.campaign
    return [pytest.param(*case, marks=() if set(FEW).issuperset(case) else heavy) for case in cases]


parametrized = pytest.mark.parametrize("name", sorted(MEMBERS))


@pytest.mark.heavy
@parametrized
@pytest.mark.parametrize("world", marked([(world,) for world in WORLDS]))
def test_equals_one_process(outcomes: Outcomes, world: int, name: str) -> None:
    """Parameters and states after steps with two groups, a schedule, and parameters without gradient."""
    assert_same(name, outcomes.of(world, name).unbroken, alone(name), MEMBERS[name].rtol)


@parametrized
@pytest.mark.parametrize("world", marked([(world,) for world in WORLDS]))
def test_state_dicts_carry_everything(outcomes: Outcomes, world: int, name: str) -> None:
    """To the bit: `load_state_dict(state_dict())` into a new optimizer."""
    outcome = outcomes.of(world, name)
    assert_same(name, outcome.through_state_dict, outcome.unbroken)


@parametrized
@pytest.mark.parametrize("world", marked([(world,) for world in WORLDS]))
def test_resumes_to_the_same_bits(outcomes: Outcomes, world: int, name: str) -> None:
    outcome = outcomes.of(world, name)
    assert_same(name, outcome.resumed, outcome.unbroken)


@parametrized
@pytest.mark.parametrize(("saved_by", "world"), marked(list(pairwise(WORLDS))))
def test_resumes_on_another_number_of_ranks(outcomes: Outcomes, saved_by: int, world: int, name: str) -> None:
    resharded = outcomes.of(world, name).resharded
    assert resharded is not None
    assert_same(name, resharded, alone(name), MEMBERS[name].rtol)


@parametrized
@pytest.mark.parametrize("world", marked([(3,), (6,)]))
def test_some_ranks_held_nothing(outcomes: Outcomes, world: int, name: str) -> None:
    """The suite covers ranks that hold nothing."""
    assert outcomes.of(1, name).empty_parts == 0
    assert outcomes.of(world, name).empty_parts > 6
