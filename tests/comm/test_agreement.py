"""Small values that every rank learns, and errors that every rank raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from laconic.comm.agreement import RankGroup
from laconic.errors import JobError
from tests.ranks import run_ranks


class OwnError(ValueError):
    """The error class of one group."""


def action(failing: list[int], error: type[Exception] = ValueError) -> int:
    """Return ten times the rank, or raise on the ranks in `failing`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank in failing:
        raise error(f"no {rank}")
    return 10 * rank


def outcome(function: Callable[[], object]) -> object:
    """The result of `function`, or the message of its error."""
    try:
        return function()
    except JobError as error:
        return str(error)


def job_agree(failing: list[int], asked: list[int]) -> object:
    return outcome(lambda: RankGroup().agree(lambda: action(failing), only=dist.get_rank() in asked))


@pytest.mark.parametrize(
    ("failing", "asked", "expected"),
    [
        ([], [0, 1, 2], [0, 10, 20]),
        ([], [1], [None, 10, None]),
        ([1], [0, 1, 2], ["no 1 (on rank 1)"] * 3),
        ([0], [0], ["no 0"] * 3),
        ([0, 1, 2], [0, 1, 2], ["no 0"] * 3),
    ],
)
def test_agree(failing: list[int], asked: list[int], expected: list[object]) -> None:
    assert run_ranks(job_agree, 3, failing, asked) == expected


def job_exchange() -> tuple[object, ...]:
    ranks = RankGroup()
    return ranks.rank, ranks.size, ranks.gather(f"from {ranks.rank}"), ranks.broadcast(f"from {ranks.rank}")


def test_every_rank_learns_the_values_of_all_ranks_or_of_rank_0() -> None:
    everyone = ["from 0", "from 1", "from 2"]
    assert run_ranks(job_exchange, 3) == [(rank, 3, everyone, "from 0") for rank in range(3)]


def job_on_ranks(failing: list[int], error: type[Exception]) -> tuple[object, object]:
    ranks = RankGroup()
    return (
        outcome(lambda: ranks.on_all(lambda: action(failing, error), "cannot save")),
        outcome(lambda: ranks.on_rank_0(lambda: action(failing, error) + 7, "cannot commit")),
    )


@pytest.mark.parametrize(
    ("failing", "on_all", "on_rank_0"),
    [
        ([], [0, 10, 20], 7),
        ([1, 2], "cannot save (rank 1: no 1; rank 2: no 2)", 7),
        ([0], "cannot save (rank 0: no 0)", "cannot commit (rank 0: no 0)"),
    ],
)
@pytest.mark.parametrize("error", [OSError, ValueError])
def test_results_and_reasons_of_all_ranks(
    failing: list[int], error: type[Exception], on_all: object, on_rank_0: object
) -> None:
    assert run_ranks(job_on_ranks, 3, failing, error) == [(on_all, on_rank_0)] * 3


def job_own_error() -> None:
    ranks = RankGroup(error=OwnError)
    for function in (lambda: ranks.agree(lambda: action([1])), lambda: ranks.on_all(lambda: action([1]), "no")):
        with pytest.raises(OwnError, match="no 1"):
            function()


def job_part_of_the_ranks() -> object:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    ranks = RankGroup(group)
    return ranks.rank, ranks.size, ranks.gather(dist.get_rank()), ranks.broadcast(dist.get_rank())


def test_a_group_has_its_own_error_and_its_own_ranks() -> None:
    run_ranks(job_own_error, 2)
    assert run_ranks(job_part_of_the_ranks, 3) == [None, (0, 2, [1, 2], 1), (1, 2, [1, 2], 1)]


def test_one_process_alone_agrees_with_itself() -> None:
    assert not dist.is_initialized()
    ranks = RankGroup()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.gather("value") == ["value"]
    assert ranks.broadcast("value") == "value"
    assert ranks.agree(lambda: 3) == 3
    assert ranks.agree(lambda: 3, only=False) is None
    assert ranks.on_all(lambda: 3, "cannot save") == [3]
    assert ranks.on_rank_0(lambda: 3, "cannot save") == 3
    with pytest.raises(JobError, match=r"^no 0$"):
        ranks.agree(lambda: action([0]))
    with pytest.raises(JobError, match=r"^cannot save \(rank 0: no 0\)$"):
        ranks.on_rank_0(lambda: action([0], OSError), "cannot save")


def test_unforeseen_errors_pass_through() -> None:
    for function in (RankGroup().agree, lambda own: RankGroup().on_all(own, "cannot save")):
        with pytest.raises(RuntimeError, match="no 0"):
            function(lambda: action([0], RuntimeError))


def test_an_error_without_a_message_is_an_error() -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(JobError, match="ValueError"):
        RankGroup().agree(fail)
