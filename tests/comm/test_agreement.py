"""Small values that every rank learns, and errors that every rank raises."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


CALLS: dict[str, Callable[[RankGroup, Callable[[], int]], object]] = {
    "all agree": lambda own, act: own.agree(act),
    "rank 1 is asked": lambda own, act: own.agree(act, only=own.rank == 1),
    "rank 0 is asked": lambda own, act: own.agree(act, only=own.rank == 0),
    "all say yes": lambda own, act: own.agree_and_ask(act, lambda value: True),
    "rank 1 says no": lambda own, act: own.agree_and_ask(act, lambda value: value != 10),
    "on all": lambda own, act: own.on_all(act, "cannot save"),
    "on rank 0": lambda own, act: own.on_rank_0(lambda: act() + 7, "cannot commit"),
}


@pytest.mark.parametrize(
    ("call", "failing", "expected"),
    [
        ("all agree", [], [0, 10, 20]),
        ("all agree", [1], ["no 1 (on rank 1)"] * 3),
        ("all agree", [0, 1, 2], ["no 0"] * 3),
        ("rank 1 is asked", [], [None, 10, None]),
        ("rank 0 is asked", [0], ["no 0"] * 3),
        ("all say yes", [], [(0, True), (10, True), (20, True)]),
        ("rank 1 says no", [], [(0, False), (10, False), (20, False)]),
        ("rank 1 says no", [2], ["no 2 (on rank 2)"] * 3),
        ("on all", [], [[0, 10, 20]] * 3),
        ("on all", [1, 2], ["cannot save (rank 1: no 1; rank 2: no 2)"] * 3),
        ("on rank 0", [1, 2], [7] * 3),
        ("on rank 0", [0], ["cannot commit (rank 0: no 0)"] * 3),
    ],
)
@pytest.mark.parametrize("error", [OSError, ValueError])
@on_ranks(3)
def test_results_and_reasons_of_all_ranks(
    call: str, failing: list[int], expected: list[object], error: type[Exception]
) -> None:
    if error is ValueError or call.startswith("on"):
        found = outcome(lambda: CALLS[call](RankGroup(), lambda: action(failing, error)))
        assert found == expected[dist.get_rank()]


@on_ranks(3)
def test_a_group_has_its_own_error_and_its_own_ranks() -> None:
    everyone, rank = RankGroup(error=OwnError), dist.get_rank()
    assert (everyone.rank, everyone.size, everyone.gather(rank), everyone.broadcast(rank)) == (rank, 3, [0, 1, 2], 0)
    for function in (lambda: everyone.agree(lambda: action([1])), lambda: everyone.on_all(lambda: action([1]), "no")):
        with pytest.raises(OwnError, match="no 1"):
            function()
    group = dist.new_group([1, 2])
    if rank:
        some = RankGroup(group)
        assert (some.rank, some.size, some.gather(rank), some.broadcast(rank)) == (rank - 1, 2, [1, 2], 1)


def test_one_process_alone_agrees_with_itself() -> None:
    assert not dist.is_initialized()
    ranks = RankGroup()
    assert (ranks.rank, ranks.size, ranks.gather("value"), ranks.broadcast("value")) == (0, 1, ["value"], "value")
    assert (ranks.agree(lambda: 3), ranks.agree(lambda: 3, only=False)) == (3, None)
    assert (ranks.on_all(lambda: 3, "cannot save"), ranks.on_rank_0(lambda: 3, "cannot save")) == ([3], 3)
    assert outcome(lambda: ranks.agree(lambda: action([0]))) == "no 0"
    assert outcome(lambda: ranks.on_rank_0(lambda: action([0], OSError), "no")) == "no (rank 0: no 0)"
    # unforeseen errors pass through, and one without a message is an error
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
    ranks, mine = RankGroup(), ["mine"]
    for shift in range(len(VALUES)):
        sent = [VALUES[(shift + rank) % len(VALUES)] for rank in range(ranks.size)]
        assert ranks.gather(sent[ranks.rank]) == sent
        assert ranks.broadcast(sent[ranks.rank]) == sent[0]
    assert all(map(math.isnan, ranks.gather(float("nan"))))
    assert all(value is not mine for value in ranks.gather(mine))


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
    send = agreement.start_to_all

    def counting(group: Any, ticket: Any, arriving: Any, rows: Any) -> Any:
        sent.append(rows.shape[1])
        return send(group, ticket, arriving, rows)

    monkeypatch.setattr(agreement, "start_to_all", counting)
    run_ranks(job_gather_short_and_long, 2)
    assert sorted(sent) == 2 * [12 + 102 - 64] + 4 * [64]


def job_gather_short_and_long() -> None:
    RankGroup().gather([True, ""])
    RankGroup().gather("x" * 100 * dist.get_rank())
