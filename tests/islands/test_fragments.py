"""Fragments: their steps, their parameters, means of their largest values alone, and the islands that hold slices.

The steps of slices are compared with the oracle's in test_local_steps.py.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.codec import TopK
from laconic.islands.all_reduce import IslandGroup, mean_over_islands
from laconic.islands.fragments import SyncSchedule, fragment_of
from laconic.islands.local_steps import LocalSteps
from laconic.islands.outer_optimizer import Holders, OuterFragment
from tests.islands.test_local_steps import BY_HOLDERS, Case, adamw, assert_same_everywhere, flat, sgd, take
from tests.reference.sparse import decoded
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import MlpNet, partial_net


@pytest.mark.parametrize(("every", "fragments", "overlap"), [(1, 1, 0), (6, 1, 5), (6, 3, 1), (8, 4, 0), (100, 4, 24)])
def test_every_fragment_is_sent_and_applied_once_a_round(every: int, fragments: int, overlap: int) -> None:
    schedule = SyncSchedule(every=every, fragments=fragments, overlap=overlap)
    steps = range(schedule.interval, 5 * every + 1, schedule.interval)
    sent = {t: schedule.rounds(t) % fragments for t in steps}
    for begin in range(1, 4 * every):
        window = [sent[t] for t in range(begin, begin + every) if t in sent]
        assert sorted(window) == list(range(fragments)), "each fragment once in every round"
    for t, fragment in sent.items():
        assert [schedule.in_flight(t + late) for late in range(overlap)] == [fragment] * overlap
        assert schedule.in_flight(t + overlap) is None, "it is applied before the next one is sent"
    assert list(sent.values())[: fragments + 1] == [*range(1, fragments), 0, 1 % fragments]


def test_layers_are_assigned_to_fragments() -> None:
    names = ["embed.weight", *(f"model.layers.{i}.mlp.{j}.weight" for i in range(5) for j in range(2)), "head.weight"]
    strided = fragment_of(names, 2)
    assert {n: f for n, f in strided.items() if "layers" not in n} == {"embed.weight": 0, "head.weight": 0}
    assert [strided[f"model.layers.{i}.mlp.1.weight"] for i in range(5)] == [0, 1, 0, 1, 0]
    sequential = fragment_of(names, 2, "sequential")
    assert [sequential[f"model.layers.{i}.mlp.0.weight"] for i in range(5)] == [0, 0, 0, 1, 1]
    assert set(fragment_of(["a.weight"], 1).values()) == {0}
    with pytest.raises(ValueError, match=r"fragments=6, but the model has 5 numbered layers; use at most 5"):
        fragment_of(names, 6)
    with pytest.raises(ValueError, match=r"leaves fragments \[1\] without a parameter: only the layers \[0, 2\]"):
        fragment_of(["0.weight", "2.weight"], 2)


NUMEL = 9001
KEEP = 8


def vector(island: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(island))


@pytest.mark.parametrize("islands", [2, 3])
@on_ranks("islands", local=1)
def test_every_island_gets_the_mean_of_what_all_have_kept() -> None:
    islands = dist.get_world_size()
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=islands, nodes=1, local=1))
    codec = TopK(keep=KEEP)
    of = IslandGroup.of(cluster), codec, cluster.traffic
    mean = mean_over_islands(vector(dist.get_rank()), *of)
    expected = [decoded(vector(island), KEEP) for island in range(islands)]
    torch.testing.assert_close(mean.sent, expected[dist.get_rank()], rtol=1e-2, atol=0)
    torch.testing.assert_close(mean.value, torch.stack(expected).sum(0) / islands, rtol=1e-2, atol=1e-6)
    assert_same_everywhere(mean.value)
    holders = (torch.arange(NUMEL) % 3).float()  # none, one or two islands train a coordinate
    divided = mean_over_islands(vector(dist.get_rank()), *of, divisor=holders)
    total = torch.stack(expected).sum(0)
    torch.testing.assert_close(
        divided.value, torch.where(holders > 0, total / holders.clamp(min=1), 0.0), rtol=1e-2, atol=1e-6
    )


# -- slices: each is averaged over the islands that train it, and only they move it ------------------------------------


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


def test_the_fewer_islands_train_a_slice_the_less_outer_momentum_it_has() -> None:
    """What a user names holds for all slices; what all islands train has DiLoCo's steps."""
    held = {
        holders: laconic.OuterSGD(lr=0.8, momentum=0.9).rates(holders=holders, islands=16) for holders in (16, 4, 1, 0)
    }
    assert held == {16: (0.8, 0.9), 4: (0.8, 0.45), 1: (0.8, 0.225), 0: (0.8, 0.225)}
    named = laconic.OuterSGD(sliced_lr=0.3, sliced_momentum=0.0)
    assert [named.rates(holders=holders, islands=2) for holders in (2, 1)] == [(0.7, 0.9), (0.3, 0.0)]
    groups = [{"params": [nn.Parameter(torch.ones(1))], "holders": holders, "islands": 4} for holders in (4, 1)]
    made = laconic.OuterSGD()(groups).param_groups
    assert [(group["lr"], group["momentum"]) for group in made] == [
        laconic.OuterSGD().rates(holders=holders, islands=4) for holders in (4, 1)
    ]


@on_ranks(2, local=1)
def test_a_state_with_numbers_is_loaded_into_other_objects() -> None:
    case = Case(held=[{0, 1}, {1}], num_slices=2, **BY_HOLDERS)
    adam = partial(torch.optim.AdamW, lr=0.1)
    (model, steps), (_, resumed) = case.start(outer=adam), case.start(outer=adam)
    take(model, steps, range(5))
    resumed.load_state_dict(steps.state_dict())
    for fragment, again in zip(steps.fragments, resumed.fragments, strict=True):
        assert all(map(torch.equal, fragment.vectors(), again.vectors()))
        assert {float(state["step"]) for state in again.optimizer.state.values()} == {1.0}


@on_ranks(2, local=1)
def test_one_slice_is_plain_local_steps_to_the_bit() -> None:
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    torch.manual_seed(0)
    models = [partial_net(0, 1), MlpNet()]
    torch.manual_seed(0)
    models[1] = MlpNet()
    for model in models:
        take(model, LocalSteps(model, adamw(model), mesh=mesh, every=2), range(5))
    assert torch.equal(*map(flat, models))


def job_idle_slices(held: list[int], num_slices: int, folder: str) -> list[str]:
    """What LocalSteps says of slices without a holder: its error, and its warning if islands may join later."""
    mesh = laconic.init_mesh("cpu", islands=len(held))
    said = []
    for options in ({}, {"recovery": folder, "run_id": "idle"}):
        model = partial_net(held[dist.get_rank()], num_slices)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                LocalSteps(model, sgd(model), mesh=mesh, **options)  # type: ignore[arg-type]
            except ValueError as error:
                said.append(str(error))
        said += [str(warning.message) for warning in caught if "slice" in str(warning.message)]
    return said


@pytest.mark.parametrize(
    ("held", "num_slices", "idle", "weights"), [([0, 1], 4, "2, 3", 312), ([0, 2], 3, "1", 208), ([1, 0], 2, "", 0)]
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
