"""Pipelines that are rehearsed and played together: bubbles, waits, memory and bytes against formulas and real runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from laconic.config import Config, ConfigError, from_dict
from laconic.plan import pipelined
from laconic.plan.candidates import CANDIDATES, candidate_named
from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane, Reading, Simulator
from laconic.plan.meeting import play_together
from laconic.plan.pictures import _lines, draw_timelines
from laconic.plan.pipelined import PipelinedStep
from laconic.plan.prediction import Predictor, Refusal
from laconic.plan.rehearsed import StepWork
from laconic.rehearse import DeadlockError
from laconic.rehearse.rings import Places
from tests.plan.traces import FLOPS_PER_S, HIDDEN, MODEL, cluster, job
from tests.support.jobs import corpus, table, train_all
from tests.support.launch import run_ranks

TOKENS = 32
HIDDEN_BYTES = TOKENS * HIDDEN * 4
"""Of the hidden states of a micro-batch of one row."""
FREE: dict[str, Any] = {"wire_bits_per_s": 1e15, "local_bytes_per_s": 1e15, "device_memory_bytes_per_s": 1e15}
"""Products alone take time."""
RATES = {"device_flops_per_s": {"float32": FLOPS_PER_S, "bfloat16": FLOPS_PER_S}}


@cache
def predictor(layers: int) -> Predictor:
    """Of a model whose embedding and head are small beside its layers; its traces and rehearsals are kept."""
    model = {**MODEL, "num_hidden_layers": layers, "vocab_size": 8}
    return Predictor(job(model, tokens=TOKENS), cluster(2, 1), device_type="cpu")


def program(
    places: int, micro_batches: int, *, layers: int = 4, local: int = 1, device: str = "cpu", tied: bool = False,
    figures: dict[str, Any] | None = None, keeps_spans: bool = False, cut: Any = "cost", **keys: Any,
) -> PipelinedStep:  # fmt: skip
    """The program of a pipeline over nodes whose ranks have `micro_batches` of one row together."""
    base = predictor(layers)
    assert micro_batches % places == 0
    config = replace(base.config, train=replace(base.config.train, accumulation=micro_batches // places))
    config = replace(config, pipeline=replace(config.pipeline, stages=places, cut=cut, **keys))
    on = cluster(places, local, **RATES, **(FREE if figures is None else figures))
    work = StepWork(
        job=config,
        trace=base.on(on)._trace(config),
        rehearsals=base._rehearsals,
        places=Places(nodes=places, local=local),
    )
    return PipelinedStep(on, replace(work, trace=replace(work.trace, device_type=device)), keeps_spans=keeps_spans)


def read(*given: Any, **keys: Any) -> Reading:
    return program(*given, **keys).read()


def compute_s(layers: int, micro_batches: int) -> float:
    """The seconds of all phases on one device."""
    machine = Simulator(cluster(2, 1, **RATES, **FREE))
    trace = predictor(layers)._trace(predictor(layers).config)
    return micro_batches * sum(machine.seconds(phase) for phase in trace.phases)


# -- seconds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "micro_batches", "schedule"),
    [pytest.param(2, 6, "GPipe", marks=pytest.mark.heavy), (2, 6, "1F1B"), (4, 8, "1F1B")],
)
def test_the_bubble_of_equal_stages_is_that_of_the_formula(places: int, micro_batches: int, schedule: str) -> None:
    """(M + S - 1) / M of the compute (GPipe, arXiv 1811.06965), which nobody has told the plan."""
    reading = read(places, micro_batches, schedule=schedule, cut=[3, 3] if places == 2 else [2, 1, 1, 2])
    alone_s = compute_s(4, micro_batches) / places
    assert reading.seconds == pytest.approx((micro_batches + places - 1) / micro_batches * alone_s, rel=0.01)


def test_a_step_waits_for_a_slow_wire_and_both_directions_are_one_time() -> None:
    """The 1F1B of torch asks for a message when it needs it. Both places send at once: a micro-batch waits for one."""
    one_s = HIDDEN_BYTES / 1e7
    slow, free = read(2, 8, figures={**FREE, "wire_bits_per_s": 8e7}), read(2, 8)
    assert slow.seconds - free.seconds == pytest.approx(8 * one_s, rel=0.25)
    assert slow.waits_s[PlanLane.WIRE] == pytest.approx(8 * one_s, rel=0.3)
    assert slow.busy_s[PlanLane.WIRE] == pytest.approx(8 * one_s, rel=1e-3)
    assert free.waits_s[PlanLane.WIRE] < 0.01 * free.seconds


def test_messages_travel_beside_compute_where_another_micro_batch_is_under_way() -> None:
    """[Note: Eager 1F1B]: with a wire that works for a fifth of the time of compute, little of it is left in a step."""
    rate = 8 * HIDDEN_BYTES / (0.2 * compute_s(4, 1) / 2)
    figures = {**FREE, "wire_bits_per_s": rate}
    plain, eager = (read(2, 8, schedule=schedule, figures=figures) for schedule in ("1F1B", "Eager1F1B"))
    free = read(2, 8)
    assert plain.seconds > 1.12 * free.seconds
    assert eager.seconds < 1.06 * free.seconds
    assert eager.sent_bytes == plain.sent_bytes
    assert plain.peak_bytes < eager.peak_bytes


@pytest.mark.heavy
@pytest.mark.parametrize("schedule", ["1F1B", "Eager1F1B", "Interleaved1F1B"])
def test_a_few_micro_batches_stand_for_all(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {**FREE, "wire_bits_per_s": 8e7}
    few = read(2, 12, schedule=schedule, figures=figures)
    monkeypatch.setattr(pipelined, "_ROUNDS", 6)
    whole = read(2, 12, schedule=schedule, figures=figures)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert few.sent_bytes == pytest.approx(whole.sent_bytes)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


@pytest.mark.heavy
def test_a_picture_has_a_line_for_the_compute_of_each_place_and_for_what_its_node_sends(tmp_path: Path) -> None:
    base = predictor(4)
    config = replace(base.config, pipeline=replace(base.config.pipeline, stages=2, micro_batches=2))
    found = base.estimate(CANDIDATES["pipeline"], job=config, keeps_spans=True)
    assert isinstance(found, Estimate)
    lines = _lines(found)
    assert lines == [(place, lane) for place in range(2) for lane in (PlanLane.COMPUTE, PlanLane.WIRE)]
    work_s = [
        sum(span.end_s - span.begin_s for span in found.spans if (span.place, span.lane) == line and not span.is_wait)
        for line in lines
    ]
    assert min(work_s) > 0
    assert max(work_s[::2]) == pytest.approx(found.busy_s[PlanLane.COMPUTE])
    draw_timelines([found], tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 1000


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_the_first_stage_keeps_as_many_micro_batches_as_its_schedule_lets_it() -> None:
    """Under 1F1B as many as there are stages, under GPipe all."""
    kept = {
        (places, count, schedule): read(places, count, layers=layers, schedule=schedule).peak["activations"]
        for places, count, layers, schedule in (
            (2, 4, 4, "1F1B"), (2, 6, 4, "1F1B"), (4, 8, 8, "1F1B"), (2, 4, 4, "GPipe"), (2, 6, 4, "GPipe"),
        )
    }  # fmt: skip
    one = kept[2, 6, "GPipe"] - kept[2, 4, "GPipe"]  # of two micro-batches
    assert kept[2, 6, "1F1B"] == pytest.approx(kept[2, 4, "1F1B"], rel=0.01)
    assert kept[4, 8, "1F1B"] - kept[2, 4, "1F1B"] == pytest.approx(one, rel=0.1)
    assert kept[2, 4, "GPipe"] > 1.5 * kept[2, 4, "1F1B"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_neither_activations_nor_messages_stay(device: str) -> None:
    reading = read(2, 4, device=device)
    assert abs(reading.held["activations"]) < HIDDEN_BYTES, "but for labels"
    assert reading.held["transfers"] < HIDDEN_BYTES


# -- bytes -------------------------------------------------------------------------------------------------------------

PIPELINES: dict[str, dict[str, Any]] = {
    "1F1B, tied": {"model": {"config": {"tie_word_embeddings": True}}},
    "Interleaved1F1B, eight bits": {"pipeline": {"schedule": "Interleaved1F1B", "wire": "8bit"}},
}


@pytest.mark.parametrize(
    ("nodes", "local", "name"),
    [pytest.param(2, 2, "1F1B, tied", marks=pytest.mark.heavy), (2, 1, "Interleaved1F1B, eight bits")],
)
def test_predicted_bytes_of_all_places_are_the_counted_ones(tmp_path: Path, nodes: int, local: int, name: str) -> None:
    corpus(tmp_path)
    sections = dict(PIPELINES[name])
    model, pipeline = sections.pop("model", {}), {"stages": nodes, **sections.pop("pipeline", {})}
    given = table(tmp_path, pipeline=pipeline, train={"accumulation": 3}, **sections)
    given["model"]["config"].update({"num_hidden_layers": 4, **model.get("config", {})})
    given["train"]["steps"] = 3
    config = from_dict(Config, given)
    (summary,) = run_ranks(train_all, nodes * local, [config], local=local)[0]
    on = Predictor(config, cluster(nodes, local, **RATES), device_type="cpu")
    work = StepWork(
        job=config, trace=on._trace(config), rehearsals=on._rehearsals, places=Places(nodes=nodes, local=local)
    )
    made = PipelinedStep(on.cluster, work)
    said: Counter[str] = Counter()
    for reading in made._played(made._few_rounds)[1]:
        for (level, purpose), size in reading.sent_bytes.items():
            said[f"{level}/{purpose}"] += round(local * size)
    found = {key: size for key, size in summary["traffic_bytes"][2].items() if size and "control" not in key}
    assert found["node/activations"] > 0
    assert {key: size for key, size in said.items() if "control" not in key} == found


# -- choices and refusals ----------------------------------------------------------------------------------------------


def test_the_plan_chooses_a_pipeline_where_weights_outweigh_tokens() -> None:
    slow = {"wire_bits_per_s": 8e5, **RATES}
    base = predictor(4)
    config = replace(base.config, train=replace(base.config.train, accumulation=2))
    found = Predictor(config, cluster(2, 1, **slow), device_type="cpu").estimate(CANDIDATES["pipeline"])
    assert isinstance(found, Estimate)
    assert found.job.pipeline.stages == 2
    assert found.job.pipeline.schedule == "Eager1F1B", "the interleaved schedule sends three times as much"
    assert "2 groups of nodes, 2 stages by Eager1F1B, 4 micro-batches of 1 row" in found.notes[-1]
    host = Predictor(config, cluster(2, 1, **slow), device_type="cpu").estimate(CANDIDATES["host"])
    assert isinstance(host, Estimate)
    assert found.wire_bytes < host.wire_bytes
    assert found.seconds < host.seconds


def test_pipelines_that_cannot_be_planned_are_named() -> None:
    with pytest.raises(ConfigError, match="'fsdp2-pipeline' is run, not planned"):
        candidate_named("fsdp2-pipeline")
    alone = Predictor(predictor(4).config, cluster(1, 2, **RATES), device_type="cpu").estimate(CANDIDATES["pipeline"])
    assert isinstance(alone, Refusal)
    assert "and one node: stages are on different nodes" in alone.reason
    config = replace(
        predictor(4).config, pipeline=replace(predictor(4).config.pipeline, stages=2, schedule="ZBVZeroBubble")
    )
    split = Predictor(config, cluster(2, 1, **RATES), device_type="cpu").estimate(CANDIDATES["pipeline"])
    assert isinstance(split, Refusal)
    assert "pipeline.schedule = 'ZBVZeroBubble' splits backward" in split.reason


def test_places_that_wait_for_what_nobody_sends_are_named() -> None:
    made = program(2, 4)
    first = made._at_places(4)[0]
    machines = [Simulator(cluster(2, 1, **RATES), device_type="cpu") for _ in range(2)]
    with pytest.raises(DeadlockError, match="place 1 waits for message 1 from place 0 to place 1"):
        play_together(machines, [first, first])
