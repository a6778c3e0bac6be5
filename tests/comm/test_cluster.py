"""The mesh, a rank's place in it, and process groups that their members make alone."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic import _compat
from laconic.comm import cluster as cluster_module
from laconic.comm.cluster import AXES, default_mesh
from laconic.comm.groups import destroy_with, new_group
from laconic.rehearse import ranks
from tests.support.launch import on_ranks


@pytest.mark.parametrize(("world", "num_local"), [(1, 1), (2, 1), (2, 2), (6, 3)])
@on_ranks("world", local="num_local")
def test_positions_come_from_torchruns_environment_and_groups_run_along_the_axes(world: int, num_local: int) -> None:
    mesh, rank = laconic.init_mesh("cpu"), dist.get_rank()
    assert mesh.mesh_dim_names == AXES
    cluster, num_nodes = laconic.Cluster.of(mesh), world // num_local
    assert laconic.Cluster.of(mesh) is cluster
    node, local = divmod(rank, num_local)
    assert (cluster.device_type, cluster.device) == ("cpu", torch.device("cpu"))
    assert (cluster.size, cluster.num_nodes, cluster.num_local) == (world, num_nodes, num_local)
    assert (cluster.node_rank, cluster.local_rank, cluster.shard_index) == (node, local, local * num_nodes + node)
    assert dist.get_process_group_ranks(cluster.all_group) == list(range(world))
    own = range(node * num_local, (node + 1) * num_local)
    along = {"node": list(range(local, world, num_local)), "local": list(own)}
    for groups, (axis, members) in product((cluster.gather_groups, cluster.reduce_groups), along.items()):
        group = groups[axis]  # type: ignore[index]
        assert group is None if len(members) == 1 else dist.get_process_group_ranks(group) == members
    if num_nodes > 1:
        assert cluster.gather_groups["node"] is not cluster.reduce_groups["node"], "a gather never queues behind a sum"
    levels = {cluster.global_rank(shard): cluster.level_to(shard) for shard in range(world)}
    assert levels == {other: "local" if other in own else "node" for other in range(world)}


@on_ranks(4, local=1)
def test_an_island_is_a_cluster_of_its_own() -> None:
    mesh, rank = laconic.init_mesh("cpu", islands=2), dist.get_rank()
    assert mesh.mesh.shape == (2, 2, 1)
    cluster = laconic.Cluster.of(mesh)
    assert (cluster.size, cluster.num_nodes, cluster.node_rank) == (2, 2, rank % 2)
    assert dist.get_process_group_ranks(cluster.all_group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert cluster.replicas is None, "groups of them would be made by some ranks of the job alone"
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    assert laconic.Cluster.of(half).replicas is None


def shape(mesh: DeviceMesh) -> tuple[int, int, int]:
    cluster = laconic.Cluster.of(mesh)
    return cluster.num_islands, cluster.num_nodes, cluster.num_local


@on_ranks(4, local=2)
def test_names_of_axes_say_how_to_arrange_a_mesh_and_other_meshes_are_arranged_by_machine() -> None:
    for sizes, names, expected in (
        ((2, 2), ("node", "local"), (1, 2, 2)),
        ((2, 2), None, (1, 2, 2)),  # two axes without names are node and local
        ((4,), ("node",), (1, 4, 1)),
        ((4,), ("local",), (1, 1, 4)),
        ((2, 2), ("island", "local"), (2, 1, 2)),
        ((2, 2), ("island", "node"), (2, 2, 1)),
        ((4,), None, (1, 2, 2)),
        ((4,), ("dp",), (1, 2, 2)),
    ):
        assert shape(init_device_mesh("cpu", sizes, mesh_dim_names=names)) == expected, names
    for mesh in (
        init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c")),
        DeviceMesh("cpu", torch.arange(4).view(1, 1, 2, 2)),
    ):
        with pytest.raises(ValueError, match=r"axes \('island', 'node', 'local'\).*slice the mesh.*laconic.init_mesh"):
            laconic.Cluster.of(mesh)
    with pytest.raises(ValueError, match=r"ascend along each of its axes, got \[3, 2, 1, 0\]"):
        laconic.Cluster.of(DeviceMesh("cpu", [3, 2, 1, 0]))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert shape(two["dp"]) == (1, 2, 1), "every other rank"
    assert shape(two["tp"]) == (1, 1, 2), "a machine"
    cluster, rank = laconic.Cluster.of(two), dist.get_rank()
    assert shape(two) == (2, 1, 2), "the first of two axes replicates"
    assert (cluster.island_rank, cluster.local_rank) == divmod(rank, 2)
    assert dist.get_process_group_ranks(cluster.reduce_groups["island"]) == [rank % 2, rank % 2 + 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "num_local"),
    [
        ([[0, 1, 2, 3, 4, 5, 6, 7]], 4),
        ([[0, 2, 4, 6]], 2),
        ([[1, 5, 9]], 1),
        ([[4, 5, 6]], 3),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 4),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], 2),
        ([[0, 1, 2, 4], [3, 5, 6, 7]], 1),  # three ranks on one machine and one on the other
        ([[0, 1, 4, 5], [6, 7, 8, 12]], 1),  # the second row is not as the first
        ([[0, 4, 5]], 1),
    ],
)
def test_a_row_has_two_levels_if_its_ranks_lie_regularly_on_machines_of_four(
    rows: list[list[int]], num_local: int
) -> None:
    assert cluster_module._side_by_side(torch.tensor(rows), 4) == num_local


@on_ranks(3, local=1)
def test_irregular_meshes_are_one_level() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (3,))
    assert shape(mesh) == (1, 3, 1), "two ranks on the first machine, one on the second"
    os.environ["LOCAL_WORLD_SIZE"] = "3" if dist.get_rank() else "1"
    assert shape(init_device_mesh("cpu", (3,), mesh_dim_names=("a",))) == (1, 3, 1), "the ranks disagree"
    del os.environ["LOCAL_WORLD_SIZE"]
    assert shape(init_device_mesh("cpu", (3,), mesh_dim_names=("b",))) == (1, 3, 1), "no launcher says anything"
    assert laconic.Cluster.of(mesh) is laconic.Cluster.of(init_device_mesh("cpu", (3,), mesh_dim_names=("a",)))


@on_ranks(4, local=2)
def test_groups_are_made_once_for_equal_meshes() -> None:
    mesh, outer = default_mesh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    cluster, part = laconic.Cluster.of(mesh), laconic.Cluster.of(outer["dp"])
    assert part is not cluster
    count = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        assert default_mesh() is mesh
        assert laconic.Cluster.of(laconic.init_mesh("cpu")) is cluster
        assert laconic.Cluster.of(outer["dp"]) is part
    assert len(dist.distributed_c10d._world.pg_map) == count
    dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    assert laconic.Cluster.of(dp) is cluster, "it arranges the same ranks alike"
    assert laconic.Cluster.of(outer) is not cluster
    by_node = laconic.init_mesh("cpu", nodes=4, local=1)
    assert laconic.Cluster.of(by_node) is not cluster
    assert shape(by_node) == (1, 4, 1)


@pytest.mark.parametrize(("size", "num_local", "ring", "to_all"), [(4, 2, 450, 600), (3, 1, 900, 900), (2, 2, 0, 0)])
@on_ranks("size", local="num_local")
def test_replicas_are_islands_of_one_rank_that_share_the_traffic(size: int, ring: int, to_all: int) -> None:
    """`ring` and `to_all` of 900 bytes cross between nodes."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    replicas = cluster.replicas
    assert replicas is cluster.replicas
    assert replicas is not None
    assert (replicas.num_islands, replicas.num_nodes, replicas.num_local) == (size, 1, 1)
    assert (replicas.island_rank, replicas.size) == (dist.get_rank(), 1)
    assert (replicas.cut, cluster.cut, replicas.traffic) == (cluster, None, cluster.traffic)
    assert replicas.replicas is None, "they are replicas"
    for is_ring, crossing in ((True, ring), (False, to_all)):
        expected = {level: nbytes for level, nbytes in (("node", crossing), ("local", 900 - crossing)) if nbytes}
        assert replicas.bytes_by_level("island", 900, is_ring=is_ring) == expected
    assert cluster.bytes_by_level("node", 1000) == {"node": 1000}


