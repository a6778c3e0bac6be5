"""The promises of every optimizer in tests/optim/family.py, on 1, 2, 3, 4 and 6 ranks."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.optim import family
from tests.optim.family import MEMBERS, Outcome
from tests.support.launch import run_ranks

WORLDS = {4: 2, 1: 1, 6: 3, 2: 2, 3: 1}
"""Ranks, and ranks per node. Each world loads the checkpoint of the world before it in this order."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Outcome | str]]:
    """By number of ranks and member. One launch per number of ranks, because processes start slowly."""
    folder: Path = tmp_path_factory.mktemp("family")
    found = {4: run_ranks(family.try_all, 4, str(folder), None, local=2)[0]}
    for previous, world in pairwise(WORLDS):
        found[world] = run_ranks(family.try_all, world, str(folder), previous, local=WORLDS[world])[0]
    return found


@cache
def alone(name: str) -> dict[str, Tensor]:
    return family.alone(name)


def of(outcomes: dict[int, dict[str, Outcome | str]], world: int, name: str) -> Outcome:
    outcome = outcomes[world][name]
    assert isinstance(outcome, Outcome), outcome
    return outcome


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


parametrized = pytest.mark.parametrize("name", sorted(MEMBERS))


@parametrized
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_equals_one_process(outcomes: dict[int, dict[str, Outcome | str]], world: int, name: str) -> None:
    """Parameters and states after steps with two groups, a schedule, and parameters without gradient."""
    assert_same(name, of(outcomes, world, name).unbroken, alone(name), MEMBERS[name].rtol)


@parametrized
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_state_dicts_carry_everything(outcomes: dict[int, dict[str, Outcome | str]], world: int, name: str) -> None:
    """To the bit: `load_state_dict(state_dict())` into a new optimizer."""
    outcome = of(outcomes, world, name)
    assert_same(name, outcome.through_state_dict, outcome.unbroken)


@parametrized
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_resumes_to_the_same_bits(outcomes: dict[int, dict[str, Outcome | str]], world: int, name: str) -> None:
    outcome = of(outcomes, world, name)
    assert_same(name, outcome.resumed, outcome.unbroken)


@parametrized
@pytest.mark.parametrize(("saved_by", "world"), list(pairwise(WORLDS)))
def test_resumes_on_another_number_of_ranks(
    outcomes: dict[int, dict[str, Outcome | str]], saved_by: int, world: int, name: str
) -> None:
    resharded = of(outcomes, world, name).resharded
    assert resharded is not None
    assert_same(name, resharded, alone(name), MEMBERS[name].rtol)


@parametrized
def test_some_ranks_held_nothing(outcomes: dict[int, dict[str, Outcome | str]], name: str) -> None:
    """The suite covers ranks that hold nothing."""
    assert of(outcomes, 1, name).empty_parts == 0
    assert of(outcomes, 6, name).empty_parts > 6
