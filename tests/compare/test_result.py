"""Reading the output folder of a run, and the explanation of one that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.compare.case import Case
from laconic.compare.result import Result, read_result
from laconic.compare.runner import explain_failure
from laconic.lab.lab import Failure, NodeResult, RunResult
from tests.support.canned import canned_host

SUMMARY: dict[str, Any] = {
    "num_nodes": 2, "num_local": 3, "loopback_bytes": [900, 60, 62, 60, 62], "num_parameters": 100, "num_trainable": 10,
    "step_s": [9.0, 8.0, 1.0, 3.0, 2.0], "losses": [5.0, 4.0, 3.0, 2.0, 1.0], "wait_s": [1.0, 1.0, 0.1, 0.3, 0.2],
    "wire_bytes": [1000, 200, 200, 200, 200], "interface_sent_bytes": [1100, 204, 206, 204, 206],
    "traffic_bytes": [{"node/weights": 900}, *[{"node/weights": 40, "node/gradients": 160}] * 4],
    "device_peak_bytes": 70, "host_bytes_per_node": 50, "allocated_peak_bytes": None,
    "step_peak_bytes": 300, "resting_bytes": 11,
    "tokens_per_step": 640,
}  # fmt: skip


def read(tmp_path: Path, case: Case, **changes: Any) -> Result:
    (tmp_path / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    return read_result(case, tmp_path, wall_s=12.0)


def test_times_leave_out_the_first_step_and_the_watched_one(tmp_path: Path) -> None:
    result = read(tmp_path, Case(strategy="host", steps=5))
    assert result.step_times_s == (1.0, 3.0, 2.0)
    assert (result.step_s, result.tokens) == (2.0, 640)
    assert result.wait_s == 0.2
    assert result.all_step_times_s == (9.0, 8.0, 1.0, 3.0, 2.0)
    assert result.all_waits_s == (1.0, 1.0, 0.1, 0.3, 0.2)
    assert result.all_wire_bytes == (550, 102, 103, 102, 103)
    islands = read(tmp_path, Case(strategy="local", steps=5), step_s=[9.0, 8.0, 1.0, 1.0, 7.0])
    assert islands.step_s == 3.0, "the mean, since only some steps sync"
    assert read(tmp_path, Case(strategy="host", steps=5, measure_memory=False)).step_times_s == (8.0, 1.0, 3.0, 2.0)


def test_bytes_are_per_node_from_the_second_step_on(tmp_path: Path) -> None:
    result = read(tmp_path, Case(strategy="host", steps=5))
    assert result.wire_bytes == 102.5
    assert result.local_bytes == result.moved_local_bytes == 30.5
    assert (result.num_nodes, result.num_local) == (2, 3)
    assert result.counted_bytes == 100
    assert result.traffic_bytes == {"node/gradients": 80, "node/weights": 20}


def test_without_a_wire_or_a_count_there_are_no_bytes(tmp_path: Path) -> None:
    nothing = {"wire_bytes": [None] * 5, "interface_sent_bytes": [None] * 5, "loopback_bytes": [None] * 5}
    counted = read(
        tmp_path,
        Case(strategy="host", steps=5),
        **nothing | {"wire_bytes": [8] * 5, "traffic_bytes": [{"local/weights": 6, "node/weights": 8}] * 5},
    )
    assert (counted.moved_bytes, counted.moved_local_bytes) == (4, 3)
    nothing["traffic_bytes"] = [{}] * 5
    result = read(tmp_path, Case(strategy="ddp", steps=5), **nothing, wait_s=[None] * 5, host_bytes_per_node=None)
    assert result.wire_bytes is result.counted_bytes is result.wait_s is result.moved_local_bytes is None
    assert result.host_bytes_per_node == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 311),  # the memory between steps, and the watched step's on top
        ({"step_peak_bytes": None, "resting_bytes": None}, None),
        ({"allocated_peak_bytes": 999}, 999),  # a GPU's allocator keeps its own peak
    ],
)
def test_device_memory_is_torchs_figure(tmp_path: Path, changes: dict[str, Any], expected: int | None) -> None:
    assert read(tmp_path, Case(strategy="host", steps=5), **changes).allocated_peak_bytes == expected


def test_results_survive_json_and_other_files_have_fewer_fields_or_more() -> None:
    result = canned_host(all_waits_s=(1.0, None))
    values = json.loads(json.dumps(result.to_dict()))
    assert Result.from_dict(values) == result
    for key in ("all_step_times_s", "all_waits_s", "all_wire_bytes"):
        del values[key]
    assert Result.from_dict({**values, "prediction": {"step_s": 2.0}}) == canned_host()


@pytest.mark.parametrize(
    ("rank", "exit_code", "error", "outputs", "told"),
    [
        (1, -6, "killed by SIGABRT", ("all is well", "terminate called"),
         "rank 1 failed first:\nkilled by SIGABRT\nits last lines are\nterminate called"),
        (0, 1, "ValueError: no\n", ("noise", "noise"), "rank 0 failed first:\nValueError: no"),
        (0, 2, "SystemExit: 2", ("noise\nlaconic train: [model] is missing", ""), "[model] is missing"),
        (None, 1, "", ("a\nb", "c"), "its last lines are\na\nb\nc"),
    ],
)  # fmt: skip
def test_the_explanation_of_a_failed_run(
    rank: int | None, exit_code: int, error: str, outputs: tuple[str, ...], told: str
) -> None:
    failure = None if rank is None else Failure(rank=rank, node=rank, local_rank=0, exit_code=exit_code, error=error)
    nodes = tuple(NodeResult(exit_code=1, sent_bytes=None, received_bytes=None, output=text) for text in outputs)
    assert explain_failure(RunResult(nodes=nodes, failure=failure, wall_s=1.0, timed_out=False)) == told
