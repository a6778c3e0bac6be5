"""The owners of matrices, and the transfers to them and back; test_family.py has their optimizers on ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import laconic
from laconic.comm.cluster import Cluster
from laconic.layout.bucket import Extent
from laconic.optim import Muon
from laconic.optim.joint import JointParameter
from laconic.optim.muon import cost_of
from laconic.optim.owners import STAY_WITHIN, Matrix, Owners, assign
from laconic.ragged.redistribute import whole_on
from laconic.ragged.tensor import RaggedTensor
from tests.optim.matrices import cut_specs, optimizer_bytes, random_tensors
from tests.support.launch import on_ranks, run_ranks
from tests.support.owner_bytes import moved_elements
from tests.support.sharded_net import Place, part_of

SHAPES = [(7, 5), (12, 33), (33, 12), (20, 20), (1, 9), (9, 1), (16, 4), (5, 40), (0, 3), (6, 6), (31, 8)]


def matrices_of(shapes: list[tuple[int, ...]], cluster: Any, **kwargs: Any) -> list[Matrix]:
    specs = cut_specs(shapes, cluster, **kwargs)
    return [Matrix(spec=spec, cost=cost_of(*spec.shape, steps=5), itemsize=2) for spec in specs]


def test_a_matrix_costs_what_its_transpose_does() -> None:
    assert cost_of(3, 5, steps=2) == cost_of(5, 3, steps=2) == 2 * 9 * (2 * 5 + 3)


# -- the rule ----------------------------------------------------------------------------------------------------------


def cut_apart(costs: list[float], num_shards: int) -> list[Matrix]:
    """Matrices of which every shard holds two rows."""
    specs = cut_specs([(2 * num_shards, 3)] * len(costs), Place(1, num_shards), per_bucket=1)  # type: ignore[arg-type]
    return [Matrix(spec=spec, cost=cost, itemsize=4) for spec, cost in zip(specs, costs, strict=True)]


def best_possible(costs: list[float], num_shards: int) -> float:
    """The least work of the busiest shard, by trying everything."""
    return min(
        max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == shard)
            for shard in range(num_shards)
        )
        for owners in itertools.product(range(num_shards), repeat=len(costs))
    )


@settings(max_examples=30)
@given(costs=st.lists(st.integers(1, 50).map(float), min_size=1, max_size=7), num_shards=st.sampled_from([2, 3]))
def test_work_is_within_a_third_of_the_best_balance(costs: list[float], num_shards: int) -> None:
    loads = [0.0] * num_shards
    owners = assign(cut_apart(costs, num_shards), loads)
    assert sorted(index for index, _ in owners) == list(range(len(costs)))
    for shard in range(num_shards):
        assert loads[shard] == sum(costs[index] for index, owner in owners if owner == shard)
    bound = (4 / 3 - 1 / (3 * num_shards)) * best_possible(costs, num_shards)  # Graham's, for longest first
    assert max(loads) <= bound + 1e-9


def test_costliest_first_then_largest_then_in_order_to_the_rank_that_holds_most() -> None:
    first, second, third = cut_apart([1.0, 5.0, 5.0], 2)
    heavier = Matrix(spec=third.spec, cost=5.0, itemsize=8)
    assert [index for index, _ in assign([first, second, heavier], [0.0, 0.0])] == [2, 1, 0]
    assert [index for index, _ in assign([first, second, third], [0.0, 0.0])] == [1, 2, 0]
    (matrix,) = matrices_of([(7, 5)], Place(1, 3))
    held = [matrix.num_held(shard) for shard in range(3)]
    assert sum(held) == 35
    assert assign([matrix], [0.0] * 3) == [(0, held.index(max(held)))]
    assert assign([matrix], [4.0, 0.0, 4.0])[0][1] == 1
    for shapes, num_shards in (([(4, 4), (4, 6), (6, 6)], 3), ([(50, 50)], 6)):
        matrices = matrices_of(shapes, Place(1, num_shards), is_whole=True)  # type: ignore[arg-type]
        homes = [matrix.home for matrix in matrices]
        assert None not in homes
        assert dict(assign(matrices, [0.0] * num_shards)) == dict(enumerate(homes)), "whole ones stay where they are"


def test_a_whole_matrix_leaves_a_rank_with_far_too_much_work() -> None:
    """Ten buckets of one matrix, which lies in shard 0."""
    matrices = matrices_of([(4, 4)] * 10, Place(1, 5), is_whole=True, per_bucket=1)
    assert {matrix.home for matrix in matrices} == {0}
    loads = [0.0] * 5
    owners = dict(assign(matrices, loads))
    each = matrices[0].cost
    stayed = sum(owner == 0 for owner in owners.values())
    assert stayed * each == STAY_WITHIN * sum(loads) / 5, "as many as STAY_WITHIN allows"
    assert max(loads) == STAY_WITHIN * sum(loads) / 5
    assert min(loads) > 0


def test_later_matrices_are_added_to_the_work_that_is_there() -> None:
    together = cut_apart([9.0, 1.0, 1.0, 1.0], 2)
    owners = Owners()
    owners.add(together[:1])
    owners.add(together[1:])
    assert owners.loads[together[0].spec.cluster] == [9.0, 3.0]


def test_shards_of_other_axes_lie_one_after_the_other_and_are_put_together() -> None:
    """Two matrices of 3 x 4, cut after column 3 and over two ranks and three, of which one holds nothing."""
    whole, columns = torch.arange(24.0).view(2, 3, 4), [slice(0, 3), slice(3, 4)]
    runs = [(0, Extent(7, 18)), (1, Extent(0, 4)), (1, Extent(4, 6)), (0, Extent(0, 7)), (1, Extent(0, 0))]
    boxes = tuple((slice(0, 3), each) for each in columns)
    joint = JointParameter(cluster=Place(1, 5), name="w", shape=(2, 3, 4), boxes=boxes, runs=tuple(runs))  # type: ignore[arg-type]
    for index, wanted in ((None, whole), (0, whole[0]), (1, whole[1])):
        cut = joint.cut(index)
        flat = torch.cat([wanted[..., each].reshape(-1) for each in columns])
        assert torch.equal(cut.flatten(wanted), flat)
        assert torch.equal(cut.assemble(flat), wanted)
        parts = [cut.spec.held_by(shard) for shard in range(5)]
        assert sorted(place for part in parts for place in range(part.start, part.stop)) == list(range(len(flat)))
        for (shard, run), part in zip(runs, parts, strict=True):
            held = whole[..., columns[shard]].reshape(-1)[run.start : run.stop].tolist()
            assert flat[part.start : part.stop].tolist() == [each for each in held if each in flat.tolist()]


# -- there and back ----------------------------------------------------------------------------------------------------


@dataclass
class FunctionWork:
    """A `Work` made of three functions."""

    send: Callable[[], torch.Tensor]
    work: Callable[[torch.Tensor], torch.Tensor]
    receive: Callable[[Any], None]


@pytest.mark.parametrize(("nodes", "local", "is_whole"), [(1, 1, False), (3, 2, False), (2, 2, True)])
def test_there_and_back(nodes: int, local: int, is_whole: bool) -> None:
    results = run_ranks(job_there_and_back, nodes * local, is_whole, local=local)
    assert all(result == results[0] for result in results), "every rank has the same owners"
    assert (results[0][1] == 0) == (nodes * local == 1 or is_whole), "whole matrices move nothing"


def job_there_and_back(is_whole: bool) -> tuple[list[int], int]:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    matrices = matrices_of(SHAPES, cluster, is_whole=is_whole)
    values = [value.bfloat16() for value in random_tensors(SHAPES, seed=1)]
    owners = Owners(round_bytes=100)
    owners.add(matrices)
    got: dict[int, RaggedTensor] = {}
    events: list[str] = []

    def work_on(index: int) -> FunctionWork:
        def send() -> RaggedTensor:
            events.append("s")
            return part_of(values[index], matrices[index].spec)

        def work(whole: torch.Tensor) -> torch.Tensor:
            assert owners.by_matrix[matrices[index]] == cluster.shard_index
            assert torch.equal(whole, values[index])
            events.append("w")
            return -2 * whole + whole.sum()

        def receive(outcome: RaggedTensor) -> None:
            events.append("r")
            got[index] = outcome

        return FunctionWork(send, work, receive)

    def check(chosen: list[int]) -> None:
        got.clear()
        owners.run({matrices[index]: work_on(index) for index in chosen})
        assert got.keys() == {index for index in chosen if matrices[index].numel}
        for index, found in got.items():
            want = -2 * values[index] + values[index].sum()  # needs all elements
            assert (found.spec, found.dtype) == (matrices[index].spec, torch.bfloat16)
            assert torch.equal(found.to_local(), found.spec.part_of(want))

    before = optimizer_bytes(cluster)
    check(list(range(len(SHAPES))))
    moved = optimizer_bytes(cluster) - before
    first = owners._rounds
    own_bytes = [[m.nbytes for m, is_own in zip(each.matrices, each.is_own, strict=True) if is_own] for each in first]
    assert all(sum(own) <= 100 or len(own) == 1 for own in own_bytes)
    assert "".join(events) == events_of_rounds([len(each.matrices) for each in first], list(map(len, own_bytes)))
    assert len(first) > 2
    check(list(reversed(range(len(SHAPES)))))
    assert owners._rounds is first, "planned once"
    elements = sum(moved_elements(m.spec, whole_on(m.spec, owners.by_matrix[m])) for m in matrices)
    assert moved == 2 * 2 * elements
    assert moved <= 2 * sum(matrix.nbytes for matrix in matrices)
    check([0, 2, 9])  # others have no gradient this time
    check([])
    return [owners.by_matrix[matrix] for matrix in matrices], moved


def events_of_rounds(sizes: list[int], num_own: list[int]) -> str:
    """Sends, works and receives in the order of [Note: Rounds]."""
    expected = "s" * sizes[0]
    for k, num_works in enumerate(num_own):
        expected += "s" * sizes[k + 1] if k + 1 < len(sizes) else ""  # the next round comes in ...
        expected += "w" * num_works  # ... while this one is worked on ...
        expected += "r" * sizes[k - 1] if k else ""  # ... and the last one has gone back
    return expected + "r" * sizes[-1]


@on_ranks(4, local=2)
def test_ranks_that_disagree_all_raise() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    matrices = matrices_of([(9, 4), (2, 3)], cluster)
    disagreeing, late = Owners(), Owners()
    disagreeing.add(matrices[: 1 + min(1, dist.get_rank())])
    with pytest.raises(ValueError, match="same parameters in the same order"):
        disagreeing.run({})
    late.add(matrices[:1])
    late.run({})
    late.add(matrices[1:] if dist.get_rank() else [], [cluster])
    with pytest.raises(ValueError, match="same parameters in the same order"):
        late.run({})


@pytest.mark.parametrize("is_late", [False, True])
@on_ranks(4, local=2)
def test_ranks_with_different_groups_all_raise(is_late: bool) -> None:
    """One rank gives a matrix to AdamW that tensor parallelism has cut: at the start, or in a later group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
    laconic.fully_shard(model, mesh=mesh["dp"])
    second, first = (layer.weight for layer in model)
    for parameter in (first, second):
        parameter.grad = torch.zeros_like(parameter)
    group: dict[str, Any] = {"params": [second], "algorithm": "adamw" if dist.get_rank() == 1 else "muon"}
    optimizer = Muon([{"params": [first]}] if is_late else [group, {"params": [first]}])
    if is_late:
        optimizer.step()
        optimizer.add_param_group(group)
    with pytest.raises(ValueError, match="same parameters in the same order"):
        optimizer.step()
