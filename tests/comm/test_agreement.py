"""Small values that every rank learns, and errors that every rank raises."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laconic import _compat
from laconic.comm import agreement
from laconic.comm.agreement import RankGroup
from laconic.errors import JobError
from tests.support.launch import on_ranks, run_ranks


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


def job_agree_and_ask(failing: list[int], saying_no: list[int]) -> object:
    return outcome(lambda: RankGroup().agree_and_ask(lambda: action(failing), lambda own: own // 10 not in saying_no))


@pytest.mark.parametrize(
    ("failing", "saying_no", "expected"),
    [
        ([], [], [(0, True), (10, True), (20, True)]),
        ([], [1], [(0, False), (10, False), (20, False)]),
        ([2], [1], ["no 2 (on rank 2)"] * 3),
    ],
)
def test_agree_and_ask(failing: list[int], saying_no: list[int], expected: list[object]) -> None:
    assert run_ranks(job_agree_and_ask, 3, failing, saying_no) == expected


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


def test_unforeseen_errors_pass_through_and_one_without_a_message_is_an_error() -> None:
    for function in (RankGroup().agree, lambda own: RankGroup().on_all(own, "cannot save")):
        with pytest.raises(RuntimeError, match="no 0"):
            function(lambda: action([0], RuntimeError))

    def fail() -> None:
        raise ValueError

    with pytest.raises(JobError, match="ValueError"):
        RankGroup().agree(fail)


VALUES = [
    None, True, -(2**70), 0.1, "", "\udcff \u00e9", "x" * 52, "x" * 51, "x" * 50, "x" * 49, "y" * 70_000,
    [], {}, [float("inf"), -float("inf"), [1.5, {"a": [None]}]], {"": {"b": False}},
]  # fmt: skip


@on_ranks(3)
def test_values_of_every_kind_and_length_arrive() -> None:
    """Every rank sends another value of the list in each round: short and long ones meet."""
    ranks, found = RankGroup(), []
    for shift in range(len(VALUES)):
        sent = [VALUES[(shift + rank) % len(VALUES)] for rank in range(ranks.size)]
        found.append(ranks.gather(sent[ranks.rank]) == sent)
        found.append(ranks.broadcast(sent[ranks.rank]) == sent[0])
    found.append([math.isnan(number) for number in ranks.gather(float("nan"))] == [True] * 3)
    mine = ["mine"]
    found.append(all(value is not mine for value in ranks.gather(mine)))
    assert all(found), found


class Named(str):
    """A text of a class of its own."""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ((1, 2), r"the value is a tuple: \(1, 2\); convert"),
        ({"a": [1, {2}]}, r"the value\['a'\]\[1\] is a set: \{2\}"),
        ([{1: "one"}], r"the value\[0\] has the key 1"),
        (torch.zeros(1), r"the value is a Tensor"),
        (b"bytes", r"the value is a bytes"),
        (Named("a"), r"the value is a Named: 'a'"),
        (Path("a"), r"the value is a PosixPath"),
    ],
)
def test_other_values_are_refused(value: object, problem: str) -> None:
    ranks = RankGroup()
    with pytest.raises(TypeError, match=rf"^RankGroup.gather sends JSON.*{problem}"):
        ranks.gather(value)
    with pytest.raises(TypeError, match=rf"^RankGroup.broadcast sends JSON.*{problem}"):
        ranks.broadcast(value)
    with pytest.raises(TypeError, match="is a"):
        ranks.on_rank_0(lambda: {"result": object()}, "no")


@pytest.mark.parametrize(("place", "text"), [(None, ""), (3, "short"), (14, "short"), (90, "l" + 100 * "o" + "ng")])
def test_bytes_that_are_no_value_are_named(monkeypatch: pytest.MonkeyPatch, place: int | None, text: str) -> None:
    """Rank 1 sends what is no message: another collective, a damaged header, damaged text, a damaged rest."""
    encode = agreement._encoded

    def damaged(value: object, call: str) -> bytes:
        message = bytearray(encode(value, call))
        if dist.get_rank() == 0:
            return bytes(message)
        if place is None:
            return b"\1" * 64
        message[place] ^= 4
        return bytes(message)

    monkeypatch.setattr(agreement, "_encoded", damaged)
    for problem in run_ranks(job_gather_damaged, 2, text):
        assert re.match(r"rank 1 of the group sent (64|117) bytes that are no value: [0-9a-f ]+ \.\.\.", problem)
        assert "all ranks must make the same calls" in problem


def job_gather_damaged(text: str) -> str:
    with pytest.raises(RuntimeError) as info:
        RankGroup().gather(text)
    return str(info.value)


def test_short_values_take_one_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer one takes a second trip with the rest of the longest: 12 bytes of header and 102 of JSON in all."""
    sent: list[int] = []
    gather = _compat.all_gather_flat
    monkeypatch.setattr(
        _compat, "all_gather_flat", lambda output, own, **more: sent.append(len(own)) or gather(output, own, **more)
    )
    run_ranks(job_gather_short_and_long, 2)
    assert sorted(sent) == 2 * [12 + 102 - 64] + 4 * [64]


def job_gather_short_and_long() -> None:
    RankGroup().gather([True, ""])
    RankGroup().gather("x" * 100 * dist.get_rank())
