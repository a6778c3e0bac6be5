"""A run that is saved, drained or not, and resumed equals the run without interruption, to the bit."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import RULES, Rule, StatePlacement
from tests.cyclic.toys import OPTIMIZERS, assert_equal, make_oracle, make_stages, train, train_oracle
from tests.support.launch import on_ranks

torch.set_num_threads(1)
END = 5


def make(count: int, seed: int, optimizer: str, mesh: DeviceMesh | None, **options: Any) -> CyclicDataParallel:
    return CyclicDataParallel(
        make_stages(count, seed), nn.functional.cross_entropy, OPTIMIZERS[optimizer], mesh, **options
    )


def together(state: dict[str, Any]) -> dict[str, Any]:
    """The parts of all ranks, as in a checkpoint folder."""
    if not dist.is_initialized():
        return state
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, state)
    keys = [key for part in parts for key in part if key.startswith("stages.")]
    assert len(keys) == len(set(keys)), "a tensor is saved twice"
    return {key: value for part in parts for key, value in part.items()}


def assert_resumes(count: int, rules: tuple[str, ...], mesh: DeviceMesh | None, states: StatePlacement) -> None:
    worker = dist.get_rank() if mesh is not None and states != "shared" else None
    for rule, optimizer in zip(rules, cycle(OPTIMIZERS), strict=False):
        oracle = make_oracle(count, Rule.named(rule, count), optimizer)
        train_oracle(oracle, range(END))
        options = {"rule": rule, "states": states}
        unbroken = make(count, 0, optimizer, mesh, **options)
        saved = {}
        for step in range(END):
            if step in ((0, 1, 3) if mesh is None else (1, 3)):
                saved[step] = together(unbroken.state_dict())
                # The state holds tensors of the run; a checkpoint would hold copies.
                saved[step] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved[step].items()}
            train(unbroken, range(step, step + 1), worker)
        unbroken.drain()
        with unbroken.consistent_parameters():
            assert_equal(unbroken, oracle, f"{options} {optimizer}, saved but not interrupted")
        resumed = make(count, 1, optimizer, mesh, **options)
        for step, state in saved.items():
            resumed.load_state_dict(state)
            assert resumed.num_batches == step
            again = together(resumed.state_dict())  # before anything has run
            assert all(
                torch.equal(v, again[k])
                for k, v in state.items()
                if k.startswith("stages.") and k in again and isinstance(v, torch.Tensor)
            )
            train(resumed, range(step, END), worker)
            resumed.drain()
            with resumed.consistent_parameters():
                assert_equal(resumed, oracle, f"{options} {optimizer}, resumed at {step}")
        unbroken.close()
        resumed.close()


def test_single_device_resumes() -> None:
    assert_resumes(3, RULES, None, "single")


@pytest.mark.parametrize(
    ("states", "count", "rules"),
    [("replicated", 3, ("dp", "v1", "lag2")), ("sharded", 3, ("v2", "clip")), ("shared", 2, ("v1", "v2", "lag2"))],
)
@on_ranks(3)
def test_workers_resume(states: StatePlacement, count: int, rules: tuple[str, ...]) -> None:
    assert_resumes(count, rules, init_device_mesh("cpu", (3,)), states)


@on_ranks(3)
def test_folder_moves_between_placements(tmp_path: Path) -> None:
    """Save with torch.distributed.checkpoint, and load into other placements."""
    mesh = init_device_mesh("cpu", (3,))
    worker = dist.get_rank()
    oracle = make_oracle(3, Rule.named("v2", 3), "adamw")
    train_oracle(oracle, range(3))
    run = make(3, 0, "adamw", mesh, states="sharded")
    train(run, range(3), worker)
    dcp.save(run.state_dict(), checkpoint_id=tmp_path)
    train_oracle(oracle, range(3, END))
    for states in ("replicated", "sharded"):
        resumed = make(3, 1, "adamw", mesh, states=states)
        state = resumed.blank_state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        resumed.load_state_dict(state)
        assert resumed.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
        train(resumed, range(3, END), worker)
        resumed.drain()
        with resumed.consistent_parameters():
            assert_equal(resumed, oracle, states)
    run.drain()


def make_after(rule: str) -> Any:
    oracle = make_oracle(3, Rule.named(rule, 3), "sgd")
    train_oracle(oracle, range(4))
    return oracle


@on_ranks(3)
def test_evaluation_sees_one_version() -> None:
    """Evaluation sees the oracle's version of one batch ago, and does not change the run."""
    mesh = init_device_mesh("cpu", (3,))
    worker = dist.get_rank()
    for states in ("replicated", "sharded"):
        for rule in ("dp", "v2", "clip"):
            run, oracle = make(3, 0, "sgd", mesh, rule=rule, states=states), make_oracle(3, Rule.named(rule, 3), "sgd")
            for step in range(4):
                train(run, range(step, step + 1), worker)
                train_oracle(oracle, range(step, step + 1))
                with run.consistent_parameters() as version:
                    assert version == (step + 1 if rule == "dp" else step)
                    for stage, values in zip(run.stages, oracle.newest if rule == "dp" else oracle.older, strict=True):
                        own = [p for p in stage.parameters() if p.requires_grad]
                        assert all(torch.equal(a, b) for a, b in zip(own, values, strict=True))
            run.drain()
            with run.consistent_parameters():
                assert_equal(run, make_after(rule), f"{states}, {rule}")
            run.close()


def test_entries_that_do_not_fit_are_named() -> None:
    run = make(2, 0, "sgd", None)
    state = run.state_dict()
    with pytest.raises(ValueError, match=r"no 'stages\.1\.parameters\.linear\.weight'.*all ranks' parts"):
        run.load_state_dict({k: v for k, v in state.items() if k != "stages.1.parameters.linear.weight"})
    key = "stages.0.parameters.linear.bias"
    with pytest.raises(ValueError, match=r"shape \(7,\) in the state, but \(6,\) here"):
        run.load_state_dict({**state, key: torch.zeros(7)})
