"""What crosses the boundaries of a pipeline: its bytes, and eight bits against the oracle that loses the same ones."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import stage

import laconic
from laconic import _compat
from laconic.codec import CODECS
from laconic.pipeline import SCHEDULES, Boundary, Pipeline, PipelinePolicy, TensorForm, cut_pipeline
from laconic.rehearse import races, rehearsal
from tests.pipeline.toys import assert_trains_as_one_process
from tests.support import pipelines as toys
from tests.support.launch import on_ranks

HEAVY = [pytest.param(each, marks=pytest.mark.heavy) for each in SCHEDULES if each not in ("1F1B", "DualPipeV")]


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV", *HEAVY])
@on_ranks(2, local=1)
def test_eight_bits_lose_what_the_oracle_loses(schedule: Any) -> None:
    """Forward and backward; nothing is lost inside a rank, where a V turns, nor of the mask."""
    pipeline = toys.start(PipelinePolicy(schedule=schedule, wire="8bit"), 2, 1)
    assert_trains_as_one_process(pipeline, toys.blocks(), rows=8)


@pytest.mark.parametrize("wire", ["exact", "8bit"])
@pytest.mark.parametrize(("schedule", "boundaries"), [("1F1B", 1), ("LoopedBFS", 3), ("DualPipeV", 2)])
@on_ranks(2, local=1)
def test_bytes_are_those_of_the_tokens(schedule: Any, boundaries: int, wire: str) -> None:
    """2 T h bytes in bfloat16 a boundary and direction, a mask of one byte a token, and nothing inside a rank."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pipeline = toys.start(PipelinePolicy(schedule=schedule, wire=wire), 2, 1, mp_policy=precision)
    tokens, target = toys.batch(0, 8, tokens=16)
    numel = tokens.numel() * toys.D
    each_way = 2 * numel if wire == "exact" else 4 * CODECS["int8"].payload_bytes(numel // 4)
    for trains, call in ((True, pipeline.step), (False, pipeline.evaluate)):
        call(tokens, target)  # the first one looks for shapes
        before = pipeline.traffic.snapshot()
        call(tokens, target)
        moved = pipeline.traffic.snapshot() - before
        assert moved.total(level="local", purpose="activations") == 0
        both = [moved.total("node", "activations", way) for way in ("sent", "received")]
        assert sum(both) == boundaries * (each_way * (1 + trains) + tokens.numel() * toys.CARRIES_MASKS)


@on_ranks(2, local=2)
def test_inside_a_machine_bytes_are_local() -> None:
    pipeline = toys.start(PipelinePolicy(), 2, 1)
    pipeline.step(*toys.batch(0, 8))
    moved = pipeline.traffic.snapshot()
    assert moved.wire() == 0
    assert moved.total("local", "activations") > 0


@on_ranks(2, local=1)
def test_what_is_frozen_sends_no_gradients() -> None:
    """The first stage has nothing to train: its activations need no gradient, so none comes back."""
    model, oracle = toys.blocks(), toys.blocks()
    for each in (*model[:4], *oracle[:4]):
        each.requires_grad_(False)
    cut = cut_pipeline(model, 2, borders=[4])
    pipeline = toys.start(PipelinePolicy(), 2, 1, cut=cut)
    if not toys.CARRIES_MASKS:
        with pytest.raises(ValueError, match=r"a stage hands on float32 \[1, 3, 16\], which needs no gradient"):
            pipeline.step(*toys.batch(0, 4))
        return
    assert_trains_as_one_process(pipeline, oracle, rows=4)
    moved = pipeline.traffic.snapshot()
    assert moved.total("node", "activations", "sent") * pipeline.has_last == 0


@on_ranks(2, local=1)
def test_losses_in_eight_bits_follow_those_of_exact_ones() -> None:
    """36 steps at rates that fall to zero: losses fall to two fifths, and the last ones differ by less than 0.5 %."""
    curves = {wire: toys.curve(PipelinePolicy(wire=wire), 2, num_steps=36) for wire in ("exact", "8bit")}
    assert curves["exact"][-1] < curves["exact"][0] * 2 / 5
    assert curves["8bit"] != curves["exact"]
    assert curves["8bit"][-1] == pytest.approx(curves["exact"][-1], rel=0.005)


class Witness(nn.Linear):
    """Knows how many of its inputs are still there."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inputs: list[weakref.ref[Tensor]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(weakref.ref(x))
        self.most = max(self.most, sum(each() is not None for each in self.inputs))
        return super().forward(x)


@pytest.mark.parametrize(("schedule", "most"), [("1F1B", [8, 2, 1]), ("Eager1F1B", [8, 3, 1]), ("GPipe", [8, 8, 8])])
@on_ranks(3, local=1)
def test_only_what_is_alive_has_room(schedule: Any, most: list[int]) -> None:
    """The batch of eight micro-batches is the user's; what comes from another rank goes with its backward."""
    policy = PipelinePolicy(schedule=schedule, micro_batches=8)
    pipeline = toys.start(policy, 3, 0, cut=cut_pipeline([Witness() for _ in range(3)], 3))
    pipeline._loss_fn = nn.functional.mse_loss
    (witness,) = (each for module in pipeline.modules.values() for each in module.modules() if type(each) is Witness)
    pipeline.step(torch.ones(8, 4), torch.ones(8, 4))
    witness.inputs.clear()
    witness.most = 0
    pipeline.step(torch.ones(8, 4), torch.ones(8, 4))
    assert witness.most <= most[pipeline.rank]


def test_an_older_torch_hands_on_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = TensorForm((2, 3), torch.bool, False)
    if toys.CARRIES_MASKS:
        _compat.refuse_constants_between_stages([mask])
        monkeypatch.delattr(stage, "InferenceMode")
    with pytest.raises(ValueError, match=r"a stage hands on bool \[2, 3\], which needs no gradient, .*; install torch"):
        _compat.refuse_constants_between_stages([mask])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_rehearsal_counts_the_same_bytes(schedule: Any, rank: int) -> None:
    """On accelerators that are not there, as one rank of two machines with two; no stream reads too early."""
    policy = PipelinePolicy(schedule=schedule, wire="8bit")
    first = TensorForm((2, 64), torch.float32, requires_grad=False)
    entries = [Boundary((first,)), *[Boundary((replace(first, requires_grad=True),))] * (policy.num_stages(2) - 1)]
    with rehearsal(nodes=2, local=2, rank=rank, cost_of=lambda *_: 0) as machine:
        laconic.init_mesh("cuda")
        whole = init_device_mesh("cuda", (2, 1, 2), mesh_dim_names=("pipeline", "node", "local"))
        with torch.device("cuda"):
            cut = cut_pipeline([nn.Linear(64, 64) for _ in range(8)], policy.num_stages(2))
            batch = torch.zeros(2, 8, 64)
        own = {number: cut.stages[number] for number in policy.stages_of(rank // 2, 2)}
        for module in own.values():
            laconic.fully_shard(module, mesh=whole["node", "local"])
        pipeline = Pipeline(
            own, cut, mesh=whole["pipeline"], loss_fn=nn.functional.mse_loss, policy=policy, entries=entries
        )
        with machine.recording() as tape:
            pipeline.step(*batch)
            pipeline.evaluate(*batch)
    assert list(races(tape)) == []
    moved = pipeline.traffic.snapshot()
    forwards, backwards = (
        sum(1 for number in own if 0 <= number + step < len(entries) and number + step not in own) for step in (1, -1)
    )
    assert moved.total("node", "activations", "sent") == 4 * (2 * forwards + backwards) * entries[1].nbytes("8bit")
