"""Every rule and placement equals the oracle to the bit, also where it is saved, drained or not, and resumed."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import RULES, StageCache, StatePlacement
from tests.cyclic.toys import OPTIMIZERS, Course, assert_equal, assert_equals_oracle, make_stages
from tests.support.launch import on_ranks, run_ranks

torch.set_num_threads(1)
CLIPS = ("dp", "clip")
STAGGERED = tuple(rule for rule in RULES if rule != "dp")


def run_all(rules: tuple[str, ...], **options: Any) -> None:
    """Compare each rule, and the clipping of those that can clip, with the oracle."""
    for rule, optimizer in zip(rules, cycle(OPTIMIZERS), strict=False):
        assert_equals_oracle(Course(rule=rule, optimizer=optimizer, **options))
    for rule, optimizer in zip([rule for rule in CLIPS if rule in rules], OPTIMIZERS, strict=False):
        assert_equals_oracle(Course(rule=rule, optimizer=optimizer, max_grad_norm=0.05, **{**options, "saves": ()}))


@pytest.mark.parametrize("count", [1, 3])
def test_single_device_equals_the_oracle(count: int) -> None:
    run_all(RULES, states="single", count=count, saves=(0, 3, 5) if count == 3 else ())


@pytest.mark.parametrize(("count", "rules", "saves"), [(2, ("v1",), (1,)), (3, RULES, (3,)), (4, ("lag2",), ())])
@pytest.mark.parametrize(("states", "cache"), [("replicated", "none"), ("sharded", "none"), ("sharded", "host")])
@on_ranks("count")
def test_workers_equal_the_oracle(
    states: StatePlacement, cache: StageCache, count: int, rules: tuple[str, ...], saves: tuple[int, ...]
) -> None:
    run_all(rules, states=states, cache=cache, count=count, saves=saves)


@pytest.mark.parametrize(("ranks", "count", "rules"), [(3, 2, STAGGERED), (6, 3, ("lag2",))])
@on_ranks("ranks")
def test_shared_stages_equal_the_oracle(count: int, rules: tuple[str, ...]) -> None:
    """Model and data parallel on N(N+1)/2 devices: 10 at N = 4, where plain data parallelism needs 16."""
    run_all(rules, states="shared", count=count, saves=(3,) if count == 2 else ())


@on_ranks(2)
def test_workers_begin_with_the_weights_of_the_first() -> None:
    """So do parameters that are not contiguous, and buffers."""
    torch.manual_seed(dist.get_rank())
    stages = [nn.Linear(4, 3), nn.BatchNorm1d(3)]
    stages[0].weight = nn.Parameter(torch.randn(4, 3).t())
    stages[1].running_mean.fill_(float(dist.get_rank()))
    CyclicDataParallel(stages, nn.functional.cross_entropy, OPTIMIZERS["sgd"], init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    nn.Linear(4, 3)
    assert torch.equal(stages[0].weight, torch.randn(4, 3).t())
    assert stages[1].running_mean.tolist() == [0.0] * 3


COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list",
)  # fmt: skip
"""The collectives of torch.distributed."""


def job_whole_life(states: StatePlacement) -> None:
    """Each call of a run, from the constructor to the end."""
    course = Course(states=states, count=2 if states == "shared" else 3)
    run = course.run()
    course.train(run, range(2))
    with run.consistent_parameters():
        pass
    run.state_dict()
    run.load_state_dict(run.blank_state_dict())
    course.train(run, range(2))
    run.close()


@pytest.mark.parametrize("states", ["replicated", "sharded", "shared"])
def test_no_collective_is_ever_called(states: StatePlacement, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that crosses, also before and between the steps, is a message from one device to another."""
    calls = Counter[str]()

    def counted(name: str) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += sys._getframe(1).f_globals["__name__"].startswith("laconic.")
            return function(*args, **kwargs)

        return call

    for name in (*COLLECTIVES, "send", "isend"):
        monkeypatch.setattr(dist, name, counted(name))
    run_ranks(job_whole_life, 3, states)
    assert {name for name, count in calls.items() if count} == {"send", "isend"}
    # Two of three ranks hand on each tensor: those of the model in the constructor, then one for each stage.
    stages = make_stages(2 if states == "shared" else 3)
    tensors = sum(len([*stage.parameters(), *stage.buffers()]) for stage in stages)
    assert calls["send"] == 2 * (tensors + len(stages))


@on_ranks(3)
def test_a_folder_moves_between_placements(tmp_path: Path) -> None:
    """Save with torch.distributed.checkpoint, and load into other placements."""
    course = Course(optimizer="adamw", states="sharded")
    oracle, run = course.oracle(), course.run()
    course.train_oracle(oracle, range(5))
    course.train(run, range(3))
    dcp.save(run.state_dict(), checkpoint_id=tmp_path)
    for states in ("replicated", "sharded"):
        resumed = Course(optimizer="adamw", states=states).run(seed=1)  # type: ignore[arg-type]
        state = resumed.blank_state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        resumed.load_state_dict(state)
        assert resumed.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
        course.train(resumed, range(3, 5))
        resumed.drain()
        with resumed.consistent_parameters():
            assert_equal(resumed, oracle, states)
    run.drain()


@pytest.mark.parametrize("states", ["replicated", "sharded"])
@pytest.mark.parametrize("rule", ["dp", "v2"])
@on_ranks(3)
def test_evaluation_sees_one_version(states: StatePlacement, rule: str) -> None:
    """That of the oracle one batch ago. It does not change the run."""
    course = Course(rule=rule, states=states)
    run, oracle = course.run(), course.oracle()
    for step in range(3):
        course.train(run, range(step, step + 1))
        course.train_oracle(oracle, range(step, step + 1))
        with run.consistent_parameters() as version:
            assert version == (step + 1 if rule == "dp" else step)
            for stage, values in zip(run.stages, oracle.newest if rule == "dp" else oracle.older, strict=True):
                assert all(map(torch.equal, (p for p in stage.parameters() if p.requires_grad), values))
    run.drain()
    oracle.restart()
    with run.consistent_parameters():
        assert_equal(run, oracle, course)


def test_entries_that_do_not_fit_are_named() -> None:
    run = Course(count=2, states="single").run()
    state, missing = run.state_dict(), "stages.1.parameters.linear.weight"
    with pytest.raises(ValueError, match=rf"no '{missing}'.*all ranks' parts"):
        run.load_state_dict({key: value for key, value in state.items() if key != missing})
    with pytest.raises(ValueError, match=r"shape \(7,\) in the state, but \(6,\) here"):
        run.load_state_dict({**state, "stages.0.parameters.linear.bias": torch.zeros(7)})