def job_new_group() -> None:
    for _ in range(2):  # the process group is started when it is needed
        mesh = laconic.init_mesh("cpu")
        assert mesh.mesh.shape == (1, 1, 1)
        cluster = laconic.Cluster.of(mesh)
        assert cluster.all_group is dist.group.WORLD
        assert list(cluster_module._made_on)[-1] is dist.group.WORLD
        dist.destroy_process_group()


def test_a_new_default_process_group_has_clusters_of_its_own() -> None:
    ranks(job_new_group)


def job_timeout() -> None:
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", timeout=timeout)
    for mesh in (
        laconic.init_mesh("cpu", islands=2),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["dp"],
    ):
        cluster = laconic.Cluster.of(mesh)
        groups = {
            "all": cluster.all_group,
            "islands": cluster.island_group,
            "flags": cluster.flag_group,
            "all flags": cluster.all_flag_group,
            **{f"gather {level}": group for level, group in cluster.gather_groups.items()},
            **{f"reduce {level}": group for level, group in cluster.reduce_groups.items()},
        }
        made = {name: _compat.timeout_of(group) for name, group in groups.items() if group is not None}
        assert len(made) >= 4
        assert made == dict.fromkeys(made, timeout)
    dist.barrier()  # rank 0 holds the store, which others may still read


