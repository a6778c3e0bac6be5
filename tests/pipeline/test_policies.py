"""What a pipeline refuses before its first message, and in which words; where stages are; how a model is cut."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from laconic.errors import RanksDifferError
from laconic.pipeline import SCHEDULES, Boundary, Pipeline, PipelinePolicy, cut_pipeline
from laconic.rehearse import Kill, RankError, ranks
from tests.support import pipelines as toys
from tests.support.launch import on_ranks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "2F2B"}, r"PipelinePolicy\(schedule='2F2B'\) is not known; use one of 'GPipe', '1F1B'"),
        ({"micro_batches": 0}, r"PipelinePolicy\(micro_batches=0\) must be at least 1"),
        ({"wire": "4bit"}, r"\(wire='4bit'\) must be 'exact' or '8bit'; nothing .* so fewer bits have no evidence"),
        (
            {"stages_per_rank": 3, "schedule": "ZBVZeroBubble"},
            r"\(stages_per_rank=3\) does not go with .*\(schedule='ZBVZeroBubble'\), which has 2 on each rank",
        ),
        ({"stages_per_rank": 2}, r"\(stages_per_rank=2\) does not go with .*\(schedule='1F1B'\), which has 1 on each"),
    ],
)
def test_settings_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipelinePolicy(**settings)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "words"),
    [
        ({}, 1, "a pipeline of 1 rank has no boundary to send over"),
        ({"micro_batches": 2}, 3, "micro_batches=2 are too few: 1F1B with 3 stages needs 3 at least; give as many"),
        ({"schedule": "DualPipeV"}, 3, "micro_batches=4 are too few: DualPipeV with 6 stages needs 6 at least"),
        (
            {"schedule": "InterleavedZeroBubble", "micro_batches": 7},
            3,
            "micro_batches=7 do not divide into 2 equal rounds, .* on 3 ranks wants them; .* of 3, such as 6",
        ),
    ],
)
def test_clusters_are_refused(settings: Any, num_ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipelinePolicy(**settings).check_ranks(num_ranks)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_and_slots_are_whole(schedule: Any, num_ranks: int, chunks: int) -> None:
    """Each stage is on one rank; an evaluation runs each once, and hands on in the next slot."""
    try:
        policy = PipelinePolicy(schedule=schedule, micro_batches=5, stages_per_rank=chunks)
    except ValueError:
        assert chunks != PipelinePolicy(schedule=schedule).num_stages_per_rank
        return
    places = {stage: rank for rank in range(num_ranks) for stage in policy.stages_of(rank, num_ranks)}
    assert sorted(places) == list(range(policy.num_stages(num_ranks)))
    assert all(policy.rank_of(stage, num_ranks) == rank for stage, rank in places.items())
    style = "v" if schedule in ("ZBVZeroBubble", "DualPipeV") else "loop"
    assert places == schedules.generate_stage_to_rank_mapping(num_ranks, len(places), style=style)
    slots = {}
    for rank in range(num_ranks):
        for slot, what in policy.forward_slots(rank, num_ranks).items():
            assert places[what[0]] == rank
            slots[what] = slot
    assert len(slots) == 5 * len(places)
    assert all(slots[stage, part] + 1 == slots[stage + 1, part] for stage, part in slots if stage + 1 in places)


def test_a_schedule_takes_the_stages_of_its_rank_alone() -> None:
    stages: Any = [SimpleNamespace(stage_index=each, num_stages=4, group_size=2, group_rank=0) for each in (0, 1)]
    words = r"rank 0 of 2 has the stages \[0, 2\] of 4 under LoopedBFS, got \[0, 1\] of 4; give it those that stages_of"
    with pytest.raises(ValueError, match=words):
        PipelinePolicy(schedule="LoopedBFS").make_schedule(stages, None)


def test_only_plain_tensors_cross() -> None:
    with pytest.raises(ValueError, match="a stage hands on a dict, but only plain tensors cross to the next; return a"):
        Boundary.of((torch.ones(1), {"mask": torch.ones(1)}))


# -- cut ---------------------------------------------------------------------------------------------------------------


def widths(*sizes: int) -> nn.Sequential:
    """Linear layers between these widths."""
    return nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(sizes)))


def test_embedding_and_head_weigh() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), *widths(4, 4, 4, 4, 4, 4), nn.Linear(4, 100))
    assert cut_pipeline(model, 3).borders == (0, 1, 6, 7)
    assert cut_pipeline(model, 3, by=[0, 1, 1, 1, 1, 1, 1]).borders == (0, 3, 5, 7)  # where a look-up costs nothing
    by_memory = cut_pipeline(model, 2, example=torch.zeros(1, dtype=torch.long), by="memory")
    assert len(by_memory.stages) == 2


def test_a_cut_by_hand_keeps_the_names_and_the_digest_tells_cuts_apart() -> None:
    with torch.device("meta"):
        model = widths(4, 8, 8, 8, 4)
    cut = cut_pipeline(model, 3, borders=[1, 3])
    assert [sorted(stage.state_dict()) for stage in cut.stages] == [
        ["0.bias", "0.weight"], ["1.bias", "1.weight", "2.bias", "2.weight"], ["3.bias", "3.weight"],
    ]  # fmt: skip
    assert cut.digest == cut_pipeline(widths(4, 8, 8, 8, 4), 3, borders=[1, 3]).digest
    others = [cut_pipeline(model, 3, borders=[1, 2]), cut_pipeline(widths(4, 8, 8, 8, 5), 3, borders=[1, 3])]
    assert len({cut.digest, *(each.digest for each in others)}) == 3


def test_a_cut_unties_and_notes_the_copies() -> None:
    cut = cut_pipeline(toys.blocks(tied=True), 3, borders=[1, 5])
    first, last = cut.stages[0].get_parameter("0.weight"), cut.stages[2].get_parameter("8.weight")
    assert cut.tied == (((0, "0.weight"), (2, "8.weight")),)
    assert first is not last
    assert torch.equal(first, last)
    assert cut_pipeline(toys.blocks(tied=True), 1).tied == ()


@pytest.mark.parametrize(
    ("num_stages", "settings", "words"),
    [
        (5, {}, "5 stages need at least as many blocks, and the model has 4"),
        (0, {}, r"num_stages=0 is not possible; give PipelinePolicy\.num_stages"),
        (
            3,
            {"borders": [2]},
            r"borders=\[2\] do not cut 4 blocks into 3 stages; give 2 ascending numbers between 1 and 3",
        ),
        (3, {"borders": [2, 2]}, r"borders=\[2, 2\] do not cut"),
        (2, {"borders": [4]}, r"borders=\[4\] do not cut"),
        (2, {"borders": [2], "by": "time"}, r"borders=\[2\] and by='time' both say where to cut; give one"),
        (2, {"by": "time"}, "by='time' measures; give example="),
        (2, {"by": [1, 2]}, "by= gives 2 costs, but the model has 4 blocks"),
    ],
)
def test_cuts_are_refused(num_stages: int, settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut_pipeline(widths(4, 4, 4, 4, 4), num_stages, **settings)


def test_a_module_on_two_stages_is_refused() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"0 in stage 0 and 2 in stage 1 are one module, which cannot be on two ranks"):
        cut_pipeline([layer, nn.Tanh(), layer], 2, borders=[2])


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "border", "layers", "words"),
    [
        ({"micro_batches": 6}, 4, 7, "its micro-batches is 6, and that of rank 0 is 4"),
        ({"schedule": "GPipe"}, 4, 7, "its schedule is 'GPipe', and that of rank 0 is '1F1B'"),
        ({"wire": "8bit"}, 4, 7, "its wire is '8bit', and that of rank 0 is 'exact'"),
        (
            {},
            5,
            7,
            r"its cut is before the blocks \[5, 7\] \(\w+\), and that of rank 0 is before the blocks \[4, 7\] \(\w+\)",
        ),
        (
            {},
            4,
            6,
            r"its cut is before the blocks \[4, 7\] \(\w+\), and that of rank 0 is before the blocks \[4, 7\] \(\w+\)",
        ),
    ],
    ids=["micro-batches", "schedule", "wire", "cut", "model"],
)
@on_ranks(3, local=1)
def test_ranks_that_differ_are_named(settings: Any, border: int, layers: int, words: str) -> None:
    along, _ = toys.meshes(3, 1)
    is_other = along.get_local_rank() == 1
    cut = cut_pipeline(toys.blocks(layers if is_other else 7), 3, borders=[border if is_other else 4, 7])
    policy = PipelinePolicy(**settings) if is_other else PipelinePolicy()
    with pytest.raises(RanksDifferError, match=f"^rank 1 of the pipeline differs from rank 0: {words}"):
        toys.start(policy, 3, 0, cut=cut)


@on_ranks(2, local=1)
def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    along, _ = toys.meshes(2, 1)
    cut = cut_pipeline(toys.blocks(), 2, borders=[4])
    number = along.get_local_rank()

    def join(modules: Any, **others: Any) -> Pipeline:
        given: Any = {"cut": cut, "mesh": along, "loss_fn": toys.loss_of, "policy": PipelinePolicy(), **others}
        return Pipeline(modules, given.pop("cut"), **given)

    with pytest.raises(
        ValueError, match=r"rank 0: place 0 of 2 has the stages \[0\] under 1F1B, got \[1\]; give it those"
    ):
        join({1 - number: cut.stages[1 - number]})
    with pytest.raises(ValueError, match="1F1B on 2 ranks has 2 stages, but the model is cut into 3"):
        join({number: cut.stages[number]}, cut=cut_pipeline(toys.blocks(), 3))
    with pytest.raises(ValueError, match="reduction='max' is not known"):
        join({number: cut.stages[number]}, reduction="max")
    looped, halves = PipelinePolicy(schedule="LoopedBFS"), cut_pipeline(toys.blocks(), 4)
    one = dict.fromkeys(looped.stages_of(number, 2), nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"weight in stage \d and weight in stage \d are one parameter, whose gradients"
    ):
        join(one, policy=looped, cut=halves)

    pipeline = join({number: cut.stages[number]})
    tokens, target = toys.batch(0, 6)
    with pytest.raises(
        ValueError, match=r"rank 0: the batch has 6 rows, which do not divide into 4 equal micro-batches"
    ):
        pipeline.step(tokens, target[:4])
    with pytest.raises(ValueError, match=r"rank 1: the target has 6 rows, which do not divide into 4"):
        pipeline.evaluate(tokens[:4], target)
    with pytest.raises(ValueError, match=r"rank 1: the target is missing; give it on the rank that has the last stage"):
        pipeline.step(tokens[:4])
    with pytest.raises(ValueError, match=r"rank 0: the batch is missing"):
        pipeline.step(target=target[:4])
    with pytest.raises(ValueError, match="norm_type=0 is no norm"):
        pipeline.clip_grad_norm_(1.0, 0)


class Moody(nn.Module):
    """Hands on fewer places once it has seen some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)[:, : 4 - self.calls // 3]


def moody() -> None:
    along, _ = toys.meshes(2, 1)
    cut = cut_pipeline([Moody(), nn.Linear(4, 4)], 2, borders=[1])
    own = {along.get_local_rank(): cut.stages[along.get_local_rank()]}
    pipeline = Pipeline(own, cut, mesh=along, loss_fn=lambda x, y: x.sum(), policy=PipelinePolicy())
    pipeline.step(torch.ones(8, 4, 4), torch.ones(8))


def test_outputs_of_another_shape_are_refused_before_they_are_sent() -> None:
    with pytest.raises(
        RankError, match=r"stage 0 hands on float32 \[2, 3, 4\], and its boundary has float32 \[2, 4, 4\]"
    ):
        ranks(moody, nodes=2)


@pytest.mark.parametrize("turn", [20, 31, 42, 53])
def test_all_end_when_a_rank_has_died(turn: int) -> None:
    first, dead, last = ranks(toys.step_for_ever, nodes=3, faults=[Kill(rank=1, turn=turn)])
    assert dead is None
    assert "rank 1 is gone" in first
    assert "is gone" in last
