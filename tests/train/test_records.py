"""Records combined over ranks, and the loggers."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from laconic.comm.launch import RankInfo
from laconic.strategies.stepper import StepResult
from laconic.train.loggers import JsonlLogger, LineLogger, TensorBoardLogger, describe_step
from laconic.train.records import KINDS, ClusterStep, StepRecord, reduce_records
from tests.support.jobs import events_of, metrics
from tests.support.launch import run_ranks


def record(step: int, rank: int, *, counted: bool) -> StepRecord:
    sums: dict[str, Any] = dict.fromkeys(KINDS, 0) | {"node/weights": 10 + rank, "local/weights": 5, "wait_s": 0.25}
    sums |= {"host_bytes": 6, "interface_sent_bytes": None, "loopback_bytes": None}
    peaks: dict[str, Any] = {"device_bytes": step, "device_peak_bytes": 10 * step + rank}
    peaks |= {"allocated_peak_bytes": 100 * step + rank}
    if rank % 2 == 0:
        sums |= {"interface_sent_bytes": 100, "loopback_bytes": 30}
    if not counted:
        sums, peaks = dict.fromkeys(sums), dict.fromkeys(peaks)
    peaks["resident_bytes"] = 1000 * step - rank
    result, seconds = StepResult(loss=1.0 + rank, grad_norm=0.5), {"data_s": 0.0, "measured_s": lambda: 2.0}
    return StepRecord(step=step, lr=0.1, result=result, sums=sums, peaks=peaks, **seconds)  # type: ignore[arg-type]


def reduced(counted: bool) -> list[ClusterStep]:
    rank = dist.get_rank()
    ranks = RankInfo(rank=rank, world_size=4, local_rank=rank % 2, num_local=2, num_nodes=2)
    group = dist.group.WORLD
    assert group is not None
    return reduce_records(
        [record(step, rank, counted=counted) for step in (3, 4)], ranks, group, tokens_after=lambda steps: 8 * steps
    )


def test_records_of_all_ranks_make_one_step() -> None:
    results = run_ranks(reduced, 4, True, local=2)
    first, second = results[0]
    assert all(result[0].loss == 2.5 for result in results)
    assert (first.step, second.step, second.tokens, first.tokens_per_s) == (3, 4, 32, 4.0)
    assert first.wire_bytes == 10 + 11 + 12 + 13
    assert first.traffic_bytes == {"node/weights": 46, "local/weights": 20}
    assert first.wait_s == 0.25
    assert (first.interface_sent_bytes, first.loopback_bytes) == (200, 60)
    assert (first.device_bytes, first.device_peak_bytes, first.host_bytes_per_node) == (3, 33, 12)
    assert (second.device_bytes, second.device_peak_bytes) == (4, 43), "each step has its own"
    assert [(step.allocated_peak_bytes, step.resident_bytes) for step in (first, second)] == [(303, 3000), (403, 4000)]


def test_what_nobody_counts_is_absent() -> None:
    step = run_ranks(reduced, 4, False, local=2)[0][0]
    absent = {"wire_bytes", "wait_s", "traffic_bytes", "interface_sent_bytes", "device_bytes", "allocated_peak_bytes"}
    assert not absent & set(step.to_dict())
    assert step.loss == 2.5


def step_at(number: int) -> ClusterStep:
    figures: dict[str, Any] = {"grad_norm": 0.5, "lr": 0.1, "step_s": 2.0, "data_s": 0.0, "tokens_per_s": 4.0}
    figures |= {"wait_s": 0.25, "wire_bytes": 3_000_000, "traffic_bytes": {"node/weights": 3_000_000}}
    return ClusterStep(step=number, tokens=8 * number, loss=1.0 / number, device_bytes=5, **figures)


def test_jsonl_continues_where_the_run_does(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path, after_step=0)
    for number in (1, 2, 3):
        logger.step(step_at(number))
    logger.evaluation(2, {"eval_loss": 0.5})
    logger.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    resumed = JsonlLogger(path, after_step=2)
    resumed.step(step_at(3))
    resumed.close()
    rows = metrics(tmp_path)
    assert [(row["step"], row.get("loss")) for row in rows] == [(1, 1.0), (2, 0.5), (2, None), (3, 1.0 / 3)]
    assert rows[0]["traffic_bytes"] == {"node/weights": 3_000_000}


def test_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, after_step=0)
    logger.step(step_at(1))
    logger.step(step_at(2))
    logger.evaluation(2, {"eval_loss": 0.5})
    logger.close()
    events = events_of(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    groups = {
        "train": ("loss", "perplexity", "grad_norm", "lr", "tokens"),
        "speed": ("step_s", "data_s", "tokens_per_s"),
        "wire": ("wait_s", "wire_bytes"),
        "traffic_bytes": ("node/weights",),
        "memory": ("device_bytes", "resident_bytes"),
        "eval": ("eval_loss",),
    }
    assert set(events.Tags()["scalars"]) == {f"{group}/{name}" for group, names in groups.items() for name in names}


def test_plain_lines() -> None:
    stream = io.StringIO()
    logger = LineLogger(Console(file=stream, width=40), total=12, every=5)
    for number in range(1, 13):
        time.sleep(20)
        logger.step(step_at(number))
    logger.evaluation(12, {"eval_loss": 0.5})
    lines = stream.getvalue().splitlines()
    assert [line.split(" |")[0] for line in lines] == [f"step {step:2}/12" for step in (1, 5, 10, 12, 12)]
    assert "loss 0.2000 | perplexity 1.221 | grad norm 0.500" in lines[1]
    assert "for data" not in lines[1]
    rich = replace(step_at(5), data_s=0.1, device_peak_bytes=3 * 10**9, loss_scale=1024.0, skipped_steps=2)
    told = describe_step(rich, 5)
    assert "waited 0.100 s for data | device 3.00 GB, host 0.00 GB" in told
    assert "loss scale 1024, 2 skipped" in told
    assert "wire 3.00 MB | waited 0.250 s" in lines[1]
    assert [line.rpartition(" | ")[2] for line in lines[:-1]] == [
        "8%, 0:00:20 elapsed", "42%, 0:01:40 elapsed, 0:02:20 left", "83%, 0:03:20 elapsed, 0:00:40 left",
        "100%, 0:04:00 elapsed, 0:00:00 left",
    ]  # fmt: skip
    assert lines[-1].endswith("eval loss 0.5000")
