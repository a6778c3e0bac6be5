"""Islands that are lost, restarted or added: all go on from the last sync."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.islands.local_steps import LocalSteps
from tests.islands.test_local_steps import adamw, assert_equal, batch, make, values
from tests.support.launch import run_ranks
from tests.support.partial_models import partial_net
from tests.support.sharded_net import build, inputs, shard, squared_error


def train(islands: int, local: int, machines: list[str] | None, upto: int, seed: int = 0) -> tuple[int, Any]:
    """Train as island rank // local on its machine; return the step after which it began, and the model."""
    mesh = laconic.init_mesh("cpu", islands=islands, nodes=1, local=local)
    island, rank = dist.get_rank() // local, dist.get_rank() % local
    model = shard(build(make, seed=seed), mesh=mesh) if local > 1 else build(make, seed=seed)
    folder = machines[island] if machines else None
    steps = LocalSteps(model, adamw(model), mesh=mesh, every=2, recovery=folder, run_id="test")
    begun = steps.steps
    for step in range(begun, upto):
        squared_error(model, batch(step, island, rank)).backward()
        steps.step()
        steps.zero_grad()
    steps.finish()
    return begun, model


def job(islands: int, local: int, machines: list[str] | None, upto: int, seed: int = 0) -> tuple[int, dict[str, Any]]:
    begun, model = train(islands, local, machines, upto, seed)
    return begun, values(model)


@pytest.mark.parametrize("local", [1, 2])
def test_a_restarted_run_equals_the_unbroken_one_from_the_last_sync_on(local: int, tmp_path: Path) -> None:
    machines = [str(tmp_path / f"machine-{i}") for i in range(3)]
    first = run_ranks(job, 2 * local, 2, local, machines, 5, local=local)  # the fifth step is lost
    assert [begun for begun, _ in first] == [0] * (2 * local)
    again = run_ranks(job, 2 * local, 2, local, machines, 8, 1, local=local)  # built with another seed
    unbroken = run_ranks(job, 2 * local, 2, local, None, 8, local=local)
    for (begun, got), (_, want) in zip(again, unbroken, strict=True):
        assert begun == 4
        assert_equal(got, want, atol=0, rtol=0)


def job_rewound(machine: str) -> None:
    """Sync both fragments, load the state of the beginning, and sync one there, trained on other rows."""
    mesh = laconic.init_mesh("cpu", islands=1, nodes=1, local=1)

    def begin(seed: int) -> tuple[Any, LocalSteps]:
        model = build(make, seed=seed)
        options: dict[str, Any] = {"every": 4, "fragments": 2, "recovery": machine, "run_id": "test"}
        return model, LocalSteps(model, adamw(model), mesh=mesh, **options)

    def take(num_steps: int, first_row: int) -> None:
        for step in range(num_steps):
            squared_error(model, batch(first_row + step, 0, 0)).backward()
            steps.step()
            steps.zero_grad()

    model, steps = begin(0)
    beginning = copy.deepcopy(steps.state_dict())
    take(4, first_row=0)
    steps.load_state_dict(beginning)
    take(2, first_row=10)
    steps.finish()
    _, restored = begin(1)
    assert restored.steps == 2
    for before, after in zip(steps.fragments, restored.fragments, strict=True):
        for was, now in zip(before.vectors(), after.vectors(), strict=True):
            assert torch.equal(was, now)


def test_a_run_that_was_rewound_is_restored_as_it_went_on(tmp_path: Path) -> None:
    run_ranks(job_rewound, 1, str(tmp_path / "machine"), local=1)


def test_islands_come_and_go(tmp_path: Path) -> None:
    machines = [str(tmp_path / f"machine-{i}") for i in range(3)]
    before = run_ranks(job, 2, 2, 1, machines[:2], 4, local=1)
    joined = run_ranks(
        job, 3, 3, 1, [machines[2], machines[0], machines[1]], 4, 1, local=1
    )  # the new machine comes first
    for begun, got in joined:
        assert begun == 4
        assert_equal(got, before[0][1], atol=0, rtol=0)
    alone = run_ranks(job, 1, 1, 1, machines[1:2], 4, 2, local=1)
    assert alone[0][0] == 4
    assert_equal(alone[0][1], before[0][1], atol=0, rtol=0)
    for index, damaged in enumerate(sorted((tmp_path / "machine-1").glob("*/*/*"))):
        damaged.write_bytes(damaged.read_bytes()[:100] if index % 2 else b"no file of torch")
    begun, got = run_ranks(job, 2, 2, 1, machines[:2], 4, 3, local=1)[1]
    assert begun == 4, "an island without a file gets the state of the other"
    assert_equal(got, before[0][1], atol=0, rtol=0)


def job_sliced(held: list[int], machines: list[str]) -> tuple[int, dict[str, Any]]:
    """Train island i's slice `held[i]` up to step 4; return the step after which it began, and the outer state."""
    mesh = laconic.init_mesh("cpu", islands=len(held), nodes=1, local=1)
    island = dist.get_rank()
    model = partial_net(held[island], 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = LocalSteps(model, inner, mesh=mesh, every=2, codec="fp32", recovery=machines[island], run_id="x")
    begun = steps.steps
    for step in range(begun, 4):
        squared_error(model, inputs(step, island)).backward()
        steps.step()
        steps.zero_grad()
    steps.finish()
    return begun, {key: value.clone() for key, value in steps.state_dict().items() if isinstance(value, torch.Tensor)}


def test_slices_keep_their_outer_state_when_the_number_of_their_holders_changes(tmp_path: Path) -> None:
    machines = [str(tmp_path / f"machine-{i}") for i in range(3)]
    _, before = run_ranks(job_sliced, 3, [1, 0, 0], machines, local=1)[0]
    assert any("_slice0.momentum_buffer" in key for key in before)
    for begun, got in run_ranks(job_sliced, 2, [0, 1], machines, local=1):
        assert begun == 4
        assert_equal(got, before, atol=0, rtol=0)
        assert got.keys() == before.keys()
