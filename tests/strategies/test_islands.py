"""Islands in the trainer: refusals, the slice of each island, syncs and their figures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, ModelConfig
from laconic.islands.recovery import trained_slices
from laconic.models.build import build_model
from laconic.strategies.islands import assign_slices, num_islands
from laconic.strategies.parallelize import parallelize
from laconic.strategies.stepper import Setup
from tests.hf.zoo import TINY, differing
from tests.support.codec_bounds import BOUNDS
from tests.support.jobs import job, metrics, tags, train, train_and_listen
from tests.support.launch import run_ranks

LOCAL: dict[str, Any] = {"mode": "local"}
ALONE = {"mode": "local", "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


def test_an_island_is_made_of_whole_nodes(tmp_path: Path) -> None:
    ranks = RankInfo(rank=0, world_size=12, local_rank=0, num_local=2, num_nodes=6)
    assert num_islands(job(tmp_path).sync, ranks) == 1
    assert num_islands(job(tmp_path, sync=LOCAL).sync, ranks) == 6
    assert num_islands(job(tmp_path, sync={**LOCAL, "islands": 3}).sync, ranks) == 3
    with pytest.raises(JobError, match=r"sync\.islands = 4 does not divide the 6 nodes"):
        num_islands(job(tmp_path, sync={**LOCAL, "islands": 4}).sync, ranks)


@pytest.mark.parametrize(
    ("recovered", "num_slices", "assigned"),
    [
        ([None] * 5, 2, [0, 1, 0, 1, 0]),  # island mod slices
        ([1, None, 0, None], 2, [1, 0, 0, 1]),
        ([2, None], 4, [2, 0]),
        ([0, 0, None], 2, [0, 0, 1]),
        ([0, 0], 2, [0, 1]),  # otherwise no island trains slice 1
        ([1, 1, 1, 1], 4, [1, 3, 2, 0]),
        ([None], 1, [0]),
    ],
)
def test_islands_keep_their_slices_and_new_islands_get_the_rarest(
    recovered: list[int | None], num_slices: int, assigned: list[int]
) -> None:
    assert assign_slices(recovered, num_slices) == assigned


def initial(configs: list[Config]) -> list[dict[str, Tensor]]:
    """Unsliced parameters and buffers before the first step."""
    found = []
    for config in configs:
        model = build_model(config.model)
        parallelize(model, Setup.of(config, RankInfo.from_environment(), torch.device("cpu")))
        found.append({name: value.clone() for name, value in laconic.unsliced_state_dict(model).items()})
    return found


def test_a_sliced_model_begins_as_the_whole_one(tmp_path: Path) -> None:
    """The same values on any number of slices, drawn from a seed or read from a folder."""
    configs = []
    for name in ("llama", "mixtral"):
        drawn: dict[str, Any] = {"config": TINY[name], "init_seed": 3}
        build_model(ModelConfig(**drawn), device="cpu").save_pretrained(tmp_path / name)
        for source in (drawn, {"path": str(tmp_path / name)}):
            configs += [
                job(tmp_path, model={"config": None, **source}, sync={**LOCAL, "slices": slices}) for slices in (1, 2)
            ]
    for found in run_ranks(initial, 2, configs, local=1):
        for first in range(0, len(configs), 4):
            drawn_whole, *others = found[first : first + 4]
            for other in others:
                assert differing(drawn_whole, other) == []


def test_one_island_that_syncs_with_itself_trains_as_without_islands(tmp_path: Path) -> None:
    """A sync after every step, with outer lr 1 and no momentum, only rounds. With LoRA only adapters sync."""
    for lora in ({}, {"enabled": True, "rank": 2}):
        every_step, alone = (
            train(job(tmp_path, sync=sync, lora=lora, train={"output": str(tmp_path / f"{len(lora)}{len(sync)}")}))
            for sync in ({}, ALONE)
        )
        assert alone["losses"] == pytest.approx(every_step["losses"], rel=1e-5)
        assert [sync["step"] for sync in alone["syncs"]] == [1, 2, 3, 4]
        assert all(sync["sent_bytes"] == 0 and sync["cosine"] == pytest.approx(1.0) for sync in alone["syncs"])


@pytest.mark.heavy
def test_syncs_are_logged(tmp_path: Path) -> None:
    """4 nodes: four islands, or two of two nodes. The last exchange, in flight after step 8, is applied too."""
    local = {**LOCAL, "every": 4, "fragments": 2, "overlap": 1, "codec": "int8"}
    settings, log = {"steps": 8, "eval_every": 4}, {"tensorboard": True}
    configs = [
        job(tmp_path, sync=sync, log=log, train={**settings, "output": str(tmp_path / str(number))})
        for number, sync in enumerate(({}, local, {**local, "islands": 2}))
    ]
    (every_step, four, two), printed = run_ranks(train_and_listen, 4, configs, local=1)[0]
    assert "4 islands that sync every 4 steps in int8" in printed
    assert "| synced fragment 0 | drift " in printed
    for islands, summary in ((4, four), (2, two)):
        assert summary["islands"] == islands
        assert summary["tokens_per_step"] == every_step["tokens_per_step"] == 4 * 2 * 16
        assert summary["losses"][0] == pytest.approx(every_step["losses"][0], rel=1e-6)  # the same rows
        assert summary["losses"][-1] < summary["losses"][0] - 0.3
        assert summary["evaluations"][-1]["eval_loss"] < summary["losses"][0] - 0.3
        assert [(sync["step"], sync["fragment"]) for sync in summary["syncs"]] == [(3, 1), (5, 0), (7, 1), (8, 0)]
        for report in summary["syncs"]:
            assert 0 < report["mean_norm"] <= report["drift_norm"] * 1.01
            assert islands**-0.5 * 0.9 < report["cosine"] <= 1.001
            assert 0 < report["codec_error"] <= BOUNDS["int8"]
            assert report["hidden_s"] >= 0 <= report["exposed_s"]
            assert report["bytes_per_token"] == report["sent_bytes"] / (2 * 128)
        # Both fragments, twice: all of the model goes out and comes back, in one byte per parameter and scales.
        sent = sum(report["sent_bytes"] for report in summary["syncs"])
        whole = 2 * 2 * (islands - 1) * summary["num_parameters"]
        assert whole < sent < 1.1 * whole
        counted = sum(sizes.get("island/outer", 0) for sizes in summary["traffic_bytes"])
        assert counted == sent
    assert all(bytes_ == 0 for step, bytes_ in enumerate(four["wire_bytes"], 1) if step in (1, 2))
    assert [sync for row in metrics(tmp_path / "1") for sync in row.get("syncs", [])] == four["syncs"]
    names = set(four["syncs"][0]) - {"step", "fragment"}
    told = {tag for tag in tags(tmp_path / "1" / "tensorboard") if tag.startswith("sync/")}
    assert told == {f"sync/{name}/fragment-{fragment}" for fragment in (0, 1) for name in names}


@pytest.mark.heavy
def test_an_elastic_run_goes_on_with_another_island(tmp_path: Path) -> None:
    """Two islands, each with its slice, agree after step 4 and are killed after step 5; three go on from step 4."""
    machines = str(tmp_path / "machine-$RANK")
    sync = {**LOCAL, "every": 2, "slices": 2, "slice_include": ["mlp"], "recovery": machines}
    settings: dict[str, Any] = {"sync": sync, "optimizer": {"name": "adamw"}}
    run_ranks(train, 2, job(tmp_path, **settings, train={"steps": 5, "resume": "auto"}), local=1)
    (tmp_path / "machine-1").rename(tmp_path / "machine-2")  # it is the last machine now, and a new one takes its place
    summary = run_ranks(train, 3, job(tmp_path, **settings, train={"steps": 8, "resume": "auto"}), local=1)[0]
    assert summary["start_step"] == 4
    assert [report["step"] for report in summary["syncs"]] == [6, 8]
    slices = {machine: held(tmp_path / f"machine-{machine}") for machine in range(3)}
    assert slices == {0: (0,), 1: (0,), 2: (1,)}
    shutil.rmtree(tmp_path / "out")
    again = run_ranks(train, 3, job(tmp_path, **settings, train={"steps": 2, "resume": "auto"}), local=1)[0]
    assert again["start_step"] == 0, "a new run does not go on from what the earlier one has left"


def held(machine: Path) -> tuple[int, ...] | None:
    (run,) = machine.iterdir()
    return trained_slices(machine, run.name.removeprefix("run-"))


def test_a_kill_between_the_last_sync_and_the_last_checkpoint_loses_nothing(tmp_path: Path) -> None:
    """Neither that checkpoint nor the evaluation before it, which stands in the metrics once."""
    sync = {**LOCAL, "every": 2, "recovery": str(tmp_path / "memory")}
    config = job(tmp_path, sync=sync, train={"save_every": 2, "eval_every": 4, "eval_batches": 1, "resume": "auto"})
    before = run_ranks(train, 2, config, local=1)
    metrics = tmp_path / "out" / "metrics.jsonl"
    written = metrics.read_text()
    checkpoints = tmp_path / "out" / "checkpoints"
    shutil.rmtree(checkpoints / "step-4")
    (checkpoints / "latest").write_text("step-2\n")
    after = run_ranks(train, 2, config, local=1)
    assert [summary["start_step"] for summary in after] == [4, 4]
    assert [len(summary["evaluations"]) for summary in after] == [1, 1]
    assert after[0]["evaluations"] == before[0]["evaluations"]
    assert (checkpoints / "step-4" / "manifest.json").exists()
    assert metrics.read_text() == written
