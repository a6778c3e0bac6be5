"""Every rule and placement equals the oracle to the bit."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import RULES, Rule, StatePlacement
from tests.cyclic.toys import OPTIMIZERS, assert_equal, cases, make_oracle, make_stages, train, train_oracle
from tests.support.launch import on_ranks, run_ranks

torch.set_num_threads(1)


@pytest.mark.parametrize("count", [1, 3])
def test_single_device_equals_the_oracle(count: int) -> None:
    for rule, optimizer in cases(RULES):
        run = CyclicDataParallel(
            make_stages(count), nn.functional.cross_entropy, OPTIMIZERS[optimizer], rule=rule, states="single"
        )
        oracle = make_oracle(count, Rule.named(rule, count), optimizer)
        for steps in (range(4), range(4, 6)):
            losses = train(run, steps, worker=None)
            assert losses == [torch.stack(row).mean() for row in train_oracle(oracle, steps)]
            run.drain()
            oracle.restart()
            assert_equal(run, oracle, f"{rule}, {optimizer}")


@pytest.mark.parametrize("count", [1, 3])
def test_single_device_clips_by_the_global_norm(count: int) -> None:
    for rule, optimizer in zip(("dp", "v1", "clip"), cycle(OPTIMIZERS), strict=False):
        run = CyclicDataParallel(
            make_stages(count), nn.functional.cross_entropy, OPTIMIZERS[optimizer], rule=rule, max_grad_norm=0.05
        )
        oracle = make_oracle(count, Rule.named(rule, count), optimizer, max_grad_norm=0.05)
        free = make_oracle(count, Rule.named(rule, count), optimizer)
        for which in (oracle, free):
            train_oracle(which, range(4))
        train(run, range(4), worker=None)
        run.drain()
        assert_equal(run, oracle, f"{rule}, {optimizer}")
        with pytest.raises(AssertionError, match="differs"):  # the clipping changed something
            assert_equal(run, free, "")


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


def job_trajectory(states: StatePlacement, count: int, rules: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    worker = None if states == "shared" else dist.get_rank()
    able = [rule for rule in rules if Rule.named(rule, count).allows_global_norm]
    clipped = [(rule, "sgd", 0.05) for rule in able if count == 3]
    every = [(rule, optimizer, None) for rule, optimizer in zip(rules, cycle(OPTIMIZERS), strict=False)]
    for rule, optimizer, max_grad_norm in [*every, *clipped]:
        case = f"{states}, {rule}, {optimizer}, {max_grad_norm}"
        stages = make_stages(
            count, seed=0 if dist.get_rank() == 0 else 1
        )  # all begin with the values of the first rank
        run = CyclicDataParallel(
            stages,
            nn.functional.cross_entropy,
            OPTIMIZERS[optimizer],
            mesh,
            rule=rule,
            states=states,
            max_grad_norm=max_grad_norm,
        )
        oracle = make_oracle(count, Rule.named(rule, count), optimizer, max_grad_norm=max_grad_norm)
        for steps in (range(4), range(4, 6)):
            losses, expected = train(run, steps, worker), train_oracle(oracle, steps)
            for loss, row in zip(losses, expected, strict=True):
                if worker is not None:
                    assert loss == row[worker], case
                elif dist.get_rank() == dist.get_world_size() - 1:
                    assert loss == torch.stack(row).mean(), case
                else:
                    assert loss is None
            run.drain()
            oracle.restart()
            with run.consistent_parameters() as version:
                assert version == steps.stop
                assert_equal(run, oracle, case)
            if states == "replicated":
                assert_equal(run, oracle, case)
        run.close()


@pytest.mark.parametrize("states", ["replicated", "sharded"])
@on_ranks(3)
def test_workers_equal_the_oracle(states: StatePlacement) -> None:
    job_trajectory(states, 3, RULES)


def test_shared_stages_equal_the_oracle() -> None:
    """Model and data parallel on N(N+1)/2 devices: 10 at N = 4, where plain data parallelism needs 16."""
    run_ranks(job_trajectory, 3, "shared", 2, ("v1", "v2", "clip"))
    run_ranks(job_trajectory, 6, "shared", 3, ("lag2",))
