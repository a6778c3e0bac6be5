"""A share of the random module trees; `python -m tests.faults --rows module-trees` tries thousands."""

from __future__ import annotations

import pytest

from tests.shard.random_trees.case import Case, Forward, Micro, Node, Step, Unit
from tests.shard.random_trees.compare import differences
from tests.shard.random_trees.play import play_oracle
from tests.shard.random_trees.pool import check, explore


@pytest.mark.parametrize(
    ("world", "num_cases"),
    [
        (1, 30),
        pytest.param(2, 24, marks=pytest.mark.campaign),
        (3, 14),
        pytest.param(4, 14, marks=pytest.mark.campaign),
    ],
)
def test_sharded_trees_equal_unsharded_ones(world: int, num_cases: int) -> None:
    assert check(_without_rows(world)).kind == "equal"
    kinds = explore(world, num_cases, world, ("differs", "foreign", "refused"))
    assert kinds["equal"] >= num_cases // 2


def _without_rows(world: int) -> Case:
    """Rank 0 has an input without rows: torch then has no second derivative, and no zero in its place."""
    root = Node("chain", (Node("conv"), Node("mlp", unit=Unit())))
    forward = Forward(rows=0, needs_grad=True)
    return Case(world, root, (Step(micros=(Micro("penalty_only", (forward,)),)),))


def test_a_wrong_value_is_found() -> None:
    root = Node("residual", (Node("mlp", unit=Unit()), Node("norm")), unit=Unit())
    case = Case(2, root, (Step(micros=(Micro("together", (Forward(needs_grad=True),)),)),))
    wanted, found = play_oracle(case), play_oracle(case)
    assert not list(differences(case, found, wanted))
    place = next(index for index, entry in enumerate(wanted[1]) if "weight.grad" in entry.label)
    found[1][place].value = found[1][place].value * (1 + 1e-7)
    assert list(differences(case, found, wanted))
    found[1][place].value = None
    (difference,) = differences(case, found, wanted)
    assert "None, not a value" in difference
