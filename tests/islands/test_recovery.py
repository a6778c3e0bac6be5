"""Islands that are lost, restarted or added: all go on from the last sync."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.islands.exchange import Presence
from laconic.islands.local_steps import LocalSteps
from tests.islands.test_local_steps import adamw, flat, make, sgd, take
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import partial_net
from tests.support.sharded_net import build


def job(machines: list[str], seed: int) -> tuple[int, Tensor]:
    """Train an island on each machine to step 4; return the step after which it began, and its parameters."""
    mesh, model = laconic.init_mesh("cpu", islands=len(machines), nodes=1, local=1), build(make, seed=seed)
    folder = machines[dist.get_rank()]
    steps = LocalSteps(model, adamw(model), mesh=mesh, every=2, recovery=folder, run_id="test")
    begun = steps.steps
    take(model, steps, range(begun, 4))
    steps.finish()
    return begun, flat(model)


def machines_of(folder: Path) -> list[str]:
    return [str(folder / f"machine-{i}") for i in range(3)]


@on_ranks(1, local=1)
def test_a_run_that_was_rewound_is_restored_as_it_went_on(tmp_path: Path) -> None:
    """It syncs both fragments, loads the state of the beginning, and syncs one there, trained on other rows."""
    mesh = laconic.init_mesh("cpu", islands=1, nodes=1, local=1)

    def begin(seed: int) -> tuple[Any, LocalSteps]:
        model = build(make, seed=seed)
        options: dict[str, Any] = {"every": 4, "fragments": 2, "recovery": tmp_path / "machine", "run_id": "test"}
        return model, LocalSteps(model, adamw(model), mesh=mesh, **options)

    model, steps = begin(0)
    beginning = copy.deepcopy(steps.state_dict())
    take(model, steps, range(4))
    steps.load_state_dict(beginning)
    take(model, steps, range(10, 12))
    steps.finish()
    _, restored = begin(1)
    assert restored.steps == 2
    assert restored._exchange.presence is Presence.TRAINING
    for before, after in zip(steps.fragments, restored.fragments, strict=True):
        assert all(map(torch.equal, before.vectors(), after.vectors()))


def test_islands_come_and_go(tmp_path: Path) -> None:
    machines = machines_of(tmp_path)
    _, before = run_ranks(job, 2, machines[:2], 0, local=1)[0]
    joined = run_ranks(job, 3, [machines[2], *machines[:2]], 1, local=1)  # the new machine comes first
    alone = run_ranks(job, 1, machines[1:2], 2, local=1)
    for index, damaged in enumerate(sorted((tmp_path / "machine-1").glob("*/*/*"))):
        damaged.write_bytes(damaged.read_bytes()[:100] if index % 2 else b"no file of torch")
    helped = run_ranks(job, 2, machines[:2], 3, local=1)  # island 1 gets the state of the other
    for begun, got in (*joined, *alone, *helped):
        assert begun == 4
        assert torch.equal(got, before)


def job_sliced(held: list[int], machines: list[str]) -> tuple[int, dict[str, Tensor]]:
    """Train island i's slice `held[i]` up to step 4; return the step after which it began, and the outer state."""
    mesh = laconic.init_mesh("cpu", islands=len(held), nodes=1, local=1)
    model, machine = partial_net(held[dist.get_rank()], 2), machines[dist.get_rank()]
    steps = LocalSteps(model, sgd(model), mesh=mesh, every=2, codec="fp32", recovery=machine, run_id="x")
    begun = steps.steps
    take(model, steps, range(begun, 4))
    steps.finish()
    return begun, {key: value.clone() for key, value in steps.state_dict().items() if isinstance(value, Tensor)}


def test_slices_keep_their_outer_state_when_the_number_of_their_holders_changes(tmp_path: Path) -> None:
    machines = machines_of(tmp_path)
    _, before = run_ranks(job_sliced, 3, [1, 0, 0], machines, local=1)[0]
    assert any("_slice0.momentum_buffer" in key for key in before)
    for begun, got in run_ranks(job_sliced, 2, [0, 1], machines, local=1):
        assert begun == 4
        torch.testing.assert_close(got, before, atol=0, rtol=0)
