"""The explanation of a failed run."""

from __future__ import annotations

import pytest

from laconic.compare.runner import explain_failure
from laconic.lab.lab import Failure, NodeResult, RunResult

pytestmark = pytest.mark.machine


def _run(failure: Failure | None, *outputs: str) -> RunResult:
    nodes = tuple(NodeResult(exit_code=1, sent_bytes=None, received_bytes=None, output=text) for text in outputs)
    return RunResult(nodes=nodes, failure=failure, wall_s=1.0, timed_out=False)


def test_a_rank_killed_by_a_signal_is_shown_with_the_last_lines_of_its_node() -> None:
    failure = Failure(rank=1, node=1, local_rank=0, exit_code=-6, error="killed by SIGABRT")
    assert explain_failure(_run(failure, "all is well", "terminate called")) == (
        "rank 1 failed first:\nkilled by SIGABRT\nits last lines are\nterminate called"
    )


def test_a_traceback_says_enough() -> None:
    failure = Failure(rank=0, node=0, local_rank=0, exit_code=1, error="ValueError: no\n")
    assert explain_failure(_run(failure, "noise", "noise")) == "rank 0 failed first:\nValueError: no"


def test_the_refusal_of_the_trainer_comes_first() -> None:
    failure = Failure(rank=0, node=0, local_rank=0, exit_code=2, error="SystemExit: 2")
    assert explain_failure(_run(failure, "noise\nlaconic train: [model] is missing", "")) == "[model] is missing"


def test_without_a_failing_rank_the_last_lines_are_shown() -> None:
    assert explain_failure(_run(None, "a\nb", "c")) == "its last lines are\na\nb\nc"
