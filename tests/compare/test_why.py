"""What a person is told of a run that failed."""

from __future__ import annotations

from laconic.compare.runner import why
from laconic.lab.lab import Failure, NodeResult, RunResult


def _run(failure: Failure | None, *outputs: str) -> RunResult:
    nodes = tuple(NodeResult(exit_code=1, sent_bytes=None, received_bytes=None, output=text) for text in outputs)
    return RunResult(nodes=nodes, failure=failure, wall_s=1.0, timed_out=False)


def test_a_rank_killed_by_a_signal_is_shown_with_what_its_node_said_last() -> None:
    failure = Failure(rank=1, node=1, local_rank=0, exit_code=-6, error="killed by SIGABRT")
    assert why(_run(failure, "all is well", "terminate called")) == (
        "rank 1 failed first:\nkilled by SIGABRT\nits last lines are\nterminate called"
    )


def test_a_traceback_says_enough() -> None:
    failure = Failure(rank=0, node=0, local_rank=0, exit_code=1, error="ValueError: no\n")
    assert why(_run(failure, "noise", "noise")) == "rank 0 failed first:\nValueError: no"


def test_what_the_trainer_refused_comes_first() -> None:
    failure = Failure(rank=0, node=0, local_rank=0, exit_code=2, error="SystemExit: 2")
    assert why(_run(failure, "noise\nlaconic train: [model] is missing", "")) == "[model] is missing"


def test_without_a_failing_rank_the_last_lines_tell() -> None:
    assert why(_run(None, "a\nb", "c")) == "its last lines are\na\nb\nc"