def test_groups_inherit_the_timeout_of_the_job() -> None:
    ranks(job_timeout, nodes=2, local=2)


@on_ranks(3, local=3)
def test_meshes_that_do_not_fit_the_ranks_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"nodes": 2, "local": 2}, "1 islands x 2 nodes x 2 local ranks make 4 ranks, but the job has 3"),
        ({"local": 2}, "make 2 ranks, but the job has 3; start every node with the same"),
        ({"islands": 0}, "positive sizes, got islands=0"),
        ({"nodes": -1}, "positive sizes, got islands=1, nodes=-1"),
    ]
    for sizes, words in refused:
        with pytest.raises(ValueError, match=words):
            laconic.init_mesh("cpu", **sizes)
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("node",))
    if rank == 2:
        with pytest.raises(ValueError, match="rank 2 is not in the mesh"):
            laconic.Cluster.of(mesh)
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "1"  # one rank on the second node
    with pytest.raises(ValueError, match=r"nodes of unequal size.*\[2, 2, 1\]"):
        laconic.init_mesh("cpu")


def test_without_a_launcher_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in (("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="RANK is not set; start the script with `torchrun"):
        laconic.init_mesh("cpu")


@pytest.mark.machine
@on_ranks(3)
def test_the_default_mesh_follows_the_accelerator() -> None:
    """The default mesh follows the machine's accelerator, and each rank takes the device of its local rank."""
    with pytest.raises(ValueError, match=r"init_mesh\('xpu'\) needs such a device, but torch finds"):
        laconic.init_mesh("xpu")
    chosen: list[int] = []
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda check_available: torch.device("xpu")
    accelerator.device_count = lambda: 2
    accelerator.set_device_index = chosen.append
    accelerator.current_device_index = lambda: chosen[-1]
    mesh = default_mesh()
    assert chosen == [dist.get_rank() % 2]
    assert default_mesh("cpu") is not mesh
    cluster = laconic.Cluster.of(mesh)
    cluster.device_type = "xpu"
    assert cluster.device == torch.device("xpu", dist.get_rank() % 2)


# -- groups ------------------------------------------------------------------------------------------------------------


class Owner:
    pass


@pytest.mark.parametrize("members", [[2, 0], [0, 1, 2]])
@on_ranks(3, local=1)
def test_a_group_is_made_again_although_some_ranks_still_hold_the_last(members: list[int]) -> None:
    """Each round makes a group. Only the first member's goes at once, as where Python collects a cycle early."""
    owners: list[Owner] = []
    for _ in range(3 if dist.get_rank() in members else 0):
        owner, group = Owner(), new_group(members, None)
        assert dist.get_process_group_ranks(group) == sorted(members)
        destroy_with(owner, [group])
        number = torch.tensor([1.0 + dist.get_rank(group)])
        dist.all_reduce(number, group=group)
        assert number == sum(range(1, len(members) + 1))
        if dist.get_rank() != members[0]:
            owners.append(owner)
        del owner, group
        gc.collect()
