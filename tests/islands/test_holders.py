"""Local steps with partial updates: a slice is averaged over the islands that train it, and only they move it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.islands.fragments import fragment_of
from laconic.islands.local_steps import LocalSteps
from laconic.islands.outer_optimizer import Holders, OuterFragment
from tests.reference.local_steps import Islands
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import MlpNet, partial_net
from tests.support.sharded_net import inputs, squared_error


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.full_tensor() if isinstance(p, laconic.RaggedTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def slice_of(name: str) -> int | None:
    return int(name[-1]) if "_slice" in name else None


class _Held(Holders):
    """Two islands; both train whole parameters, one of them trains slice 0, and nobody slice 1."""

    def __init__(self) -> None:
        self.num_islands = 2
        self._slices, self._holders = {"first": 0, "second": 1}, {"first": 1, "second": 0}


@pytest.mark.parametrize(
    "outer",
    [
        partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        partial(torch.optim.SGD, lr=0.7, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.1),
    ],
)
def test_a_slice_whose_holders_have_left_keeps_its_values_and_its_momentum(outer: Any) -> None:
    """Momentum of former holders, or weight decay, would move it, and islands that come back find it elsewhere."""
    parameters = {name: nn.Parameter(torch.ones(3)) for name in ("whole", "first", "second")}
    parameters["second"].requires_grad_(False)
    fragment = OuterFragment(parameters, outer, _Held())
    fragment.create_state()
    with torch.no_grad():
        for vector in fragment.vectors()[1:]:
            vector.fill_(0.5)  # as holders have left it
    before = [vector.clone() for vector in fragment.vectors() if vector.ndim]
    fragment.step(torch.tensor([1.0] * 6 + [0.0] * 3))
    (was, *states), (now, *new) = before, [vector for vector in fragment.vectors() if vector.ndim]
    assert not (now[:6] == was[:6]).any()
    assert torch.equal(now[6:], was[6:])
    kept = [torch.equal(each, state) for each, state in zip(new, states, strict=True)]
    assert kept == [index // (len(states) // 3) == 2 for index in range(len(states))]  # section by section


def job_groups(islands: int, local: int, held: list[set[int]], num_slices: int, sharded: bool) -> None:
    """Sliced and whole parameters take other outer steps; compare every step with the oracle, and resume half-way."""
    mesh = laconic.init_mesh("cpu", islands=islands, nodes=1, local=local)
    island, rank = dist.get_rank() // local, dist.get_rank() % local

    def trains(name: str, which: int) -> bool:
        return slice_of(name) in {None, *held[which]}

    def start(outer: Any) -> tuple[nn.Module, LocalSteps]:
        model = partial_net(min(held[island]), num_slices)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains(name, island))
        if sharded:
            laconic.fully_shard(model, mesh=mesh)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"every": 4, "fragments": 2, "overlap": 1, "codec": "fp32"}
        return model, LocalSteps(model, inner, mesh=mesh, outer=outer, **options)

    model, steps = start(laconic.OuterSGD(lr=0.7, momentum=0.9, sliced_lr=0.5, sliced_momentum=0.0))
    names = [name for name, _ in model.named_parameters()]
    oracle = Islands(
        partial_net(0, num_slices), islands, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), every=4,
        fragments=fragment_of(names, 2), overlap=1, trains=trains, sliced_lr=0.5, sliced_momentum=0.0,
    )  # fmt: skip

    def losses(own: nn.Module, which: int, step: int) -> Tensor:
        return torch.stack([squared_error(own, inputs(step, 2 * which + r)) for r in range(local)]).mean()

    for step in range(7):
        squared_error(model, inputs(step, 2 * island + rank)).backward()
        steps.step()
        steps.zero_grad()
        oracle.step(partial(losses, step=step))
        want = dict(oracle.models[island].named_parameters())
        for name, value in values(model).items():
            torch.testing.assert_close(value, want[name].detach(), atol=2e-5, rtol=1e-4, msg=name)
    counts = {len(oracle.holders[name]) for name in names}
    for fragment in steps.fragments:
        groups = fragment.optimizer.param_groups
        assert {group["holders"] for group in groups} <= counts
        assert [group["lr"] for group in groups] == [0.7 if g["holders"] == islands else 0.5 for g in groups]
        assert sum(p.numel() for group in groups for p in group["params"]) == fragment.flat.numel()

    # An optimizer with numbers in its state, and a state that is loaded into other objects.
    adam = partial(torch.optim.AdamW, lr=0.1)
    (model, steps), (_, resumed) = start(adam), start(adam)
    for step in range(5):
        squared_error(model, inputs(step, 2 * island + rank)).backward()
        steps.step()
        steps.zero_grad()
    resumed.load_state_dict(steps.state_dict())
    for fragment, again in zip(steps.fragments, resumed.fragments, strict=True):
        for vector, value in zip(fragment.vectors(), again.vectors(), strict=True):
            assert torch.equal(vector, value)
        assert {float(s["step"]) for s in again.optimizer.state.values()} == {1.0}


@pytest.mark.parametrize(
    ("islands", "local", "held", "num_slices", "sharded"),
    [(3, 1, [{0}, {1}, {1}], 2, False), (2, 1, [{0, 1}, {1}], 2, False), (2, 2, [{1, 0, 3}, {3, 2}], 4, True)],
)
def test_outer_steps_by_number_of_holders(
    islands: int, local: int, held: list[set[int]], num_slices: int, sharded: bool
) -> None:
    run_ranks(job_groups, islands * local, islands, local, held, num_slices, sharded, local=local)


@on_ranks(2, local=1)
def test_one_slice_is_plain_local_steps_to_the_bit() -> None:
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    torch.manual_seed(0)
    models = [partial_net(0, 1), MlpNet()]
    torch.manual_seed(0)
    models[1] = MlpNet()
    for model in models:
        steps = LocalSteps(model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh=mesh, every=2)
        for step in range(5):
            squared_error(model, inputs(step, dist.get_rank())).backward()
            steps.step()
            steps.zero_grad()
    for (name, got), want in zip(values(models[0]).items(), values(models[1]).values(), strict=True):
        assert torch.equal(got, want), name


def job_idle_slices(held: list[int], num_slices: int, folder: str) -> list[str]:
    """What LocalSteps says of slices without a holder: its error, and its warning if islands may join later."""
    mesh = laconic.init_mesh("cpu", islands=len(held))
    said = []
    for options in ({}, {"recovery": folder, "run_id": "idle"}):
        model = partial_net(held[dist.get_rank()], num_slices)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                LocalSteps(model, optimizer, mesh=mesh, **options)  # type: ignore[arg-type]
            except ValueError as error:
                said.append(str(error))
        said += [str(warning.message) for warning in caught if "slice" in str(warning.message)]
    return said


@pytest.mark.parametrize(
    ("held", "num_slices", "idle", "weights"),
    [([0, 1], 4, "2, 3", 312), ([1, 1], 2, "0", 312), ([0, 2], 3, "1", 208), ([1, 0], 2, "", 0)],
)
def test_slices_that_no_island_trains_are_refused_with_the_count_of_their_weights(
    held: list[int], num_slices: int, idle: str, weights: int, tmp_path: Any
) -> None:
    problem = f"no island trains slice {idle} of {num_slices}, so {weights} weights never change"
    for said in run_ranks(job_idle_slices, 2, held, num_slices, str(tmp_path), local=1):
        if not idle:
            assert said == []
            continue
        error, warning = said
        assert error.startswith(f"{problem}; use at most as many slices as islands")
        assert warning == f"{problem} until an island joins"
