from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic.comm.cluster import AXES
from tests.ranks import free_port, run_ranks


def job_position() -> tuple[int, ...]:
    mesh = laconic.init_mesh("cpu")
    assert mesh.mesh_dim_names == AXES
    cluster = laconic.Cluster.of(mesh)
    assert laconic.Cluster.of(mesh) is cluster
    assert (cluster.device_type, cluster.device) == ("cpu", torch.device("cpu"))
    assert cluster.size == cluster.num_nodes * cluster.num_local
    assert dist.get_process_group_ranks(cluster.all_group) == list(range(cluster.size))
    for groups in (cluster.gather_groups, cluster.reduce_groups):
        for axis, size in (("node", cluster.num_nodes), ("local", cluster.num_local)):
            group = groups[axis]
            if size == 1:
                assert group is None, "an axis of one rank has no peers"
            else:
                assert group is not None
                assert group.size() == size
    if cluster.gather_groups["node"]:
        assert cluster.gather_groups["node"] is not cluster.reduce_groups["node"], "a gather never queues behind a sum"
    return cluster.num_nodes, cluster.num_local, cluster.node_rank, cluster.local_rank, cluster.shard_index


@pytest.mark.parametrize(("num_nodes", "num_local"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3)])
def test_positions_come_from_torchruns_environment(num_nodes: int, num_local: int) -> None:
    found = run_ranks(job_position, num_nodes * num_local, local=num_local)
    for rank, position in enumerate(found):
        node, local = divmod(rank, num_local)
        assert position == (num_nodes, num_local, node, local, local * num_nodes + node)
    assert sorted(position[4] for position in found) == list(range(num_nodes * num_local))


def job_levels() -> list[str]:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    shards = {cluster.global_rank(shard): shard for shard in range(cluster.size)}
    return [cluster.level_to(shards[rank]) for rank in range(cluster.size)]


def test_transfers_between_nodes_cross_the_wire() -> None:
    first, second = ["local"] * 2 + ["node"] * 2, ["node"] * 2 + ["local"] * 2
    assert run_ranks(job_levels, 4, local=2) == [first, first, second, second]


def job_groups() -> tuple[list[int], list[int]]:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node, local = cluster.gather_groups["node"], cluster.gather_groups["local"]
    assert node is not None
    assert local is not None
    return dist.get_process_group_ranks(node), dist.get_process_group_ranks(local)


def test_groups_run_along_the_axes() -> None:
    groups = run_ranks(job_groups, 6, local=3)
    assert groups == [([rank % 3, rank % 3 + 3], [0, 1, 2] if rank < 3 else [3, 4, 5]) for rank in range(6)]


def job_islands() -> tuple[int, int, int, list[int]]:
    mesh = laconic.init_mesh("cpu", islands=2)
    assert mesh.mesh.shape == (2, 2, 1)
    cluster = laconic.Cluster.of(mesh)
    return cluster.size, cluster.num_nodes, cluster.node_rank, dist.get_process_group_ranks(cluster.all_group)


def test_an_island_is_a_cluster_of_its_own() -> None:
    found = run_ranks(job_islands, 4, local=1)
    assert found == [(2, 2, 0, [0, 1]), (2, 2, 1, [0, 1]), (2, 2, 0, [2, 3]), (2, 2, 1, [2, 3])]


def job_other_meshes() -> None:
    two = laconic.Cluster.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")))
    assert (two.num_nodes, two.num_local) == (2, 2)
    flat = laconic.Cluster.of(init_device_mesh("cpu", (4,)))
    assert (flat.num_nodes, flat.num_local) == (4, 1), "one level; without a name it crosses the wire"
    box = laconic.Cluster.of(init_device_mesh("cpu", (4,), mesh_dim_names=("local",)))
    assert (box.num_nodes, box.num_local) == (1, 4)
    given = laconic.Cluster.of(laconic.init_mesh("cpu", nodes=4, local=1))
    assert (given.num_nodes, given.num_local) == (4, 1)
    for mesh in (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c")),
        DeviceMesh("cpu", torch.arange(4).view(1, 1, 2, 2)),
    ):
        with pytest.raises(ValueError, match=r"axes \('island', 'node', 'local'\).*laconic.init_mesh builds one"):
            laconic.Cluster.of(mesh)


def test_meshes_with_other_axes() -> None:
    run_ranks(job_other_meshes, 4, local=2)


def job_bad_sizes() -> None:
    with pytest.raises(ValueError, match=r"1 islands x 2 nodes x 2 local ranks make 4 ranks, but the job has 3"):
        laconic.init_mesh("cpu", nodes=2, local=2)
    with pytest.raises(ValueError, match="make 2 ranks, but the job has 3; start every node with the same"):
        laconic.init_mesh("cpu", local=2)
    with pytest.raises(ValueError, match="positive sizes, got islands=0"):
        laconic.init_mesh("cpu", islands=0)
    with pytest.raises(ValueError, match="positive sizes, got islands=1, nodes=-1"):
        laconic.init_mesh("cpu", nodes=-1)


def test_ranks_that_do_not_fill_the_mesh_are_refused() -> None:
    run_ranks(job_bad_sizes, 3, local=3)


def job_unequal_nodes() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() < 2 else "1"  # one rank on the second node
    with pytest.raises(ValueError, match=r"nodes of unequal size.*\[2, 2, 1\]"):
        laconic.init_mesh("cpu")


def test_nodes_of_unequal_size_are_refused_on_every_rank() -> None:
    run_ranks(job_unequal_nodes, 3, local=3)


def test_without_a_launcher_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ValueError, match="RANK is not set; start the script with `torchrun"):
        laconic.init_mesh("cpu")


def job_starts_the_process_group() -> None:
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(free_port())
    mesh = laconic.init_mesh("cpu")
    assert dist.is_initialized()
    assert mesh.mesh.shape == (1, 1, 1)


def test_the_process_group_is_started_when_needed() -> None:
    run_ranks(job_starts_the_process_group, 1)


def job_not_in_mesh() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("node",))
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="rank 2 is not in the mesh"):
            laconic.Cluster.of(mesh)


def test_a_rank_outside_the_mesh_is_refused() -> None:
    run_ranks(job_not_in_mesh, 3)
